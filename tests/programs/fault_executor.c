/*
 * An executor that misbehaves on request: the fault menu of the tests. It uses the public headers only.
 *
 * Environment (types.NAME.env):
 *   FAULT_START       exit, abort, hang, deaf (ignores SIGTERM), grandchild: what happens at start
 *   FAULT_START_FILE  only while this file exists
 * Job parameters:
 *   note=FILE         appends "JOB PID" to it when the job begins: counts how often a job ran
 *   gate=FIFO         waits, showing signs of life, until something is written into the FIFO
 *   fault=crash|abort|exit|hang|fail|deaf|write|grandchild   after the gate
 *   output_bytes=N    adds an output of N bytes, byte i = i * 31 mod 251
 * Each job that ends well adds report.json: lease count, tensors, FNV-1a of all tensor bytes, bytes copied, digests.
 */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "resvisor-executor.h"

#define GATE_STEP_MS 20
#define EXIT_ON_REQUEST 7
#define OUTPUT_FACTOR 31u
#define OUTPUT_MODULUS 251u
#define FNV_START UINT64_C(0xcbf29ce484222325)
#define FNV_PRIME UINT64_C(0x100000001b3)

/* Blocks for ever without a sign of life; SIGTERM still ends it. */
__attribute__((noreturn)) static void hang(void)
{
    for (;;)
        (void)pause();
}

/* A process that left the worker's group and session and ignores the polite signals. */
static int make_grandchild(void)
{
    pid_t pid = fork();

    if (pid < 0)
        return -errno;
    if (pid == 0) {
        (void)setsid();
        (void)signal(SIGTERM, SIG_IGN);
        (void)signal(SIGHUP, SIG_IGN);
        hang();
    }
    return 0;
}

static void make_deaf(void)
{
    sigset_t set;

    (void)signal(SIGTERM, SIG_IGN);
    (void)sigemptyset(&set);
    (void)sigaddset(&set, SIGTERM);
    (void)sigprocmask(SIG_BLOCK, &set, NULL);
}

/* What both menus know. 0, or does not return. */
static int do_fault(const char *fault)
{
    if (strcmp(fault, "crash") == 0)
        (void)raise(SIGSEGV);
    else if (strcmp(fault, "abort") == 0)
        abort();
    else if (strcmp(fault, "exit") == 0)
        _exit(EXIT_ON_REQUEST);
    else if (strcmp(fault, "hang") == 0)
        hang();
    else if (strcmp(fault, "grandchild") == 0)
        return make_grandchild();
    return 0;
}

static int start(void **ret_state, struct rv_failure *err)
{
    const char *fault = getenv("FAULT_START");
    const char *file = getenv("FAULT_START_FILE");

    (void)err;
    *ret_state = NULL;
    if (!fault || (file && access(file, F_OK) != 0))
        return 0;
    if (strcmp(fault, "deaf") == 0) {
        make_deaf();
        return 0;
    }
    return do_fault(fault);
}

static void write_note(const char *path, const char *job_id)
{
    int fd = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);

    if (fd < 0)
        return;
    (void)dprintf(fd, "%s %d\n", job_id, (int)getpid());
    (void)close(fd);
}

/* Waits for a byte in the FIFO. -ECANCELED when the job was cancelled, unless it is deaf. */
static int wait_at_gate(struct rv_job *job, const char *path, bool deaf)
{
    struct pollfd poller = {.fd = open(path, O_RDONLY | O_NONBLOCK | O_CLOEXEC), .events = POLLIN};
    int r = 0;

    if (poller.fd < 0)
        return -errno;
    for (uint64_t step = 0;; step++) {
        if (!rv_job_progress(job, step, 0, "at the gate") && !deaf) {
            r = -ECANCELED;
            break;
        }
        if (poll(&poller, 1, GATE_STEP_MS) > 0) {
            if (poller.revents & POLLIN)
                break;
            (void)poll(NULL, 0, GATE_STEP_MS); /* the writer has gone: poll no longer waits */
        }
    }
    (void)close(poller.fd);
    return r;
}

static uint64_t sum_bytes(uint64_t sum, const void *data, uint64_t length)
{
    const unsigned char *p = data;

    for (uint64_t i = 0; i < length; i++)
        sum = (sum ^ p[i]) * FNV_PRIME;
    return sum;
}

/* Where the CPU cannot read the memory, the library copies it out through the device's driver. */
static bool is_on_device(const struct rv_lease *lease)
{
    struct rv_lease_info info = {.struct_size = sizeof(info)};

    return rv_lease_get_info(lease, &info) == 0 && strcmp(info.backend, "memfd") != 0;
}

