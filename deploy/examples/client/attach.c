/*
 * A complete client: attaches a model, says what is in it, and shows that a write is its own copy.
 *
 *   cc -std=c17 attach.c -o attach $(pkg-config --cflags --libs resvisor)
 *   ./attach text-encoder
 *
 * docs/libresvisor.md explains it.
 */
#include <inttypes.h>
#include <resvisor.h>
#include <stdio.h>

#define SHOWN 3 /* tensors */

static bool show_progress(uint64_t done, uint64_t total, void *context)
{
    (void)context;
    fprintf(stderr, "loading: %" PRIu64 " of %" PRIu64 " bytes\n", done, total);
    return true; /* false would give up */
}

static int say(const char *what, const struct rv_failure *err)
{
    fprintf(stderr, "%s: %s%s%s\n", what, err->message, err->remedy[0] ? "; " : "", err->remedy);
    return 1;
}

static void show_tensors(const struct rv_lease *lease)
{
    struct rv_tensor tensor;

    for (uint64_t i = 0; i < rv_tensor_count(lease) && i < SHOWN; i++) {
        if (rv_tensor_at(lease, i, &tensor) < 0)
            continue;
        printf("%s: %s [", tensor.name, rv_dtype_text(tensor.dtype));
        for (uint32_t d = 0; d < tensor.rank; d++)
            printf("%s%" PRIu64, d ? ", " : "", tensor.shape[d]);
        printf("], %" PRIu64 " bytes\n", tensor.length);
    }
}

/* Under the private mapping a write copies one page for this process. The pool, and everybody else, sees nothing of it.
 */
static void write_something(const struct rv_lease *lease)
{
    struct rv_tensor tensor;
    uint64_t copied = 0;

    if (rv_tensor_at(lease, 0, &tensor) < 0 || tensor.length == 0)
        return;
    *(unsigned char *)tensor.data ^= 1;
    if (rv_lease_copied_bytes(lease, &copied) == 0)
        printf("copied by this process: %" PRIu64 " bytes\n", copied);
    printf("the pool's own bytes: %s\n", rv_lease_verify(lease, NULL) == 0 ? "unchanged" : "CHANGED");
}

int main(int argc, char **argv)
{
    struct rv_attach_options options = RV_ATTACH_OPTIONS_INIT;
    struct rv_lease_info info = {.struct_size = sizeof(info)};
    struct rv_connection *connection;
    struct rv_lease *lease;
    struct rv_failure err = {0};

    if (argc != 2) {
        fprintf(stderr, "usage: attach MODEL\n");
        return 2;
    }
    if (rv_connect(NULL, 5000, &connection, &err) < 0)
        return say("no connection", &err);
    options.progress = show_progress;
    options.timeout_ms = 600000;
    if (rv_attach(connection, argv[1], &options, &lease, &err) < 0) {
        rv_disconnect(connection);
        return say("no lease", &err);
    }
    if (rv_lease_get_info(lease, &info) == 0)
        printf("%s: generation %" PRIu64 ", %" PRIu64 " tensors, %" PRIu64 " bytes mapped, %" PRIu64 " bytes read\n",
               info.model, info.generation, info.tensors, info.bytes, info.read_bytes);
    show_tensors(lease);
    if (info.mapping == RV_MAPPING_PRIVATE)
        write_something(lease);
    rv_detach(lease);
    rv_disconnect(connection);
    return 0;
}
