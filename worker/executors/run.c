#include "run.h"

#include <cblas.h>
#include <errno.h>
#include <sched.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include "rpc.pb-c.h"

#define MATRIX_THREADS_MAX 2 /* more gain little: the work waits for memory */

int rv_fail(struct rv_failure *err, int number, int code, const char *format, ...)
{
    va_list arguments;

    if (err) {
        *err = (struct rv_failure){.code = code};
        va_start(arguments, format);
        (void)vsnprintf(err->message, sizeof(err->message), format, arguments);
        va_end(arguments);
    }
    return -number;
}

void rv_run_describe(struct rv_run *run, const char *format, ...)
{
    va_list arguments;

    va_start(arguments, format);
    (void)vsnprintf(run->text, sizeof(run->text), format, arguments);
    va_end(arguments);
}

int rv_run_advance(struct rv_run *run, uint64_t steps)
{
    run->done += steps;
    if (rv_job_progress(run->execution->job, run->done, run->total, run->text))
        return 0;
    return rv_fail(run->err, ECANCELED, RESVISOR__V1__ERROR_CODE__ERROR_CANCELLED, "cancelled at %s", run->text);
}

int rv_run_no_memory(struct rv_run *run, const char *what)
{
    return rv_fail(run->err, ENOMEM, RESVISOR__V1__ERROR_CODE__ERROR_NO_MEMORY, "no memory for %s", what);
}

void rv_run_fini(struct rv_run *run)
{
    free(run->panel);
    run->panel = NULL;
}

void rv_matrix_setup(void)
{
    cpu_set_t set;
    int threads = 1;

    if (sched_getaffinity(0, sizeof(set), &set) == 0 && CPU_COUNT(&set) > 1)
        threads = MATRIX_THREADS_MAX;
    openblas_set_num_threads(threads);
}

int rv_executor_start(void **ret_state, struct rv_failure *err)
{
    (void)err;
    rv_matrix_setup();
    *ret_state = NULL;
    return 0;
}