static int sum_tensor(const struct rv_lease *lease, const struct rv_tensor *tensor, bool on_device, uint64_t *sum,
                      struct rv_failure *err)
{
    static unsigned char chunk[256 * 1024];

    if (!on_device) {
        *sum = sum_bytes(*sum, tensor->data, tensor->length);
        return 0;
    }
    for (uint64_t at = 0; at < tensor->length;) {
        uint64_t left = tensor->length - at, n = left < sizeof(chunk) ? left : sizeof(chunk);
        int r = rv_tensor_read(lease, tensor->name, at, chunk, n, err);

        if (r < 0)
            return r;
        *sum = sum_bytes(*sum, chunk, n);
        at += n;
    }
    return 0;
}

/* Turns over every bit of every tensor: only this process may see it. */
static void write_weights(struct rv_execution *execution)
{
    struct rv_tensor tensor;

    for (uint32_t l = 0; l < execution->lease_count; l++)
        for (uint64_t i = 0; rv_tensor_at(execution->leases[l], i, &tensor) == 0; i++)
            for (uint64_t k = 0; k < tensor.length; k++)
                ((unsigned char *)tensor.data)[k] ^= 0xff;
}

static int add_report(struct rv_execution *execution, struct rv_failure *err)
{
    uint64_t sum = FNV_START, tensors = 0, copied = 0;
    bool verified = true;
    char text[256];

    for (uint32_t l = 0; l < execution->lease_count; l++) {
        bool on_device = is_on_device(execution->leases[l]);
        struct rv_tensor tensor;
        uint64_t bytes = 0;

        for (uint64_t i = 0; rv_tensor_at(execution->leases[l], i, &tensor) == 0; i++, tensors++) {
            int r = sum_tensor(execution->leases[l], &tensor, on_device, &sum, err);

            if (r < 0)
                return r;
        }
        if (rv_lease_copied_bytes(execution->leases[l], &bytes) == 0)
            copied += bytes;
        if (rv_lease_verify(execution->leases[l], NULL) < 0)
            verified = false;
    }
    (void)snprintf(text, sizeof(text),
                   "{\"pid\": %d, \"leases\": %u, \"tensors\": %llu, \"fnv\": \"%016llx\", \"copied\": %llu, "
                   "\"verified\": %s}\n",
                   (int)getpid(), (unsigned)execution->lease_count, (unsigned long long)tensors,
                   (unsigned long long)sum, (unsigned long long)copied, verified ? "true" : "false");
    return rv_job_add_output(execution->job, "report.json", "application/json", text, strlen(text), err);
}

static int add_bytes(struct rv_job *job, uint64_t size, struct rv_failure *err)
{
    unsigned char *bytes = malloc(size ? size : 1);
    int r;

    if (!bytes)
        return -ENOMEM;
    for (uint64_t i = 0; i < size; i++)
        bytes[i] = (unsigned char)(i * OUTPUT_FACTOR % OUTPUT_MODULUS);
    r = rv_job_add_output(job, "bytes.bin", "application/octet-stream", bytes, size, err);
    free(bytes);
    return r;
}

static int run(struct rv_execution *execution, struct rv_failure *err)
{
    struct rv_job *job = execution->job;
    const char *fault = rv_job_param(job, "fault", "");
    const char *note = rv_job_param(job, "note", NULL);
    const char *gate = rv_job_param(job, "gate", NULL);
    const char *size = rv_job_param(job, "output_bytes", NULL);
    int r = 0;

    if (note)
        write_note(note, rv_job_id(job));
    if (gate)
        r = wait_at_gate(job, gate, strcmp(fault, "deaf") == 0);
    if (r == 0 && strcmp(fault, "fail") == 0) {
        (void)snprintf(err->message, sizeof(err->message), "failed as the job asked");
        return -EIO;
    }
    if (r == 0)
        r = do_fault(fault);
    if (r < 0)
        return r;
    if (strcmp(fault, "write") == 0)
        write_weights(execution);
    r = add_report(execution, err);
    if (r == 0 && size)
        r = add_bytes(job, strtoull(size, NULL, 10), err);
    return r;
}

__attribute__((visibility("default"))) const struct rv_executor resvisor_executor = {
    .abi_version = RV_EXECUTOR_ABI_VERSION,
    .struct_size = sizeof(struct rv_executor),
    .name = "fault",
    .version = RV_VERSION,
    .start = start,
    .run = run,
    .stop = NULL,
    .flags = RV_EXECUTOR_DEVICE_MEMORY,
};
