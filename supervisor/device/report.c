/* The self-test for the supervisor (frames) and for people (text). */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "actors.h"
#include "child.h"
#include "clock.h"
#include "memory.h"
#include "selftest.h"
#include "works.h"

/* ---- frames ----------------------------------------------------------------------------------------------------- */

static int tell_found(int socket, const struct rv_found *found, const struct rv_cuda_info *device)
{
    char name[16], uuid[RV_DEVICE_UUID_TEXT], product[2 * RV_DEVICE_NAME_MAX], capability[24];
    Resvisor__V1__DeviceAttribute attributes[RV_CUDA_ATTRIBUTES_MAX], *rows[RV_CUDA_ATTRIBUTES_MAX];
    Resvisor__V1__DeviceStatus status = RESVISOR__V1__DEVICE_STATUS__INIT;
    Rv__DeviceFound body = RV__DEVICE_FOUND__INIT;
    Rv__Frame message = RV__FRAME__INIT;

    (void)snprintf(name, sizeof(name), "cuda:%u", device->ordinal);
    (void)snprintf(capability, sizeof(capability), "%u.%u", device->major, device->minor);
    status.name = name;
    status.uuid = rv_device_uuid_text(device->uuid, uuid);
    status.product = rv_escape(product, sizeof(product), device->name, strnlen(device->name, sizeof(device->name)));
    status.driver = (char *)found->driver;
    status.capability = capability;
    status.unified = device->integrated;
    status.total_bytes = device->total_bytes;
    for (uint32_t i = 0; i < device->attribute_count && i < RV_CUDA_ATTRIBUTES_MAX; i++) {
        resvisor__v1__device_attribute__init(&attributes[i]);
        attributes[i].number = device->attributes[i].number;
        attributes[i].name = (char *)device->attributes[i].name;
        attributes[i].value = device->attributes[i].value;
        rows[status.n_attributes++] = &attributes[i];
    }
    status.attributes = rows;
    body.device = &status;
    body.uuid = (ProtobufCBinaryData){RV_DEVICE_UUID_SIZE, (uint8_t *)device->uuid};
    body.granularity = device->granularity;
    body.pageable = device->pageable;
    message.body_case = RV__FRAME__BODY_DEVICE_FOUND;
    message.device_found = &body;
    return rv_child_send(socket, &message, NULL, 0);
}

static void tell_row(void *context, const struct rv_cuda_info *device, const struct rv_row *row)
{
    Resvisor__V1__DeviceTest test = RESVISOR__V1__DEVICE_TEST__INIT, *tests[] = {&test};
    Rv__DeviceTests body = RV__DEVICE_TESTS__INIT;
    Rv__Frame message = RV__FRAME__INIT;

    test.backend = (char *)rv_backend_by_id(row->backend)->name;
    test.name = (char *)row->name;
    test.result = (char *)row->result;
    test.detail = (char *)row->detail;
    test.bytes_per_second = row->bytes_per_second;
    test.no_memory = row->no_memory;
    test.duration_us = row->duration_us;
    body.uuid = (ProtobufCBinaryData){RV_DEVICE_UUID_SIZE, (uint8_t *)device->uuid};
    body.n_tests = 1;
    body.tests = tests;
    message.body_case = RV__FRAME__BODY_DEVICE_TESTS;
    message.device_tests = &body;
    (void)rv_child_send(*(const int *)context, &message, NULL, 0);
}

static int tell_done(int socket, const char *reason, const char *driver)
{
    Rv__DeviceDone body = RV__DEVICE_DONE__INIT;
    Rv__Frame message = RV__FRAME__INIT;

    body.reason = (char *)reason;
    body.driver = (char *)driver;
    message.body_case = RV__FRAME__BODY_DEVICE_DONE;
    message.device_done = &body;
    rv_child_finished();
    return rv_child_send(socket, &message, NULL, 0);
}

static bool is_uuid(const ProtobufCBinaryData *bytes, const struct rv_cuda_info *device)
{
    return bytes->len == RV_DEVICE_UUID_SIZE && memcmp(bytes->data, device->uuid, RV_DEVICE_UUID_SIZE) == 0;
}

static bool is_wanted(const Rv__DeviceStart *start, const struct rv_cuda_info *device)
{
    return !start->device || is_uuid(&start->device->uuid, device);
}

static bool is_known(const Rv__DeviceStart *start, const struct rv_found *found, const struct rv_cuda_info *device)
{
    if (strcmp(start->known_driver, found->driver) != 0)
        return false;
    for (size_t i = 0; i < start->n_known; i++)
        if (is_uuid(&start->known[i], device))
            return true;
    return false;
}

int rv_work_test(int socket, const Rv__DeviceStart *start)
{
    static struct rv_found found;
    const char *reason = found.reason;
    uint32_t wanted = 0;
    int r = 0;

    rv_selftest_find(RV_ANSWER_US, &found);
    for (uint32_t i = 0; r == 0 && i < found.count; i++) {
        if (is_wanted(start, &found.devices[i])) {
            r = tell_found(socket, &found, &found.devices[i]);
            wanted++;
        }
    }
    for (uint32_t i = 0; r == 0 && i < found.count; i++)
        if (is_wanted(start, &found.devices[i]) && !is_known(start, &found, &found.devices[i]))
            (void)rv_selftest_run(&found.devices[i], RV_ANSWER_US, tell_row, &socket);
    if (found.count > 0 && wanted == 0)
        reason = "the driver does not see that device";
    if (r == 0)
        r = tell_done(socket, reason, found.driver);
    return r == 0 ? 0 : 1;
}

