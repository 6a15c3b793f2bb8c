/*
 * resvisor-worker: a worker that runs an executor's shared object.
 *
 * Started by the supervisor with the control connection in its environment (resvisor.h, rv_worker_open). Maps the
 * models, then says that it is ready, then runs jobs one at a time until it is told to drain. SIGTERM keeps its default
 * action: the supervisor sends it only after a drain took too long, and the job's end is then reported by the
 * supervisor.
 */
#include <errno.h>
#include <getopt.h>
#include <stdio.h>
#include <string.h>

#include "host.h"
#include "rpc.pb-c.h"

#define DETAIL_MAX 512 /* bytes of what is said of the models */

static const char help[] =
    "usage: resvisor-worker --executor FILE.so [--mapping private|shared] [--model NAME]...\n"
    "\n"
    "Runs jobs of one workflow type with the models that resvisor keeps in memory. `resvisor start` starts it as the\n"
    "configuration says (types.NAME); by hand it only says that there is no supervisor.\n"
    "\n"
    "  --executor FILE   shared object with the symbol resvisor_executor, or the name of an installed executor\n"
    "  --mapping MODE    private: the executor may write, and only this process sees it (default; read-only where a\n"
    "                    model lies in huge pages or on a device); shared: read-only\n"
    "  --model NAME      a configured model, mapped before the first job; may be given up to 16 times\n"
    "  --version, --help\n"
    "\n"
    "Exit status: 0 drained; 1 failed, a restart may help; 78 wrong option, executor file or executor ABI, or an "
    "executor\n"
    "that cannot read models on a device: a restart will not help.\n";

static const struct option options[] = {
    {"executor", required_argument, NULL, 'e'}, {"mapping", required_argument, NULL, 'm'},
    {"model", required_argument, NULL, 'M'},    {"help", no_argument, NULL, 'h'},
    {"version", no_argument, NULL, 'v'},        {NULL, 0, NULL, 0},
};

static int set_mapping(struct host *host, const char *word)
{
    if (strcmp(word, "private") == 0)
        host->mapping = RV_MAPPING_AUTO;
    else if (strcmp(word, "shared") == 0)
        host->mapping = RV_MAPPING_SHARED_READ_ONLY;
    else
        return -EINVAL;
    return 0;
}

static int add_model(struct host *host, const char *name)
{
    struct host_model *model = &host->models[host->model_count];

    if (host->model_count >= RV_TYPE_MODELS_MAX || !*name || strlen(name) >= sizeof(model->name))
        return -EINVAL;
    (void)snprintf(model->name, sizeof(model->name), "%s", name);
    host->model_count++;
    return 0;
}

/* -1 = go on; else the exit code. */
static int parse(struct host *host, int argc, char **argv, const char **ret_executor)
{
    int option, r = 0;

    while ((option = getopt_long(argc, argv, "", options, NULL)) != -1) {
        if (option == 'h' || option == 'v') {
            (void)fputs(option == 'h' ? help : "resvisor-worker " RV_VERSION "\n", stdout);
            return HOST_EXIT_DONE;
        }
        if (option == 'e')
            *ret_executor = optarg;
        else if (option == 'm')
            r = set_mapping(host, optarg);
        else if (option == 'M')
            r = add_model(host, optarg);
        else
            return HOST_EXIT_CONFIG; /* getopt has said why */
        if (r < 0) {
            (void)fprintf(stderr, "resvisor-worker: %s is not allowed here; --help says what is\n", optarg);
            return HOST_EXIT_CONFIG;
        }
    }
    if (!*ret_executor || optind < argc) {
        (void)fprintf(stderr, "resvisor-worker: %s; --help says what is allowed\n",
                      *ret_executor ? "an argument without an option" : "--executor is missing");
        return HOST_EXIT_CONFIG;
    }
    return -1;
}

static void print_failure(const char *what, int r, const struct rv_failure *err)
{
    (void)fprintf(stderr, "resvisor-worker: %s: %s%s%s\n", what, err->message[0] ? err->message : strerror(-r),
                  err->remedy[0] ? "; " : "", err->remedy);
}

/* Everything between rv_worker_open and the first job, then the jobs. */
static int work(struct host *host)
{
    struct rv_failure err = {0};
    char detail[DETAIL_MAX];
    int r = host_models_attach(host, &err);

    if (r < 0) {
        print_failure("cannot map the models", r, &err);
        return r == -EOPNOTSUPP && err.code == RESVISOR__V1__ERROR_CODE__ERROR_CONFIG ? HOST_EXIT_CONFIG
                                                                                      : HOST_EXIT_FAILED;
    }
    if (host->executor.start) {
        r = host->executor.start(&host->state, &err);
        if (r < 0) {
            print_failure("the executor did not start", r, &err);
            return HOST_EXIT_FAILED;
        }
    }
    host->started = true;
    host_models_describe(host, detail, sizeof(detail));
    r = rv_worker_ready(host->worker, detail, &err);
    if (r < 0) {
        print_failure("cannot become ready", r, &err);
        return HOST_EXIT_FAILED;
    }
    (void)fprintf(stderr, "ready: executor %s %s, %s\n", host->executor.name, host->executor.version, detail);
    r = host_jobs_run(host);
    if (host->device_failed) {
        (void)fprintf(stderr, "its device has failed this process, which ends: a new one takes its place\n");
        return HOST_EXIT_FAILED;
    }
    if (r < 0) {
        print_failure("cannot take jobs", r, &err);
        return HOST_EXIT_FAILED;
    }
    return HOST_EXIT_DONE;
}

int main(int argc, char **argv)
{
    static struct host host; /* too large for the stack */
    struct rv_failure err = {0};
    const char *executor = NULL;
    int code = parse(&host, argc, argv, &executor), r;

    if (code >= 0)
        return code;
    (void)setvbuf(stderr, NULL, _IOLBF, 0); /* whole lines: the log's reader shows them one by one */
    r = host_executor_open(&host, executor, &err);
    if (r < 0) {
        print_failure("configuration", r, &err);
        return HOST_EXIT_CONFIG;
    }
    r = rv_worker_open(&host.worker, &err);
    if (r < 0) {
        print_failure("no supervisor", r, &err);
        return HOST_EXIT_FAILED;
    }
    code = work(&host);
    host_executor_close(&host);
    host_models_detach(&host);
    rv_worker_close(host.worker);
    return code;
}
