/*
 * The keeper: parent, subreaper and reaper of every process of resvisor. It is what `resvisor start` becomes.
 *
 * It allocates nothing after its start and parses nothing: it and the supervisor exchange the fixed structs below over
 * a SOCK_SEQPACKET pair (both ends are the same binary, so the layout needs no version).
 *
 *   supervisor -> keeper   READY            pass it on to whoever waits for the start
 *   keeper -> supervisor   EXIT{pid, …}     a child of the keeper is a zombie; it stays one, and keeps its pid and
 *                                           group id, until
 *   supervisor -> keeper   ACK{pid}         now its group is killed and it is reaped
 *
 * When the supervisor dies, the keeper ends every process that is left, grandchildren included, and exits.
 */
#ifndef RV_KEEPER_H
#define RV_KEEPER_H

#include <stdint.h>
#include <sys/types.h>

enum rv_keeper_kind { RV_KEEPER_READY = 1, RV_KEEPER_EXIT = 2, RV_KEEPER_ACK = 3 };

struct rv_keeper_message {
    uint32_t kind; /* enum rv_keeper_kind */
    int32_t pid;
    int32_t code;   /* CLD_EXITED, CLD_KILLED or CLD_DUMPED, as waitid says */
    int32_t status; /* exit status or signal */
};

#define RV_KEEPER_FD 3 /* the supervisor's end */

struct rv_keeper_options {
    char *const *supervisor_argv; /* executed as /proc/self/exe */
    int ready_fd;                 /* gets "ready\n" once; -1 = nobody waits */
};

/* Runs until the supervisor has ended. Returns the exit code for the process: the supervisor's own, or
 * RV_EXIT_SUPERVISOR_DIED when a signal ended it. The caller is single-threaded and has no children. */
int rv_keeper_run(const struct rv_keeper_options *options);

#endif
