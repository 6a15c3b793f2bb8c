/*
 * A client that holds a model and reads it whenever it is told to: for what becomes of memory when others die.
 *
 *   gpu-client MODEL DEVICE      attaches, says "attached BYTES BACKEND"; then for each line on standard input it
 * compares every byte with its digest and says "same", "differs TENSOR" or "error NUMBER"
 */
#include <errno.h>
#include <stdio.h>

#include "resvisor.h"

int main(int argc, char **argv)
{
    struct rv_attach_options options = RV_ATTACH_OPTIONS_INIT;
    struct rv_lease_info info = {.struct_size = sizeof(info)};
    struct rv_connection *connection = NULL;
    struct rv_lease *lease = NULL;
    struct rv_failure err = {0};
    const char *tensor = "";
    char line[64];
    int r;

    if (argc != 3) {
        (void)fprintf(stderr, "Usage: gpu-client MODEL DEVICE\n");
        return 2;
    }
    options.device = argv[2];
    if (rv_connect(NULL, 5000, &connection, &err) < 0 || rv_attach(connection, argv[1], &options, &lease, &err) < 0 ||
        rv_lease_get_info(lease, &info) < 0) {
        (void)printf("failed %s\n", err.message);
        return 1;
    }
    (void)printf("attached %llu %s\n", (unsigned long long)info.bytes, info.backend);
    (void)fflush(stdout);
    while (fgets(line, sizeof(line), stdin)) {
        r = rv_lease_verify(lease, &tensor);
        if (r == -EBADMSG)
            (void)printf("differs %s\n", tensor);
        else if (r < 0)
            (void)printf("error %d\n", r);
        else
            (void)printf("same\n");
        (void)fflush(stdout);
    }
    rv_detach(lease);
    rv_disconnect(connection);
    return 0;
}
