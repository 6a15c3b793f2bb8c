/*
 * The executor cuda-image without a GPU: its kernels' arithmetic and everything around them, with loops in the place of
 * launches and ordinary memory in the place of the device's. The picture is the CPU's, within a tolerance. What is left
 * to a machine that has a GPU: the launches themselves, and the runtime.
 */
#include <errno.h>
#include <png.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>
#include <cuda_runtime_api.h>

#include "cuda_kernels.h"
#include "executor_host.h"
#include "image_job.h"
#include "rpc.pb-c.h"

#define ERROR(name) RESVISOR__V1__ERROR_CODE__ERROR_##name
#define PATH_BYTES 512
#define PIXEL_TOLERANCE 2 /* of 255 */
#define DEVICE 3

extern const struct rv_executor resvisor_executor;

/* ---- the runtime and the launches, by loops --------------------------------------------------------------------- */

static struct {
    int allocated, fail_malloc, fail_launch, device, pointer_device, reported;
    int32_t device_type;
} gpu;

cudaError_t cudaMalloc(void **memory, size_t size)
{
    if (gpu.fail_malloc)
        return cudaErrorMemoryAllocation;
    gpu.allocated++;
    return (*memory = malloc(size)) ? cudaSuccess : cudaErrorMemoryAllocation;
}

cudaError_t cudaFree(void *memory)
{
    gpu.allocated -= memory != NULL;
    free(memory);
    return cudaSuccess;
}

cudaError_t cudaMemcpy(void *to, const void *from, size_t size, enum cudaMemcpyKind kind)
{
    (void)kind;
    memcpy(to, from, size);
    return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream)
{
    assert_true(stream == cudaStreamLegacy);
    return cudaSuccess;
}

cudaError_t cudaSetDevice(int device)
{
    gpu.device = device;
    return cudaSuccess;
}

const char *cudaGetErrorName(cudaError_t error)
{
    return error == cudaErrorIllegalAddress ? "cudaErrorIllegalAddress" : "?";
}

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *attributes, const void *pointer)
{
    (void)pointer;
    *attributes = (struct cudaPointerAttributes){.type = cudaMemoryTypeDevice, .device = gpu.pointer_device};
    return cudaSuccess;
}

int rv_cuda_product(const struct rv_cuda_matrix *matrix, const float *x, uint32_t count, float alpha, float beta,
                    float *out)
{
    uint32_t i, row;

    for (i = 0; i < count; i++)
        for (row = 0; row < matrix->rows; row++)
            rv_element_product(matrix, x, i, row, alpha, beta, out);
    return gpu.fail_launch;
}

int rv_cuda_convert(const struct rv_cuda_matrix *matrix, uint64_t first, uint64_t count, float *out)
{
    uint64_t i;

    for (i = 0; i < count; i++)
        out[i] = rv_element_weight(matrix, first + i);
    return 0;
}

int rv_cuda_normalise(float *out, const float *x, uint32_t rows, uint32_t width)
{
    uint32_t row;

    for (row = 0; row < rows; row++)
        rv_element_normalise(out, x, row, width);
    return 0;
}

int rv_cuda_activate(float *x, uint64_t count)
{
    uint64_t i;

    for (i = 0; i < count; i++)
        x[i] = rv_element_activate(x[i]);
    return 0;
}

int rv_cuda_convolve(const struct rv_cuda_convolution *c, const float *in, float *out)
{
    uint32_t output, y, x;

    for (output = 0; output < c->outputs; output++)
        for (y = 0; y < c->height; y++)
            for (x = 0; x < c->width; x++)
                *out++ = rv_element_convolve(c, in, output, y, x);
    return 0;
}

int rv_cuda_flip(void *data, uint64_t first, uint64_t stride, uint64_t count)
{
    uint64_t i;

    for (i = 0; i < count; i++)
        ((uint8_t *)data)[first + i * stride] ^= 0x80;
    return 0;
}

/* ---- what executor_host has not -------------------------------------------------------------------------------- */

