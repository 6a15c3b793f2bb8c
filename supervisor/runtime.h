/*
 * The runtime directory: RUNTIME/{lock,control/,rpc/}. Made by `resvisor start`, which holds the lock as long as the
 * keeper lives: so a second one is refused while any process of the first is left. Sockets are removed only if they are
 * sockets of ours; a foreign file is never touched.
 */
#ifndef RV_RUNTIME_H
#define RV_RUNTIME_H

#include "config.h"
#include "error.h"

/*
 * Makes and checks the directories and takes the lock. On success the lock's descriptor (O_CLOEXEC) is returned.
 * Errors: ERROR_ALREADY_RUNNING with the pid that holds it; ERROR_CONFIG when a directory is not ours or open to
 * others.
 */
int rv_runtime_open(const struct rv_config *config, struct rv_error *err);

/* Removes stale sockets of an earlier run, under the lock. ERROR_CONFIG when something else is in a socket's place. */
int rv_runtime_clean(const char *runtime_dir, struct rv_error *err);

/* Removes our sockets and the lock file, under the lock. Allocates nothing: the keeper's last act. */
void rv_runtime_close(const char *runtime_dir, int lock);

#endif
