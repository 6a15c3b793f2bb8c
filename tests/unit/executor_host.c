#include "executor_host.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "index.h"

#define LENGTH_BYTES 8u

int host_lease_open(const char *path, struct rv_lease *ret_lease)
{
    int r = 0, fd = open(path, O_RDONLY | O_CLOEXEC);
    struct rv_lease lease = {0};
    struct rv_error err;
    struct stat st;
    uint64_t length;

    if (fd < 0)
        return -errno;
    if (fstat(fd, &st) < 0 || st.st_size <= (off_t)LENGTH_BYTES)
        r = -EINVAL;
    lease.size = r == 0 ? (uint64_t)st.st_size : 0;
    if (r == 0)
        lease.map = mmap(NULL, lease.size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_NORESERVE, fd, 0);
    (void)close(fd);
    if (r < 0 || lease.map == MAP_FAILED)
        return r < 0 ? r : -ENOMEM;
    memcpy(&length, lease.map, sizeof(length));
    r = length <= lease.size - LENGTH_BYTES
            ? rv_safetensors_parse(lease.map + LENGTH_BYTES, length, lease.size, &lease.file, &err)
            : -EBADMSG;
    if (r < 0)
        (void)munmap(lease.map, lease.size);
    else
        *ret_lease = lease;
    return r;
}

void host_lease_close(struct rv_lease *lease)
{
    if (lease->map)
        (void)munmap(lease->map, lease->size);
    rv_safetensors_fini(&lease->file);
    memset(lease, 0, sizeof(*lease));
}

const struct rv_executor *host_executor_load(const char *path)
{
    void *object = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    const struct rv_executor *executor = object ? dlsym(object, "resvisor_executor") : NULL;

    if (!executor)
        (void)fprintf(stderr, "%s\n", dlerror());
    return executor;
}

int host_run(const struct rv_executor *executor, struct rv_lease *const *leases, uint32_t lease_count,
             const char *const *params, uint64_t cancel_at, struct rv_job *job, struct rv_failure *err)
{
    static const char *const names[HOST_LEASES_MAX] = {"first", "second", "third", "fourth"};
    struct rv_execution execution = {sizeof(execution), job, NULL, lease_count, leases, names, NULL};

    *job = (struct rv_job){.cancel_at = cancel_at};
    for (; *params; params++, job->param_count++) {
        const char *equals = strchr(*params, '=');

        job->keys[job->param_count] = strndup(*params, (size_t)(equals - *params));
        job->values[job->param_count] = equals + 1;
    }
    return executor->run(&execution, err);
}

void host_job_fini(struct rv_job *job)
{
    uint32_t i;

    for (i = 0; i < job->param_count; i++)
        free((char *)job->keys[i]);
    for (i = 0; i < job->output_count; i++)
        free(job->outputs[i].data);
    memset(job, 0, sizeof(*job));
}

/* ---- what the executors call ------------------------------------------------------------------------------------ */

int rv_tensor_at(const struct rv_lease *lease, uint64_t i, struct rv_tensor *ret_tensor)
{
    const struct rv_safetensor *tensor = &lease->file.tensors[i];

    if (i >= lease->file.count)
        return -ENOENT;
    *ret_tensor = (struct rv_tensor){
        .name = tensor->name,
        .dtype = (enum rv_dtype)tensor->dtype,
        .rank = tensor->rank,
        .shape = tensor->shape,
        .data = lease->map + lease->file.data_start + tensor->begin,
        .length = tensor->end - tensor->begin,
    };
    return 0;
}

int rv_tensor_find(const struct rv_lease *lease, const char *name, struct rv_tensor *ret_tensor)
{
    uint32_t i;

    for (i = 0; i < lease->file.count; i++) {
        if (strcmp(lease->file.tensors[i].name, name) == 0)
            return rv_tensor_at(lease, i, ret_tensor);
    }
    return -ENOENT;
}

uint64_t rv_tensor_count(const struct rv_lease *lease)
{
    return lease->file.count;
}

uint32_t rv_dtype_bytes(enum rv_dtype dtype)
{
    return dtype == RV_F32 ? 4 : dtype == RV_F16 || dtype == RV_BF16 ? 2 : 1;
}

const char *rv_dtype_text(enum rv_dtype dtype)
{
    return rv_dtype_name((uint32_t)dtype);
}

int rv_lease_copied_bytes(const struct rv_lease *lease, uint64_t *ret_bytes)
{
    (void)lease;
    (void)ret_bytes;
    return -EOPNOTSUPP;
}

uint32_t rv_job_param_count(const struct rv_job *job)
{
    return job->param_count;
}

void rv_job_param_at(const struct rv_job *job, uint32_t i, const char **ret_key, const char **ret_value)
{
    *ret_key = job->keys[i];
    *ret_value = job->values[i];
}

bool rv_job_progress(struct rv_job *job, uint64_t done, uint64_t total, const char *text)
{
    (void)text;
    job->done = done;
    job->total = total;
    job->calls++;
    return job->cancel_at == 0 || job->calls < job->cancel_at;
}

int rv_job_add_output(struct rv_job *job, const char *name, const char *content_type, const void *data, uint64_t size,
                      struct rv_failure *err)
{
    struct host_output *output = &job->outputs[job->output_count];

    (void)err;
    output->data = malloc(size);
    if (!output->data || job->output_count == HOST_OUTPUTS_MAX - 1)
        return -ENOSPC;
    memcpy(output->data, data, size);
    output->size = size;
    (void)snprintf(output->name, sizeof(output->name), "%s", name);
    (void)snprintf(output->type, sizeof(output->type), "%s", content_type);
    job->output_count++;
    return 0;
}
