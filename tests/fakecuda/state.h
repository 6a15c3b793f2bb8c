/*
 * The folder FAKECUDA_STATE, through which processes share what a machine shares: memory in use, lost devices, Xids.
 * Without that variable everything is this process' own and nothing can be said from outside. Layout: fakecuda.h.
 */
#ifndef FAKE_STATE_H
#define FAKE_STATE_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include "config.h"

struct fake_record {
    unsigned gpu;
    uint64_t size;
    pid_t pid;
    char kind[16]; /* vmm, alloc, context */
};

bool fake_state_exists(void);
/*
 * Counts size bytes of gpu as in use for as long as *ret_ledger or a copy of it is open in any process, mapped or in
 * flight. -ENOMEM = more than limit would be in use. *ret_ledger is -1 where there is no folder.
 */
int fake_state_charge(unsigned gpu, uint64_t size, uint64_t limit, const char *kind, int *ret_ledger);
void fake_state_uncharge(unsigned gpu, uint64_t size); /* without a folder only */
uint64_t fake_state_used(unsigned gpu);
/* Calls back for each record of gpu that is alive. */
void fake_state_each(unsigned gpu, void (*call)(const struct fake_record *record, void *context), void *context);

int fake_state_lost(unsigned gpu);  /* 0, or the error of a lost device */
bool fake_state_held(unsigned gpu); /* operations do not begin now */
void fake_state_lose(unsigned gpu, int error);
void fake_state_xid(unsigned gpu, int xid);
int fake_state_folder(void); /* descriptor, or -1 */

#endif
