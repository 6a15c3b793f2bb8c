/*
 * An executor that looks at models where they lie: copies tensors out, by the library or by the driver itself, and says
 * their digests. For tests of models on devices; works on the machine's memory as well.
 *
 * Job parameters:
 *   tensors=NAME,…     only these (default: all of each model)
 *   read=lib|driver    by rv_tensor_read (default), or by the driver from the tensor's pointer
 *   attach=MODEL@DEVICE,…  attaches further models by a connection of its own; without @DEVICE: on the host
 *   hold=1             keeps what was attached for later jobs, which show it too; drop=1 gives it up first
 *   dlpack=1           takes each tensor as a DLPack tensor; with attach, the leases are detached before it is read
 *   write=1            writes through the mapping by the driver, into the first tensor
 *   report=NUMBER      says that the device of the first model failed with that CUresult
 *   note=FILE, gate=FIFO   as in fault_executor.c, after the reading
 * Of a lease that is revoked no byte is read.
 * Output probe.json: {"pid", "models": [{"name", "device", "backend", "device_type", "device_id", "generation",
 * "bytes", "read_bytes", "waited", "mapping", "revoked", "verified", "matches", "tensors": {NAME: DIGEST}}],
 * "write": {"refused", "error"}, "dlpack": {"tensors", "matches", "read_only", "device_type", "device_id"}}
 */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "lib/dlpack.h"
#include "resvisor-executor.h"
#include "rv_cuda.h"

#define HELD_MAX 16
#define GATE_STEP_MS 20
#define CONNECT_MS 10000
#define DIGEST_TEXT 33

struct seen {
    struct rv_lease *lease;
    char name[256];
};

struct probe {
    struct rv_execution *execution;
    struct rv_failure *err;
    FILE *out;
    struct seen all[HELD_MAX * 2];
    unsigned count;
    struct seen *first; /* on which write, report and the driver work */
};

/* What lives from job to job. */
static struct rv_connection *connection;
static struct seen held[HELD_MAX];
static unsigned held_count;
static struct rv_cuda *cuda;
static struct rv_cuda_device *devices[RV_DEVICES_MAX]; /* by number in this process */

static const char *param(const struct probe *p, const char *key)
{
    return rv_job_param(p->execution->job, key, NULL);
}

static int fail(const struct probe *p, int r, const char *what)
{
    if (!p->err->message[0])
        (void)snprintf(p->err->message, sizeof(p->err->message), "probe: %.400s: %.80s", what, strerror(-r));
    return r;
}

static struct rv_lease_info info_of(const struct rv_lease *lease)
{
    struct rv_lease_info info = {.struct_size = sizeof(info)};

    (void)rv_lease_get_info(lease, &info);
    return info;
}

static bool is_remote(const struct rv_lease_info *info)
{
    return strcmp(info->backend, "memfd") != 0;
}

static void write_text(FILE *out, const char *text)
{
    (void)fputc('"', out);
    for (; *text; text++) {
        if ((unsigned char)*text < 0x20 || *text == '"' || *text == '\\')
            (void)fprintf(out, "\\u%04x", (unsigned)*text);
        else
            (void)fputc(*text, out);
    }
    (void)fputc('"', out);
}

/* ---- the driver itself ---- */

static int open_device(const struct probe *p, int32_t number, struct rv_cuda_device **ret_device)
{
    struct rv_cuda_info info;
    struct rv_error error = {0};
    int r = 0;

    if (number < 0 || number >= (int32_t)RV_DEVICES_MAX)
        return fail(p, -ERANGE, "a device's number");
    if (!devices[number]) {
        r = cuda ? 0 : rv_cuda_open(&cuda, &error);
        if (r == 0)
            r = rv_cuda_device_info(cuda, (uint32_t)number, &info, &error);
        if (r == 0)
            r = rv_cuda_device_open(cuda, info.uuid, &devices[number], &error);
    }
    if (r < 0)
        return fail(p, r, error.message);
    *ret_device = devices[number];
    return 0;
}

static int read_by_driver(const struct probe *p, const struct rv_lease_info *info, const void *data, uint64_t length,
                          void *buffer)
{
    struct rv_cuda_device *device;
    struct rv_error error = {0};
    int r;

    if (!is_remote(info)) {
        memcpy(buffer, data, length);
        return 0;
    }
    r = open_device(p, info->device_id, &device);
    if (r == 0 && (r = rv_cuda_read(device, buffer, (uint64_t)(uintptr_t)data, length, &error)) < 0)
        return fail(p, r, error.message);
    return r;
}

