/* `devices`. */
#include "devices.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "cli.h"
#include "client.h"
#include "config_keys.h"
#include "output.h"

#define TEST_TIMEOUT_US UINT64_C(700000000) /* the supervisor ends a self-test before */
#define SAFE_MAX 1024

static const struct rv_option device_options[] = {
    {"test", 0, NULL, "Test DEVICE again, or all, and wait for the result. Refused while it holds models."},
    {"attributes", 0, NULL, "Also show what the driver says of each device."},
    {0},
};

/* ---- JSON -------------------------------------------------------------------------------------------------------- */

static json_t *test_json(const Resvisor__V1__DeviceTest *test)
{
    json_t *root = json_object();

    rv_json_set_text(root, "backend", test->backend);
    rv_json_set_text(root, "name", test->name);
    rv_json_set_text(root, "result", test->result);
    rv_json_set_text(root, "detail", test->detail);
    rv_json_set_integer(root, "bytes_per_second", test->bytes_per_second);
    rv_json_set_integer(root, "duration_us", test->duration_us);
    (void)json_object_set_new(root, "no_memory", json_boolean(test->no_memory));
    return root;
}

static json_t *process_json(const Resvisor__V1__DeviceProcess *process)
{
    json_t *root = json_object();

    rv_json_set_integer(root, "pid", (uint64_t)process->pid);
    rv_json_set_integer(root, "bytes", process->bytes);
    rv_json_set_text(root, "worker", process->worker);
    return root;
}

static json_t *attribute_json(const Resvisor__V1__DeviceAttribute *attribute)
{
    json_t *root = json_object();

    rv_json_set_integer(root, "number", attribute->number);
    rv_json_set_text(root, "name", attribute->name);
    (void)json_object_set_new(root, "value", json_integer(attribute->value));
    return root;
}

static void set_lists(json_t *root, const Resvisor__V1__DeviceStatus *d)
{
    json_t *tests = json_array(), *processes = json_array(), *attributes = json_array();

    for (size_t i = 0; i < d->n_tests; i++)
        (void)json_array_append_new(tests, test_json(d->tests[i]));
    for (size_t i = 0; i < d->n_processes; i++)
        (void)json_array_append_new(processes, process_json(d->processes[i]));
    for (size_t i = 0; i < d->n_attributes; i++)
        (void)json_array_append_new(attributes, attribute_json(d->attributes[i]));
    (void)json_object_set_new(root, "tests", tests);
    (void)json_object_set_new(root, "processes", processes);
    (void)json_object_set_new(root, "attributes", attributes);
}

json_t *rv_device_json(const Resvisor__V1__DeviceStatus *d)
{
    json_t *root = json_object();

    rv_json_set_text(root, "name", d->name);
    rv_json_set_text(root, "uuid", d->uuid);
    rv_json_set_text(root, "product", d->product);
    rv_json_set_text(root, "state", d->state);
    rv_json_set_text(root, "backend", d->backend);
    rv_json_set_text(root, "reason", d->reason);
    rv_json_set_text(root, "driver", d->driver);
    rv_json_set_text(root, "capability", d->capability);
    (void)json_object_set_new(root, "unified", json_boolean(d->unified));
    (void)json_object_set_new(root, "cached", json_boolean(d->cached));
    rv_json_set_integer(root, "total_bytes", d->total_bytes);
    rv_json_set_integer(root, "pool_bytes", d->pool_bytes);
    rv_json_set_integer(root, "promised_bytes", d->promised_bytes);
    rv_json_set_integer(root, "budget_bytes", d->budget_bytes);
    rv_json_set_integer(root, "used_bytes", d->used_bytes);
    rv_json_set_integer(root, "free_bytes", d->free_bytes);
    rv_json_set_text(root, "memory_source", d->memory_source);
    rv_json_set_integer(root, "holder_pid", d->holder_pid);
    set_lists(root, d);
    return root;
}

static void print_json(const Resvisor__V1__DeviceList *list)
{
    json_t *root = json_object(), *devices = json_array();

    for (size_t i = 0; i < list->n_devices; i++)
        (void)json_array_append_new(devices, rv_device_json(list->devices[i]));
    (void)json_object_set_new(root, "devices", devices);
    rv_json_set_text(root, "reason", list->reason);
    rv_json_print(root);
}

/* ---- tables ------------------------------------------------------------------------------------------------------ */

static const char *escaped(char *buffer, size_t size, const char *text)
{
    return rv_escape(buffer, size, text, strlen(text));
}

