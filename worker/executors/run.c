#include "run.h"

#include <cblas.h>
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "rpc.pb-c.h"

/* How a product is cut among threads changes the last bits, so the number must not depend on where the worker may run;
 * it is OPENBLAS_NUM_THREADS of the type's environment, or this.
 * More than two gain little: the work waits for memory. */
#define MATRIX_THREADS 2
#define REPORT_NAME "weights-written.txt"

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

int rv_run_add_output(struct rv_run *run, const char *name, const char *content_type, const void *data, uint64_t size)
{
    struct rv_job *job = run->execution->job;
    int r = rv_job_add_output(job, name, content_type, data, size, run->err);

    if (r == 0 && run->report[0])
        r = rv_job_add_output(job, REPORT_NAME, "text/plain", run->report, strlen(run->report), run->err);
    return r;
}

void rv_run_fini(struct rv_run *run)
{
    free(run->panel);
    run->panel = NULL;
}

void rv_matrix_setup(void)
{
    if (!getenv("OPENBLAS_NUM_THREADS")) /* the library has read it already */
        openblas_set_num_threads(MATRIX_THREADS);
}

int rv_executor_start(void **ret_state, struct rv_failure *err)
{
    (void)err;
    rv_matrix_setup();
    *ret_state = NULL;
    return 0;
}