/* ---- tensors ---- */

static void digest_of(const void *data, uint64_t length, uint8_t digest[16], char text[DIGEST_TEXT])
{
    XXH128_canonical_t canonical;

    XXH128_canonicalFromHash(&canonical, XXH3_128bits(data, length));
    memcpy(digest, canonical.digest, sizeof(canonical.digest));
    for (unsigned i = 0; i < sizeof(canonical.digest); i++)
        (void)snprintf(text + 2 * i, 3, "%02x", digest[i]);
}

static bool is_wanted(const struct probe *p, const char *name)
{
    const char *list = param(p, "tensors");
    size_t length = strlen(name);

    if (!list)
        return true;
    for (; *list; list += *list == ',') {
        size_t n = strcspn(list, ",");

        if (n == length && memcmp(list, name, n) == 0)
            return true;
        list += n;
    }
    return false;
}

static int show_tensor(const struct probe *p, const struct seen *seen, const struct rv_tensor *tensor, bool *matches)
{
    struct rv_lease_info info = info_of(seen->lease);
    bool by_driver = strcmp(rv_job_param(p->execution->job, "read", "lib"), "driver") == 0;
    void *bytes = malloc(tensor->length ? tensor->length : 1);
    char text[DIGEST_TEXT];
    uint8_t digest[16];
    int r;

    if (!bytes)
        return fail(p, -ENOMEM, "a tensor's bytes");
    r = by_driver ? read_by_driver(p, &info, tensor->data, tensor->length, bytes)
                  : rv_tensor_read(seen->lease, tensor->name, 0, bytes, tensor->length, p->err);
    if (r == 0) {
        digest_of(bytes, tensor->length, digest, text);
        *matches &= memcmp(digest, tensor->digest, sizeof(digest)) == 0;
        write_text(p->out, tensor->name);
        (void)fprintf(p->out, ": \"%s\"", text);
    }
    free(bytes);
    return r;
}

static int show_model(const struct probe *p, const struct seen *seen)
{
    static const char *const mappings[] = {"auto", "private", "shared"};
    struct rv_lease_info info = info_of(seen->lease);
    struct rv_tensor tensor;
    bool matches = true, any = false, revoked = rv_lease_is_revoked(seen->lease);
    int r = revoked ? -EBADMSG : rv_lease_verify(seen->lease, NULL);

    if (r < 0 && r != -EBADMSG)
        return fail(p, r, "rv_lease_verify");
    (void)fprintf(p->out, "{\"name\": ");
    write_text(p->out, seen->name);
    (void)fprintf(p->out,
                  ", \"device\": \"%s\", \"backend\": \"%s\", \"device_type\": %d, \"device_id\": %d, "
                  "\"generation\": %llu, \"bytes\": %llu, \"read_bytes\": %llu, \"waited\": %s, \"mapping\": \"%s\", "
                  "\"revoked\": %s, \"verified\": %s, \"tensors\": {",
                  info.device, info.backend, (int)info.device_type, (int)info.device_id,
                  (unsigned long long)info.generation, (unsigned long long)info.bytes,
                  (unsigned long long)info.read_bytes, info.waited ? "true" : "false", mappings[info.mapping],
                  revoked ? "true" : "false", r == 0 ? "true" : "false");
    for (uint64_t i = 0; !revoked && i < rv_tensor_count(seen->lease); i++) {
        r = rv_tensor_at(seen->lease, i, &tensor);
        if (r < 0)
            return fail(p, r, "rv_tensor_at");
        if (!is_wanted(p, tensor.name))
            continue;
        (void)fputs(any ? ", " : "", p->out);
        any = true;
        r = show_tensor(p, seen, &tensor, &matches);
        if (r < 0)
            return r;
    }
    (void)fprintf(p->out, "}, \"matches\": %s}", matches && !revoked ? "true" : "false");
    return 0;
}

/* ---- models ---- */

static int add_model(struct probe *p, struct rv_lease *lease, const char *name)
{
    if (p->count == sizeof(p->all) / sizeof(p->all[0]))
        return fail(p, -E2BIG, "too many models");
    p->all[p->count].lease = lease;
    (void)snprintf(p->all[p->count].name, sizeof(p->all[p->count].name), "%s", name);
    p->count++;
    return 0;
}

static void drop(void)
{
    while (held_count > 0)
        rv_detach(held[--held_count].lease);
}

