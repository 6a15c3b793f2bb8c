#include "fault.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "compute.h"
#include "rpc.pb-c.h"
#include "run.h"

#define SLOW_LIMIT_MS (3600u * 1000)
#define SLICE_MS 20u /* a cancel is noticed this soon */
#define EXIT_STATUS 3
#define PAGE 4096u

#define ERROR(name) RESVISOR__V1__ERROR_CODE__ERROR_##name

static int fault_crash(struct rv_run *run)
{
    (void)run;
    (void)signal(SIGSEGV, SIG_DFL); /* a handler, such as a sanitizer's, would turn the signal into an exit */
    (void)raise(SIGSEGV);
    return 0;
}

static int fault_abort(struct rv_run *run)
{
    (void)run;
    (void)signal(SIGABRT, SIG_DFL);
    abort();
}

static int fault_exit(struct rv_run *run)
{
    (void)run;
    _exit(EXIT_STATUS);
}

static int fault_hang(struct rv_run *run)
{
    (void)run;
    while (pause() < 0) /* always: pause only ever returns -1 */
        ;
    return 0;
}

/* The whole process stops, so not even pings are answered. */
static int fault_hang_quietly(struct rv_run *run)
{
    (void)run;
    while (kill(getpid(), SIGSTOP) == 0)
        ;
    return 0;
}

/* True, always. */
static bool wait_ms(uint32_t milliseconds)
{
    struct timespec left = {milliseconds / 1000, (long)(milliseconds % 1000) * 1000000};

    while (clock_nanosleep(CLOCK_MONOTONIC, 0, &left, &left) == EINTR)
        ;
    return true;
}

static int fault_ignore_cancel(struct rv_run *run)
{
    while (wait_ms(SLICE_MS))
        (void)rv_run_advance(run, 0); /* alive, but deaf */
    return 0;
}

static int fault_ignore_term(struct rv_run *run)
{
    (void)signal(SIGTERM, SIG_IGN);
    return fault_ignore_cancel(run);
}

/* Flips the sign of one element per page: the result changes, and stays a number. */
static int scribble(struct rv_run *run, const struct rv_lease *lease, uint64_t *pages)
{
    uint64_t i, offset, count = rv_tensor_count(lease);
    struct rv_tensor tensor;
    int r;

    for (i = 0; i < count; i++) {
        uint32_t step;

        if (rv_tensor_at(lease, i, &tensor) < 0)
            continue;
        step = rv_dtype_bytes(tensor.dtype);
        if (run->compute && step > 0 && (r = run->compute->flip(run, tensor.data, tensor.length, step - 1, PAGE)) < 0)
            return r;
        for (offset = 0; step > 0 && offset + step <= tensor.length; offset += PAGE) {
            if (!run->compute)
                ((uint8_t *)tensor.data)[offset + step - 1] ^= 0x80;
            ++*pages;
        }
    }
    return 0;
}

static int fault_write_weights(struct rv_run *run)
{
    struct rv_execution *execution = run->execution;
    uint64_t written = 0, copied = 0, bytes;
    bool known = true;
    uint32_t i;
    int r;

    for (i = 0; i < execution->lease_count; i++) {
        if ((r = scribble(run, execution->leases[i], &written)) < 0)
            return r;
        if (rv_lease_copied_bytes(execution->leases[i], &bytes) < 0)
            known = false;
        else
            copied += bytes;
    }
    if (known)
        rv_run_describe(run, "copied %llu bytes", (unsigned long long)copied);
    else
        rv_run_describe(run, "copied an unknown number of bytes");
    (void)snprintf(run->report, sizeof(run->report), "%s by %llu writes\n", run->text, (unsigned long long)written);
    return rv_run_advance(run, 0);
}

static int fault_fail(struct rv_run *run)
{
    return rv_fail(run->err, EIO, ERROR(JOB_FAILED), "failed because the parameter fault=fail asked for it");
}

/* A process that outlives its worker's process group. It keeps the worker's descriptors open, as careless code does. */
static int fault_fork_grandchild(struct rv_run *run)
{
    pid_t pid = fork();

    if (pid == 0) {
        (void)setsid();
        for (;;)
            (void)pause();
    }
    return pid < 0 ? rv_fail(run->err, errno, ERROR(JOB_FAILED), "cannot fork: %s", strerror(errno)) : 0;
}

static int fault_slow(struct rv_run *run)
{
    uint32_t left = run->fault.milliseconds, slice;
    int r;

    for (; left > 0; left -= slice) {
        if ((r = rv_run_advance(run, 0)) < 0)
            return r;
        slice = left < SLICE_MS ? left : SLICE_MS;
        (void)wait_ms(slice);
    }
    return 0;
}

static const struct {
    const char *name;
    int (*act)(struct rv_run *run);
} faults[] = {
    [RV_FAULT_NONE] = {"", NULL},
    [RV_FAULT_CRASH] = {"crash", fault_crash},
    [RV_FAULT_ABORT] = {"abort", fault_abort},
    [RV_FAULT_EXIT] = {"exit", fault_exit},
    [RV_FAULT_HANG] = {"hang", fault_hang},
    [RV_FAULT_HANG_QUIETLY] = {"hang-quietly", fault_hang_quietly},
    [RV_FAULT_IGNORE_CANCEL] = {"ignore-cancel", fault_ignore_cancel},
    [RV_FAULT_IGNORE_TERM] = {"ignore-term", fault_ignore_term},
    [RV_FAULT_WRITE_WEIGHTS] = {"write-weights", fault_write_weights},
    [RV_FAULT_FAIL] = {"fail", fault_fail},
    [RV_FAULT_FORK_GRANDCHILD] = {"fork-grandchild", fault_fork_grandchild},
    [RV_FAULT_SLOW] = {"slow", fault_slow},
};
_Static_assert(sizeof(faults) / sizeof(faults[0]) == RV_FAULT_KINDS, "one row per fault");

int rv_fault_parse(const char *text, struct rv_fault *ret_fault)
{
    unsigned long milliseconds;
    char *end;
    unsigned i;

    if (strncmp(text, "slow:", 5) == 0) {
        errno = 0;
        milliseconds = strtoul(text + 5, &end, 10);
        if (text[5] < '0' || text[5] > '9' || *end || errno || milliseconds > SLOW_LIMIT_MS)
            return -EINVAL;
        *ret_fault = (struct rv_fault){RV_FAULT_SLOW, (uint32_t)milliseconds};
        return 0;
    }
    for (i = 0; i < RV_FAULT_KINDS; i++) {
        if (i != RV_FAULT_SLOW && strcmp(text, faults[i].name) == 0) {
            *ret_fault = (struct rv_fault){(enum rv_fault_kind)i, 0};
            return 0;
        }
    }
    return -EINVAL;
}

int rv_fault_step(struct rv_run *run, uint32_t step, uint32_t steps)
{
    bool now = run->fault.kind == RV_FAULT_SLOW || step == (steps > 1 ? 1 : 0);

    return now && faults[run->fault.kind].act ? faults[run->fault.kind].act(run) : 0;
}
