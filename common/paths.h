/* Where the programs of one installation find each other: relative to the running program, in the build tree and under
 * any prefix alike. Any process; allocates nothing. */
#ifndef RV_PATHS_H
#define RV_PATHS_H

#include <stddef.h>

/*
 * Writes the absolute path of an installed program, executor or folder (RV_LIB: "python" is the Python
 * package's).
 * 0, -ENAMETOOLONG, or what readlink of /proc/self/exe says.
 */
enum rv_place { RV_BIN, RV_LIBEXEC, RV_EXECUTORS, RV_LIB };
int rv_installed_path(enum rv_place where, const char *name, char *buffer, size_t size);

#endif