static void add_size(struct rv_table *table, uint64_t bytes, bool known)
{
    char text[32];

    rv_format_size(bytes, text, sizeof(text));
    rv_table_add(table, "%s", known ? text : "-");
}

void rv_devices_print_table(Resvisor__V1__DeviceStatus *const *devices, size_t count)
{
    static const char *const titles[] = {"DEVICE",  "STATE", "BACKEND", ">MEMORY", ">OURS",
                                         ">BUDGET", ">FREE", "BY",      "PRODUCT", NULL};
    char safe[SAFE_MAX], name[64];
    struct rv_table table;

    rv_table_init(&table, titles);
    for (size_t i = 0; i < count; i++) {
        const Resvisor__V1__DeviceStatus *d = devices[i];

        rv_table_add(&table, "%s", d->name);
        rv_table_add(&table, "%s", d->state);
        rv_table_add(&table, "%s", *d->backend ? d->backend : "-");
        add_size(&table, d->total_bytes, d->total_bytes != 0);
        add_size(&table, d->pool_bytes, true);
        add_size(&table, d->budget_bytes, d->budget_bytes != 0);
        add_size(&table, d->free_bytes, *d->memory_source != '\0');
        rv_table_add(&table, "%s", *d->memory_source ? d->memory_source : "-");
        rv_table_add(&table, "%s%s", d->product, d->unified ? ", unified memory" : "");
    }
    rv_table_print(&table);
    for (size_t i = 0; i < count; i++)
        printf("%s: %s%s\n", escaped(name, sizeof(name), devices[i]->name),
               escaped(safe, sizeof(safe), devices[i]->reason),
               devices[i]->cached ? " (tested at an earlier start)" : "");
}

static void print_tests(const Resvisor__V1__DeviceList *list)
{
    static const char *const titles[] = {"DEVICE", "BACKEND", "TEST", "RESULT", ">BANDWIDTH", ">TIME", "DETAIL", NULL};
    struct rv_table table;
    size_t rows = 0;
    char time[32];

    for (size_t i = 0; i < list->n_devices; i++)
        rows += list->devices[i]->n_tests;
    if (rows == 0)
        return;
    (void)putchar('\n');
    rv_table_init(&table, titles);
    for (size_t i = 0; i < list->n_devices; i++) {
        for (size_t k = 0; k < list->devices[i]->n_tests; k++) {
            const Resvisor__V1__DeviceTest *t = list->devices[i]->tests[k];

            rv_format_duration(t->duration_us, time, sizeof(time));
            rv_table_add(&table, "%s", k == 0 ? list->devices[i]->name : "");
            rv_table_add(&table, "%s", t->backend);
            rv_table_add(&table, "%s", t->name);
            rv_table_add(&table, "%s", t->result);
            if (t->bytes_per_second)
                rv_table_add(&table, "%.1f GB/s", (double)t->bytes_per_second / 1e9);
            else
                rv_table_add(&table, "%s", "");
            rv_table_add(&table, "%s", time);
            rv_table_add(&table, "%s", t->detail);
        }
    }
    rv_table_print(&table);
}

static void print_processes(const Resvisor__V1__DeviceList *list)
{
    static const char *const titles[] = {"DEVICE", ">PID", ">MEMORY", "OURS", NULL};
    struct rv_table table;
    size_t rows = 0;

    for (size_t i = 0; i < list->n_devices; i++)
        rows += list->devices[i]->n_processes;
    if (rows == 0)
        return;
    (void)putchar('\n');
    rv_table_init(&table, titles);
    for (size_t i = 0; i < list->n_devices; i++) {
        for (size_t k = 0; k < list->devices[i]->n_processes; k++) {
            const Resvisor__V1__DeviceProcess *p = list->devices[i]->processes[k];

            rv_table_add(&table, "%s", k == 0 ? list->devices[i]->name : "");
            rv_table_add(&table, "%" PRIi32, p->pid);
            add_size(&table, p->bytes, p->bytes != 0);
            rv_table_add(&table, "%s", *p->worker ? p->worker : "-");
        }
    }
    rv_table_print(&table);
}