/* text: MODEL or MODEL@DEVICE */
static int attach_one(const struct probe *p, char *text)
{
    struct rv_attach_options options = RV_ATTACH_OPTIONS_INIT;
    char *at = strrchr(text, '@');
    struct rv_lease *lease;
    int r = connection ? 0 : rv_connect(NULL, CONNECT_MS, &connection, p->err);

    if (r < 0)
        return r;
    if (held_count == HELD_MAX)
        return fail(p, -E2BIG, "too many models are held");
    if (at) {
        *at = '\0';
        options.device = at + 1;
    }
    r = rv_attach(connection, text, &options, &lease, p->err);
    if (r < 0)
        return r;
    held[held_count].lease = lease;
    (void)snprintf(held[held_count].name, sizeof(held[held_count].name), "%s", text);
    held_count++;
    return 0;
}

static int attach_more(const struct probe *p)
{
    const char *list = param(p, "attach");
    char *copy, *rest, *one;
    int r = 0;

    if (!list)
        return 0;
    copy = rest = strdup(list);
    if (!copy)
        return fail(p, -ENOMEM, "a list of models");
    while (r == 0 && (one = strsep(&rest, ",")) != NULL)
        r = attach_one(p, one);
    free(copy);
    return r;
}

/* ---- what is tried ---- */

struct kept {
    struct rv_dl_managed_versioned *managed;
    struct rv_lease_info info;
    uint8_t digest[16];
    uint64_t length;
};

static int check_kept(const struct probe *p, const struct kept *kept, bool *matches)
{
    void *bytes = malloc(kept->length ? kept->length : 1);
    char text[DIGEST_TEXT];
    uint8_t digest[16];
    int r = bytes ? read_by_driver(p, &kept->info, kept->managed->dl_tensor.data, kept->length, bytes) : -ENOMEM;

    if (r == 0) {
        digest_of(bytes, kept->length, digest, text);
        *matches &= memcmp(digest, kept->digest, sizeof(digest)) == 0;
    }
    free(bytes);
    return r;
}

/* The texts of info are the lease's: its backend's name is static. */
static int take_packages(const struct probe *p, struct kept *kept, uint64_t max, uint64_t *count)
{
    for (unsigned m = 0; m < p->count; m++) {
        struct rv_tensor tensor;

        for (uint64_t i = 0; rv_tensor_at(p->all[m].lease, i, &tensor) == 0 && *count < max; i++) {
            struct kept *one = &kept[*count];
            int r;

            if (!is_wanted(p, tensor.name))
                continue;
            r = rv_tensor_dlpack(p->all[m].lease, tensor.name, RV_DLPACK_VERSIONED, (void **)&one->managed, p->err);
            if (r < 0)
                return r;
            one->info = info_of(p->all[m].lease);
            one->length = tensor.length;
            memcpy(one->digest, tensor.digest, sizeof(one->digest));
            (*count)++;
        }
    }
    return 0;
}

static int try_dlpack(struct probe *p)
{
    uint64_t max = 0, count = 0;
    bool matches = true;
    struct kept *kept;
    int r;

    for (unsigned m = 0; m < p->count; m++)
        max += rv_tensor_count(p->all[m].lease);
    kept = calloc(max ? max : 1, sizeof(*kept));
    if (!kept)
        return fail(p, -ENOMEM, "DLPack tensors");
    r = take_packages(p, kept, max, &count);
    if (!param(p, "hold"))
        drop(); /* from here on the tensors alone keep the memory */
    for (uint64_t i = 0; r == 0 && i < count; i++)
        r = check_kept(p, &kept[i], &matches);
    if (r == 0 && count > 0)
        (void)fprintf(p->out,
                      ", \"dlpack\": {\"tensors\": %llu, \"matches\": %s, \"read_only\": %s, \"device_type\": %d, "
                      "\"device_id\": %d}",
                      (unsigned long long)count, matches ? "true" : "false",
                      kept[0].managed->flags & RV_DLPACK_READ_ONLY ? "true" : "false",
                      (int)kept[0].managed->dl_tensor.device.device_type,
                      (int)kept[0].managed->dl_tensor.device.device_id);
    for (uint64_t i = 0; i < count; i++)
        kept[i].managed->deleter(kept[i].managed);
    free(kept);
    return r;
}

