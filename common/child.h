/*
 * What the supervisor's short programs share: resvisor-loader and resvisor-device. Each has one channel to the
 * supervisor (descriptor RESVISOR_CONTROL_FD, 3 if that is not set) and ends by itself when that closes. Main thread
 * only.
 */
#ifndef RV_CHILD_H
#define RV_CHILD_H

#include <stdint.h>

#include "error.h"
#include "frame.h"

/* No core files (they would hold models), no SIGPIPE, and a higher OOM score than the supervisor. */
void rv_child_set_up(void);

/* For those that read what is not trusted. Not for resvisor-device: after a start of the machine it may be the first to
 * use a device, and the driver then runs its setuid program nvidia-modprobe, which makes /dev/nvidia-uvm. Without that
 * cuInit fails wherever resvisor does not run as root. */
void rv_child_no_new_privileges(void);

/* The channel, or -1: it was started by hand. */
int rv_child_socket(void);

/* Says Hello and waits for the answer. 0, or a negative errno: the supervisor is gone or speaks another version. */
int rv_child_hello(int socket, Rv__Role role, const char *name);

/*
 * From now on the process ends by itself when the other end of the channel closes, whatever its main thread is doing.
 * 0 or negative errno.
 */
int rv_child_watch(int socket);

/* A close from now on is the supervisor's word that it has taken everything: the process ends with 0. */
void rv_child_finished(void);

/* Sends, for as long as it takes. 0 or negative errno. */
int rv_child_send(int socket, const Rv__Frame *message, const int *fds, unsigned fd_count);

/* Waits for one frame of this kind. -ECONNRESET = closed; -ECANCELED = anything else came. */
int rv_child_wait(int socket, Rv__Frame__BodyCase kind, struct rv_frame *ret_frame);

/* Tells why request `id` failed; 0 = what it was started for. */
void rv_child_error(int socket, uint64_t id, const struct rv_error *err);

#endif
