/* Time: monotonic microseconds everywhere; wall clock only for people. Any process, any thread. */
#ifndef RV_CLOCK_H
#define RV_CLOCK_H

#include <stdint.h>
#include <sys/time.h>
#include <time.h>

#define RV_MSEC UINT64_C(1000)
#define RV_SEC UINT64_C(1000000)

static inline uint64_t rv_clock_read(clockid_t id)
{
    struct timespec ts = {0};

    (void)clock_gettime(id, &ts); /* cannot fail for the two ids below */
    return (uint64_t)ts.tv_sec * RV_SEC + (uint64_t)ts.tv_nsec / 1000;
}

/* Microseconds since some fixed point; never goes back. */
static inline uint64_t rv_now_us(void)
{
    return rv_clock_read(CLOCK_MONOTONIC);
}

/* Milliseconds since 1970. For people only: it can jump. */
static inline uint64_t rv_wall_ms(void)
{
    return rv_clock_read(CLOCK_REALTIME) / 1000;
}

/* Microseconds as the timers of the event loop want them. */
static inline struct timeval rv_timeval(uint64_t us)
{
    return (struct timeval){(time_t)(us / RV_SEC), (suseconds_t)(us % RV_SEC)};
}

#endif
