#include "paths.h"

#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

static const char *const places[] = {
    [RV_BIN] = "bin",
    [RV_LIBEXEC] = "libexec/resvisor",
    [RV_EXECUTORS] = "lib/resvisor/executors",
    [RV_LIB] = "lib/resvisor",
};

int rv_installed_path(enum rv_place where, const char *name, char *buffer, size_t size)
{
    char prefix[PATH_MAX];
    ssize_t n = readlink("/proc/self/exe", prefix, sizeof(prefix) - 1);
    char *cut;
    int m;

    if (n < 0)
        return -errno;
    prefix[n] = '\0';
    /* PREFIX/bin/x or PREFIX/libexec/resvisor/x */
    cut = strstr(prefix, "/libexec/resvisor/");
    if (!cut) {
        cut = strrchr(prefix, '/');
        if (cut) {
            *cut = '\0';
            cut = strrchr(prefix, '/');
        }
    } else {
        for (char *next = cut; (next = strstr(next + 1, "/libexec/resvisor/"));)
            cut = next; /* the last one counts */
    }
    if (!cut)
        return -ENOENT;
    *cut = '\0';
    m = snprintf(buffer, size, "%s/%s/%s", prefix, places[where], name);
    return m < 0 || (size_t)m >= size ? -ENAMETOOLONG : 0;
}