void rv_tell_event(int socket, const uint8_t *uuid, int32_t error, uint32_t xid, const char *what)
{
    Rv__DeviceEvent body = RV__DEVICE_EVENT__INIT;
    Rv__Frame message = RV__FRAME__INIT;

    body.uuid = (ProtobufCBinaryData){RV_DEVICE_UUID_SIZE, (uint8_t *)uuid};
    body.error = error;
    body.xid = xid;
    body.what = (char *)what;
    message.body_case = RV__FRAME__BODY_DEVICE_EVENT;
    message.device_event = &body;
    (void)rv_child_send(socket, &message, NULL, 0);
}

/* ---- text ------------------------------------------------------------------------------------------------------- */

static const char usage[] =
    "usage: resvisor-device --list\n"
    "       resvisor-device --self-test [cuda:N|GPU-UUID] [--timeout SECONDS]\n"
    "\n"
    "Without arguments it is started by resvisor. --timeout: how long one step of the self-test\n"
    "may take, 1 to 600 (10). Exit codes: 0 every device has a backend and no row failed, else 1.\n";

static void print_device(const struct rv_found *found, const struct rv_cuda_info *device)
{
    char uuid[RV_DEVICE_UUID_TEXT], product[2 * RV_DEVICE_NAME_MAX];

    (void)printf("cuda:%u  %s  %s\n"
                 "        driver %s, compute capability %u.%u, %.1f GiB%s, PCI %s\n",
                 device->ordinal,
                 rv_escape(product, sizeof(product), device->name, strnlen(device->name, sizeof(device->name))),
                 rv_device_uuid_text(device->uuid, uuid), found->driver, device->major, device->minor,
                 (double)device->total_bytes / (double)(1ull << 30), device->integrated ? " unified" : "", device->pci);
}

static void print_attributes(const struct rv_cuda_info *device)
{
    for (uint32_t i = 0; i < device->attribute_count && i < RV_CUDA_ATTRIBUTES_MAX; i++)
        (void)printf("        %3u %-60s %d\n", device->attributes[i].number, device->attributes[i].name,
                     device->attributes[i].value);
    if (device->granularity)
        (void)printf("            granularity of cuda-vmm: %u KiB\n", device->granularity / 1024);
}

static void print_row(void *context, const struct rv_cuda_info *device, const struct rv_row *row)
{
    (void)context;
    (void)device;
    (void)printf("%-9s %-15s %-8s %8.1f ms  %s\n", rv_backend_by_id(row->backend)->name, row->name, row->result,
                 (double)row->duration_us / (double)RV_MSEC, row->detail);
    (void)fflush(stdout);
}

static bool is_named(const struct rv_cuda_info *device, const char *name)
{
    char ordinal[16], uuid[RV_DEVICE_UUID_TEXT];

    (void)snprintf(ordinal, sizeof(ordinal), "cuda:%u", device->ordinal);
    return !name || strcmp(name, ordinal) == 0 || strcmp(name, rv_device_uuid_text(device->uuid, uuid)) == 0;
}

static int print_all(bool list, const char *name, uint64_t answer_us)
{
    static struct rv_found found;
    uint32_t bad = 0, shown = 0;

    rv_selftest_find(answer_us, &found);
    for (uint32_t i = 0; i < found.count; i++) {
        const struct rv_cuda_info *device = &found.devices[i];
        struct rv_verdict verdict;

        if (!is_named(device, name))
            continue;
        shown++;
        print_device(&found, device);
        if (list) {
            print_attributes(device);
            continue;
        }
        (void)printf("%-9s %-15s %-8s %11s  %s\n", "BACKEND", "TEST", "RESULT", "TIME", "DETAIL");
        verdict = rv_selftest_run(device, answer_us, print_row, NULL);
        bad += verdict.failed > 0 || verdict.usable == 0;
    }
    if (shown == 0)
        (void)fprintf(stderr, "resvisor-device: %s\n",
                      found.count ? "the driver does not see that device" : found.reason);
    return shown > 0 && bad == 0 ? 0 : 1;
}

int rv_by_hand(int argc, char **argv)
{
    const char *name = NULL;
    uint64_t seconds = 0;
    bool list = strcmp(argv[1], "--list") == 0;
    int i = 2;

    if (!list && strcmp(argv[1], "--self-test") != 0) {
        (void)fputs(usage, strcmp(argv[1], "--help") == 0 ? stdout : stderr);
        return strcmp(argv[1], "--help") == 0 ? 0 : 2;
    }
    for (; i < argc && !list; i++) {
        char *end = NULL;

        if (strcmp(argv[i], "--timeout") == 0 && i + 1 < argc && seconds == 0) {
            seconds = strtoull(argv[++i], &end, 10);
            if (*end || seconds < 1 || seconds > 600)
                break;
        } else if (argv[i][0] != '-' && !name) {
            name = argv[i];
        } else {
            break;
        }
    }
    if (i < argc) {
        (void)fputs(usage, stderr);
        return 2;
    }
    return print_all(list, name, seconds ? seconds * RV_SEC : RV_ANSWER_US);
}
