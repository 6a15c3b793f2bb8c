/* Any bytes as a configuration file, and as a flag: a verdict, never a fault; what is accepted can be shown. */
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "config.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* Bytes up to a first NUL are a flag, the rest is the file. */
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    const uint8_t *nul = memchr(data, '\0', size);
    size_t flag_length = nul ? (size_t)(nul - data) : 0;
    char *flag = strndup((const char *)data, flag_length);
    const char *sets[] = {flag, NULL};
    char path[64];
    struct rv_config_sources sources = {path, flag_length ? sets : NULL};
    struct rv_config *config = NULL;
    static FILE *nowhere;
    int fd = memfd_create("config", MFD_CLOEXEC);

    if (!nowhere)
        nowhere = fopen("/dev/null", "w");
    if (fd < 0 || !flag || !nowhere)
        abort();
    if (nul) {
        size -= flag_length + 1;
        data = nul + 1;
    }
    if (write(fd, data, size) != (ssize_t)size)
        abort();
    (void)snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
    if (rv_config_load(&sources, nowhere, &config) == 0) {
        rv_config_show(config, nowhere, false);
        rv_config_show(config, nowhere, true);
        rv_config_destroy(config);
    }
    (void)close(fd);
    free(flag);
    return 0;
}
