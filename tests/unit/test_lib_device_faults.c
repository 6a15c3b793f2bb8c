/*
 * libresvisor when the driver fails: each call of each function fails once, in a process that keeps the driver open, on
 * its double (tests/fakecuda). Whatever fails, an attach or a read says so or does without, the lease is given back,
 * no descriptor is left, and what comes next works.
 */
#include "device_double.h"

#include <errno.h>
#include <sys/stat.h>

#include "cuda/driver.h"
#include "lib/dlpack.h"

#define CALLS_MAX 40 /* of one function in one use; more would mean that the end is never reached */

static const char *const functions[] = {
#define X(name, version, needed) "cu" #name,
    RV_CUDA_FUNCTIONS(X)
#undef X
};
#define FUNCTIONS (sizeof(functions) / sizeof(functions[0]))

/* Functions that give back, or that closing begins with: their failure is a leak by itself. */
static bool gives_back(const char *function)
{
    static const char *const names[] = {
        "cuMemRelease",    "cuMemUnmap",     "cuMemAddressFree",          "cuMemFreeHost",   "cuIpcCloseMemHandle",
        "cuStreamDestroy", "cuEventDestroy", "cuDevicePrimaryCtxRelease", "cuCtxGetCurrent", "cuCtxSetCurrent",
    };

    for (unsigned i = 0; i < sizeof(names) / sizeof(names[0]); i++)
        if (strcmp(names[i], function) == 0)
            return true;
    return false;
}

static char folder[] = "/tmp/rv-test-XXXXXX";

static void set_fault(const char *function, unsigned nth, int error)
{
    char path[128], next[128];
    FILE *file;

    (void)snprintf(path, sizeof(path), "%s/faults", folder);
    (void)snprintf(next, sizeof(next), "%s/faults.new", folder);
    file = fopen(next, "we");
    CHECK(file);
    if (function) /* the Xid is how the test knows that it happened */
        (void)fprintf(file, "fault %s nth=%u error=%d xid=0:13\n", function, nth, error);
    CHECK(fclose(file) == 0 && rename(next, path) == 0);
}

/* Bytes of the file that the double writes when a fault has happened. */
static off_t happened(void)
{
    char path[128];
    struct stat st;

    (void)snprintf(path, sizeof(path), "%s/xid", folder);
    return stat(path, &st) == 0 ? st.st_size : 0;
}

/* Answers whatever is asked until the connection ends; each lease must be given back once. */
static void serve_any(int socket)
{
    uint64_t given = 0, back = 0;

    double_hello(socket, RV_PROTOCOL_VERSION);
    for (;;) {
        struct rv_frame got = RV_FRAME_INIT;

        if (rv_frame_wait(socket, &got, DOUBLE_WAIT_US) != 1)
            break;
        if (got.message->body_case == RV__FRAME__BODY_ATTACH)
            double_send_lease(socket, got.message->id, ++given, &on_device.model, device_reply);
        else if (got.message->body_case == RV__FRAME__BODY_DETACH)
            back++;
        else
            assert_int_equal(got.message->body_case, RV__FRAME__BODY_DEVICE_EVENT);
        rv_frame_fini(&got);
    }
    assert_int_equal(given, back);
}

/* Everything that is done with a lease. 0, or the first error, which must have its words. */
static int use(struct rv_connection *connection)
{
    struct rv_dl_managed *managed = NULL;
    struct rv_lease *lease = NULL, *second = NULL;
    struct rv_failure err = {0};
    uint8_t bytes[300];
    int r = rv_attach(connection, "m", NULL, &lease, &err);

    if (r < 0) {

        CHECK(!lease && err.code != 0 && err.message[0]);
        return r;
    }
    r = rv_tensor_read(lease, "b", 0, bytes, sizeof(bytes), &err);
    CHECK(r == 0 ? bytes[1] == (uint8_t)(4097 * 7 + 1) : err.code != 0 && err.message[0]);
    if (r == 0)
        r = rv_attach(connection, "m", NULL, &second, &err); /* the same mapping again */
    if (r == 0)
        r = rv_tensor_dlpack(second, "b", 0, (void **)&managed, &err);
    if (r == 0)
        r = rv_lease_verify(second, NULL);
    rv_detach(lease);
    rv_detach(second);
    if (managed)
        managed->deleter(managed);
    return r;
}

static void sweep(int error)
{
    struct rv_connection *connection;
    struct double_server d;
    char command[64];
    unsigned hits = 0;
    int before;

    double_start(&d, serve_any);
    connection = connect_to(&d);
    CHECK(use(connection) == 0);
    before = open_descriptors();
    for (unsigned i = 0; i < FUNCTIONS; i++) {
        for (unsigned nth = 1; nth < CALLS_MAX; nth++) {
            off_t seen = happened();
            int r;

            set_fault(functions[i], nth, error);
            (void)use(connection);
            set_fault(NULL, 0, 0);
            if (happened() == seen)
                break;
            hits++;

            r = use(connection);
            if (r != 0 || (!gives_back(functions[i]) && open_descriptors() > before)) {
                (void)fprintf(stderr, "call %u of %s with error %d: the next use gives %d, %d descriptors and not %d\n",
                              nth, functions[i], error, r, open_descriptors(), before);
                _exit(1);
            }
            before = gives_back(functions[i]) ? open_descriptors() : before;
        }
    }
    CHECK(hits >= CALLS_MAX - 2); /* so many calls has one use at least: the double is really asked */
    rv_disconnect(connection);
    double_stop(&d);
    (void)snprintf(command, sizeof(command), "rm -r '%s'", folder);
    CHECK(system(command) == 0);
}

static void sweep_vmm(int error)
{
    CHECK(mkdtemp(folder));
    (void)setenv("FAKECUDA_STATE", folder, 1);
    (void)setenv("FAKECUDA", "late 0", 1);
    vmm_model_make(&on_device);
    rv_cuda_device_close(test_device); /* contexts end with the last lease then */
    sweep(error);
}

static void sweep_ipc(int error)
{
    struct holder holder;

    CHECK(mkdtemp(folder));
    (void)setenv("FAKECUDA_STATE", folder, 1);
    (void)setenv("FAKECUDA", "device no-vmm; late 0", 1);
    ipc_model_make(&on_device, &holder);
    rv_cuda_device_close(test_device);
    sweep(error);
    holder_end(&holder);
}

CASE(any_call_that_fails_with_a_broken_context_ends_one_use_of_vmm)
{
    sweep_vmm(719);
}

CASE(any_call_that_fails_for_want_of_memory_ends_one_use_of_vmm)
{
    sweep_vmm(2);
}

CASE(any_call_that_fails_ends_one_use_of_ipc)
{
    sweep_ipc(1);
}

static int run(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(any_call_that_fails_with_a_broken_context_ends_one_use_of_vmm),
        cmocka_unit_test(any_call_that_fails_for_want_of_memory_ends_one_use_of_vmm),
        cmocka_unit_test(any_call_that_fails_ends_one_use_of_ipc),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}

int main(int argc, char **argv)
{
    return device_double_main(argc, argv, run);
}