static int try_write(const struct probe *p)
{
    static const uint8_t byte = 0xa5;
    struct rv_lease_info info = info_of(p->first->lease);
    struct rv_cuda_device *device;
    struct rv_tensor tensor;
    int r;

    if (!is_remote(&info) || rv_tensor_at(p->first->lease, 0, &tensor) < 0 || tensor.length == 0)
        return fail(p, -EINVAL, "there is no tensor on a device to write to");
    r = open_device(p, info.device_id, &device);
    if (r < 0)
        return r;
    r = rv_cuda_write(device, (uint64_t)(uintptr_t)tensor.data, &byte, 1, NULL);
    (void)fprintf(p->out, ", \"write\": {\"refused\": %s, \"error\": %d}", r < 0 ? "true" : "false",
                  r < 0 ? rv_cuda_last_error() : 0);
    return 0;
}

static int try_report(const struct probe *p)
{
    int r = connection ? 0 : rv_connect(NULL, CONNECT_MS, &connection, p->err);

    if (r == 0)
        rv_device_report(connection, p->first->lease, atoi(param(p, "report")), "the probe says so");
    return r;
}

/* Waits for a byte in the FIFO. */
static int wait_at_gate(struct rv_job *job, const char *path)
{
    struct pollfd poller = {.fd = open(path, O_RDONLY | O_NONBLOCK | O_CLOEXEC), .events = POLLIN};
    int r = 0;

    if (poller.fd < 0)
        return -errno;
    for (uint64_t step = 0; r == 0; step++) {
        if (!rv_job_progress(job, step, 0, "at the gate"))
            r = -ECANCELED;
        else if (poll(&poller, 1, GATE_STEP_MS) > 0 && (poller.revents & POLLIN))
            break;
        else if (poller.revents)
            (void)poll(NULL, 0, GATE_STEP_MS); /* no writer: poll does not wait */
    }
    (void)close(poller.fd);
    return r;
}

static void write_note(const char *path, const char *job_id)
{
    int fd = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);

    if (fd < 0)
        return;
    (void)dprintf(fd, "%s %d\n", job_id, (int)getpid());
    (void)close(fd);
}

/* ---- a job ---- */

static int collect(struct probe *p)
{
    int r = 0;

    if (param(p, "drop"))
        drop();
    r = attach_more(p);
    for (uint32_t i = 0; r == 0 && i < p->execution->lease_count; i++)
        r = add_model(p, p->execution->leases[i], p->execution->model_names[i]);
    for (unsigned i = 0; r == 0 && i < held_count; i++)
        r = add_model(p, held[i].lease, held[i].name);
    if (r == 0 && p->count == 0)
        return fail(p, -EINVAL, "there is no model to look at");
    p->first = &p->all[0];
    return r;
}

static int look(struct probe *p)
{
    int r = collect(p);

    (void)fprintf(p->out, "{\"pid\": %d, \"models\": [", (int)getpid());
    for (unsigned i = 0; r == 0 && i < p->count; i++) {
        (void)fputs(i ? ", " : "", p->out);
        r = show_model(p, &p->all[i]);
    }
    (void)fputs("]", p->out);
    if (r == 0 && param(p, "note"))
        write_note(param(p, "note"), rv_job_id(p->execution->job));
    if (r == 0 && param(p, "gate"))
        r = wait_at_gate(p->execution->job, param(p, "gate"));
    if (r == 0 && param(p, "write"))
        r = try_write(p);
    if (r == 0 && param(p, "report"))
        r = try_report(p);
    if (r == 0 && param(p, "dlpack"))
        r = try_dlpack(p);
    (void)fputs("}\n", p->out);
    if (!param(p, "hold"))
        drop();
    return r;
}

static int run(struct rv_execution *execution, struct rv_failure *err)
{
    struct probe p = {.execution = execution, .err = err};
    char *text = NULL;
    size_t size = 0;
    int r;

    p.out = open_memstream(&text, &size);
    if (!p.out)
        return -ENOMEM;
    r = look(&p);
    if (fclose(p.out) != 0 && r == 0)
        r = -ENOMEM;
    if (r == 0)
        r = rv_job_add_output(execution->job, "probe.json", "application/json", text, size, err);
    free(text);
    return r;
}

static void stop(void *state)
{
    (void)state;
    drop();
    rv_disconnect(connection);
    for (unsigned i = 0; i < RV_DEVICES_MAX; i++)
        rv_cuda_device_close(devices[i]);
    rv_cuda_close(cuda);
}

__attribute__((visibility("default"))) const struct rv_executor resvisor_executor = {
    .abi_version = RV_EXECUTOR_ABI_VERSION,
    .struct_size = sizeof(struct rv_executor),
    .name = "probe",
    .version = RV_VERSION,
    .run = run,
    .stop = stop,
    .flags = RV_EXECUTOR_DEVICE_MEMORY,
};