int rv_lease_get_info(const struct rv_lease *lease, struct rv_lease_info *info)
{
    (void)lease;
    info->model = "first";
    info->device = gpu.device_type == 2 ? "cuda:3" : "host";
    info->backend = "cuda-vmm";
    info->device_type = gpu.device_type;
    info->device_id = DEVICE;
    return 0;
}

void rv_device_report(struct rv_connection *connection, const struct rv_lease *lease, int error, const char *what)
{
    assert_ptr_equal(connection, &gpu);
    assert_non_null(lease);
    assert_non_null(what);
    gpu.reported = error;
}

/* ---- the stage --------------------------------------------------------------------------------------------------- */

enum { F32, BF16, F16, TEXT, MODELS };
static const char *const kinds[MODELS][2] = {
    {"image", "F32"}, {"image", "BF16"}, {"image", "F16"}, {"text-encoder", "F32"}};
static char folder[] = "/tmp/rv-cuda-compute-XXXXXX";
static struct rv_lease models[MODELS];

static const char *path_of(char path[PATH_BYTES], int model)
{
    (void)snprintf(path, PATH_BYTES, "%s/%d.safetensors", folder, model);
    return path;
}

static int group_setup(void **state)
{
    char command[2 * PATH_BYTES], path[PATH_BYTES];
    int i;

    (void)state;
    if (!mkdtemp(folder))
        return -1;
    for (i = 0; i < MODELS; i++) {
        (void)snprintf(command, sizeof(command), "%s %s --bytes 3MiB --dtype %s %s >/dev/null", RV_MAKE_MODEL,
                       kinds[i][0], kinds[i][1], path_of(path, i));
        if (system(command) != 0 || host_lease_open(path, &models[i]) < 0)
            return -1;
    }
    return 0;
}

static int group_teardown(void **state)
{
    char path[PATH_BYTES];
    int i;

    (void)state;
    for (i = 0; i < MODELS; i++) {
        host_lease_close(&models[i]);
        (void)unlink(path_of(path, i));
    }
    return rmdir(folder);
}

static int test_setup(void **state)
{
    (void)state;
    memset(&gpu, 0, sizeof(gpu));
    gpu.pointer_device = DEVICE;
    gpu.device_type = 2;
    return 0;
}

/* Runs one job by the CPU, or by the executor as the worker would. */
static int run(int model, const char *fault, bool by_gpu, struct rv_job *job, struct rv_failure *err)
{
    static const char *const names[] = {"first", "second"};
    struct rv_lease *leases[] = {&models[model], &models[TEXT]};
    struct rv_execution execution = {sizeof(execution), job, NULL, 2, leases, names, (struct rv_connection *)&gpu};
    int r;

    *err = (struct rv_failure){0};
    *job = (struct rv_job){.keys = {"prompt", "width", "height", "steps", "fault"},
                           .values = {"a red house by the sea", "128", "64", "2", fault},
                           .param_count = fault ? 5 : 4};
    if (!by_gpu)
        return rv_image_run(&execution, NULL, NULL, err);
    assert_int_equal(resvisor_executor.start(&execution.state, err), 0);
    r = resvisor_executor.run(&execution, err);
    resvisor_executor.stop(execution.state);
    assert_int_equal(gpu.allocated, 0);
    return r;
}

static void job_fini(struct rv_job *job)
{
    job->param_count = 0; /* its texts are constants */
    host_job_fini(job);
}

static uint8_t *pixels_of(const struct rv_job *job, size_t *ret_size)
{
    png_image image = {.version = PNG_IMAGE_VERSION};
    uint8_t *pixels;

    assert_true(png_image_begin_read_from_memory(&image, job->outputs[0].data, job->outputs[0].size));
    image.format = PNG_FORMAT_RGB;
    *ret_size = PNG_IMAGE_SIZE(image);
    pixels = malloc(*ret_size);
    assert_non_null(pixels);
    assert_true(png_image_finish_read(&image, NULL, pixels, 0, NULL));
    return pixels;
}

