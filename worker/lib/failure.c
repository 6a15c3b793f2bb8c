/* Failures, deadlines, and the watch for fork. */
#include <errno.h>
#include <string.h>

#include "clock.h"
#include "internal.h"

_Static_assert(sizeof(((struct rv_failure *)0)->message) == sizeof(((struct rv_error *)0)->message) &&
                   sizeof(((struct rv_failure *)0)->remedy) == sizeof(((struct rv_error *)0)->remedy),
               "the texts have one size inside and outside");

static atomic_uint forks;
static pthread_once_t watch_once = PTHREAD_ONCE_INIT;

int rv_failure_from(struct rv_failure *err, const struct rv_error *error, int r)
{
    if (!err)
        return r;
    if (r >= 0) {
        *err = (struct rv_failure){0};
        return r;
    }
    err->code = error->code ? error->code : ERROR(INTERNAL);
    memcpy(err->message, error->message, sizeof(err->message));
    memcpy(err->remedy, error->remedy, sizeof(err->remedy));
    return r;
}

uint64_t rv_deadline_us(int timeout_ms)
{
    return timeout_ms < 0 ? UINT64_MAX : rv_now_us() + (uint64_t)timeout_ms * RV_MSEC;
}

static void on_fork(void)
{
    atomic_fetch_add_explicit(&forks, 1, memory_order_relaxed);
}

static void watch(void)
{
    (void)pthread_atfork(NULL, NULL, on_fork);
}

unsigned rv_fork_number(void)
{
    (void)pthread_once(&watch_once, watch);
    return atomic_load_explicit(&forks, memory_order_relaxed);
}

bool rv_fork_happened(unsigned number)
{
    return atomic_load_explicit(&forks, memory_order_relaxed) != number;
}
