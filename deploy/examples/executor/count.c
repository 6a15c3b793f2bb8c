/*
 * A complete executor: counts the tensors and elements of the job's model, and adds up its F32 values.
 *
 *   cc -std=c17 -shared -fPIC count.c -o count.so $(pkg-config --cflags --libs resvisor)
 *
 * Parameter: `from`, `to`: only tensors of these numbers (the first is 0). Output: count.txt. docs/executors.md
 * explains it.
 */
#include <errno.h>
#include <inttypes.h>
#include <resvisor-executor.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define ERROR_BAD_REQUEST 2 /* of rpc.proto; 0 stands for ERROR_JOB_FAILED */

static int fail(struct rv_failure *err, int number, int code, const char *what, const char *which)
{
    err->code = code;
    (void)snprintf(err->message, sizeof(err->message), "%s: %s", which, what);
    return -number;
}

/* A whole number of tensors, or `standard` where the job does not say. */
static int read_number(struct rv_job *job, const char *key, uint64_t standard, uint64_t *ret_number,
                       struct rv_failure *err)
{
    const char *text = rv_job_param(job, key, NULL);
    char *end;

    if (!text) {
        *ret_number = standard;
        return 0;
    }
    errno = 0;
    *ret_number = strtoull(text, &end, 10);
    if (*text < '0' || *text > '9' || *end != '\0' || errno != 0)
        return fail(err, EINVAL, ERROR_BAD_REQUEST, "a whole number is expected", key);
    return 0;
}

/* Weights are read where they lie: nothing is copied, and the memory is shared with all other workers. */
static double sum(const struct rv_tensor *tensor)
{
    const float *values = tensor->data;
    double total = 0;

    for (uint64_t i = 0; i < tensor->length / sizeof(float); i++)
        total += values[i];
    return total;
}

static uint64_t elements(const struct rv_tensor *tensor)
{
    uint32_t size = rv_dtype_bytes(tensor->dtype);

    return size ? tensor->length / size : 0;
}

static int run(struct rv_execution *execution, struct rv_failure *err)
{
    const struct rv_lease *model;
    struct rv_tensor tensor;
    uint64_t from, to, count = 0, numbers = 0;
    double total = 0;
    char text[256];
    int r;

    if (execution->lease_count == 0)
        return fail(err, EINVAL, ERROR_BAD_REQUEST, "name a model in types.NAME.models or in the job", "no model");
    model = execution->leases[0]; /* the job's model; the type's other models follow */
    if ((r = read_number(execution->job, "from", 0, &from, err)) < 0 ||
        (r = read_number(execution->job, "to", UINT64_MAX, &to, err)) < 0)
        return r;
    if (to > rv_tensor_count(model))
        to = rv_tensor_count(model);
    for (uint64_t i = from; i < to; i++) {
        if (rv_tensor_at(model, i, &tensor) < 0)
            return fail(err, EBADMSG, 0, "a tensor cannot be read", execution->model_names[0]);
        count++;
        numbers += elements(&tensor);
        if (tensor.dtype == RV_F32)
            total += sum(&tensor);
        /* A sign of life, and the moment to learn of a cancel. */
        if (!rv_job_progress(execution->job, i + 1 - from, to - from, "counting"))
            return -ECANCELED;
    }
    (void)snprintf(text, sizeof(text), "%s: %" PRIu64 " tensors, %" PRIu64 " elements, sum of F32 %.6g\n",
                   execution->model_names[0], count, numbers, total);
    return rv_job_add_output(execution->job, "count.txt", "text/plain", text, strlen(text), err);
}

extern const struct rv_executor resvisor_executor;
__attribute__((visibility("default"))) const struct rv_executor resvisor_executor = {
    .abi_version = RV_EXECUTOR_ABI_VERSION,
    .struct_size = sizeof(struct rv_executor),
    .name = "count",
    .version = "1",
    .run = run, /* start and stop may stay empty */
};