/* The largest difference of any pixel's channel. */
static int difference(const struct rv_job *a, const struct rv_job *b)
{
    size_t size_a, size_b, i;
    uint8_t *pixels_a = pixels_of(a, &size_a), *pixels_b = pixels_of(b, &size_b);
    int most = 0;

    assert_int_equal(size_a, size_b);
    for (i = 0; i < size_a; i++)
        most = abs(pixels_a[i] - pixels_b[i]) > most ? abs(pixels_a[i] - pixels_b[i]) : most;
    free(pixels_a);
    free(pixels_b);
    return most;
}

/* ---- tests ------------------------------------------------------------------------------------------------------- */

static void the_picture_is_the_cpus(void **state)
{
    struct rv_failure err;
    struct rv_job cpu, device;
    int model;

    (void)state;
    for (model = F32; model <= F16; model++) {
        assert_int_equal(run(model, NULL, false, &cpu, &err), 0);
        assert_int_equal(run(model, NULL, true, &device, &err), 0);
        assert_int_equal(gpu.device, DEVICE);
        assert_true(difference(&cpu, &device) <= PIXEL_TOLERANCE);
        assert_int_equal(device.done, cpu.done);
        assert_int_equal(device.total, cpu.total);
        job_fini(&cpu);
        job_fini(&device);
    }
}

static void stores_to_weights_are_made_by_a_kernel(void **state)
{
    struct rv_failure err;
    struct rv_job before, after;

    (void)state;
    assert_int_equal(run(BF16, NULL, true, &before, &err), 0);
    assert_int_equal(run(BF16, "write-weights", true, &after, &err), 0);
    assert_true(difference(&before, &after) > PIXEL_TOLERANCE);
    job_fini(&after);
    assert_int_equal(run(BF16, "write-weights", true, &after, &err), 0); /* flips them back */
    job_fini(&after);
    assert_int_equal(run(BF16, NULL, true, &after, &err), 0);
    assert_int_equal(difference(&before, &after), 0);
    job_fini(&before);
    job_fini(&after);
}

static void an_error_of_the_device_fails_the_job_and_is_reported(void **state)
{
    struct rv_failure err;
    struct rv_job job;

    (void)state;
    gpu.fail_launch = (int)cudaErrorIllegalAddress;
    assert_int_equal(run(F32, NULL, true, &job, &err), -EIO);
    assert_int_equal(err.code, ERROR(DEVICE));
    assert_non_null(strstr(err.message, "700 cudaErrorIllegalAddress"));
    assert_int_equal(gpu.reported, (int)cudaErrorIllegalAddress);
    job_fini(&job);
}

static void no_memory_of_the_device_fails_the_job_and_says_so(void **state)
{
    struct rv_failure err;
    struct rv_job job;

    (void)state;
    gpu.fail_malloc = 1;
    assert_int_equal(run(F32, NULL, true, &job, &err), -ENOMEM);
    assert_int_equal(err.code, ERROR(NO_MEMORY));
    assert_int_equal(gpu.reported, 0);
    job_fini(&job);
}

static void models_that_are_not_on_the_device_are_refused(void **state)
{
    struct rv_failure err;
    struct rv_job job;

    (void)state;
    gpu.device_type = 1;
    assert_int_equal(run(F32, NULL, true, &job, &err), -EINVAL);
    assert_int_equal(err.code, ERROR(CONFIG));
    assert_non_null(strstr(err.message, "set the type's `device`"));
    job_fini(&job);
    gpu.device_type = 2;
    gpu.pointer_device = DEVICE + 1;
    assert_int_equal(run(F32, NULL, true, &job, &err), -EIO);
    assert_int_equal(err.code, ERROR(DEVICE));
    job_fini(&job);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup(the_picture_is_the_cpus, test_setup),
        cmocka_unit_test_setup(stores_to_weights_are_made_by_a_kernel, test_setup),
        cmocka_unit_test_setup(an_error_of_the_device_fails_the_job_and_is_reported, test_setup),
        cmocka_unit_test_setup(no_memory_of_the_device_fails_the_job_and_says_so, test_setup),
        cmocka_unit_test_setup(models_that_are_not_on_the_device_are_refused, test_setup),
    };

    return cmocka_run_group_tests(tests, group_setup, group_teardown);
}