static void print_attributes(const Resvisor__V1__DeviceList *list)
{
    static const char *const titles[] = {"DEVICE", ">NUMBER", "ATTRIBUTE", ">VALUE", NULL};
    char uuid[64], driver[64], capability[64];
    struct rv_table table;

    (void)putchar('\n');
    for (size_t i = 0; i < list->n_devices; i++)
        printf("%s: %s, driver %s, compute capability %s\n", list->devices[i]->name,
               escaped(uuid, sizeof(uuid), list->devices[i]->uuid),
               escaped(driver, sizeof(driver), list->devices[i]->driver),
               escaped(capability, sizeof(capability), list->devices[i]->capability));
    (void)putchar('\n');
    rv_table_init(&table, titles);
    for (size_t i = 0; i < list->n_devices; i++) {
        for (size_t k = 0; k < list->devices[i]->n_attributes; k++) {
            const Resvisor__V1__DeviceAttribute *a = list->devices[i]->attributes[k];

            rv_table_add(&table, "%s", k == 0 ? list->devices[i]->name : "");
            rv_table_add(&table, "%" PRIu32, a->number);
            rv_table_add(&table, "%s", a->name);
            rv_table_add(&table, "%" PRIi32, a->value);
        }
    }
    rv_table_print(&table);
}

static void print_list(const Resvisor__V1__DeviceList *list, bool attributes)
{
    char reason[SAFE_MAX];

    if (list->n_devices == 0) {
        printf("no devices: %s\n", escaped(reason, sizeof(reason), list->reason));
        return;
    }
    rv_devices_print_table(list->devices, list->n_devices);
    print_tests(list);
    print_processes(list);
    if (attributes)
        print_attributes(list);
}

/* ---- command ----------------------------------------------------------------------------------------------------- */

/* For scripts: were all that were tested good? */
static int verdict(const Resvisor__V1__DeviceList *list)
{
    if (list->n_devices == 0)
        return RV_EXIT_NOT_FOUND;
    for (size_t i = 0; i < list->n_devices; i++)
        if (strcmp(list->devices[i]->state, "READY") != 0)
            return RV_EXIT_REFUSED;
    return RV_EXIT_DONE;
}

static int run_devices(int argc, char **argv)
{
    Resvisor__V1__DeviceRequest body = RESVISOR__V1__DEVICE_REQUEST__INIT;
    Rv__Frame request = RV__FRAME__INIT;
    struct rv_frame answer = RV_FRAME_INIT;
    struct rv_client client = RV_CLIENT_INIT;
    struct rv_error err = {0};
    bool attributes = false;
    struct rv_args args;
    const char *value;
    int i, r, exit_code = RV_EXIT_DONE;

    rv_args_init(&args, &rv_command_devices, argc, argv);
    while ((i = rv_args_next(&args, &value)) >= 0) {
        if (strcmp(device_options[i].name, "test") == 0)
            body.action = RESVISOR__V1__DEVICE_ACTION__DEVICE_TEST;
        else
            attributes = true;
    }
    if (i != RV_ARGS_END)
        return rv_args_exit(&args, i);
    if (args.count)
        body.device = (char *)args.arguments[0];
    request.body_case = RV__FRAME__BODY_DEVICE_REQUEST;
    request.device_request = &body;
    r = rv_cli_connect(&client, &args, RV_SOCKET_CONTROL, &err);
    if (r == 0)
        r = rv_client_request(&client, &request, RV__FRAME__BODY_DEVICE_LIST,
                              body.action ? TEST_TIMEOUT_US : RV_CLIENT_TIMEOUT_US, NULL, NULL, &answer, &err);
    if (r < 0)
        exit_code = rv_say_error(&err, args.json);
    else if (args.json)
        print_json(answer.message->device_list);
    else
        print_list(answer.message->device_list, attributes);
    if (r == 0 && body.action == RESVISOR__V1__DEVICE_ACTION__DEVICE_TEST)
        exit_code = verdict(answer.message->device_list);
    rv_frame_fini(&answer);
    rv_client_close(&client);
    rv_args_fini(&args);
    return exit_code;
}

const struct rv_command rv_command_devices = {
    .name = "devices",
    .arguments = "[DEVICE] [--test] [--attributes] [--json]",
    .summary = "Show GPUs: memory, how it is shared and why, what the self-test found.",
    .text = "DEVICE is cuda:0 or the like, or GPU- and the uuid; without it all are shown. With --test the exit code "
            "is 4 if a "
            "device that was tested cannot be used, and 6 if there is none.",
    .common = RV_COMMON_CONFIG | RV_COMMON_JSON,
    .min_arguments = 0,
    .max_arguments = 1,
    .options = device_options,
    .run = run_devices,
};
