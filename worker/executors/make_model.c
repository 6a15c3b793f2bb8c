/*
 * resvisor-make-model: writes safetensors models for the executors that ship, of any size, with random weights that are
 * the same for the same seed. For a first try, tests and benchmarks; not a way to get good pictures.
 */
#include <errno.h>
#include <getopt.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "model_file.h"
#include "model_plan.h"

#define EXIT_USAGE 2
#define BYTES_DEFAULT (256ull << 20)
#define BYTES_MAX (1ull << 44)
#define PROBLEM_TEXT 256

static volatile sig_atomic_t stopped;

static const char help[] = "Usage: resvisor-make-model KIND [options] FILE\n"
                           "Writes a safetensors model with random weights. FILE appears when it is complete.\n"
                           "\n"
                           "KIND\n"
                           "  image, video, audio   a model for the executor of that name\n"
                           "  text-encoder          the text encoder that all three share\n"
                           "  plain                 tensors t0, t1 ... of equal size and any bits, for benchmarks\n"
                           "\n"
                           "Options\n"
                           "  --bytes N     about so large; N may end in KiB, MiB, GiB, kB, MB or GB (default 256MiB)\n"
                           "  --dtype D     F32 (default), BF16 or F16\n"
                           "  --seed N      another seed, other weights (default 1)\n"
                           "  --tensors N   about so many tensors, at most 1000000 (plain: exactly; default 1000)\n"
                           "  --help\n";

static const struct {
    const char *suffix;
    uint64_t bytes;
} units[] = {{"", 1},      {"KiB", 1ull << 10}, {"MiB", 1ull << 20}, {"GiB", 1ull << 30},
             {"kB", 1000}, {"MB", 1000000},     {"GB", 1000000000}};

static bool size_read(const char *text, uint64_t *ret_bytes)
{
    char *end;
    double value = strtod(text, &end);
    unsigned i;

    if (text[0] < '0' || text[0] > '9')
        return false;
    for (i = 0; i < sizeof(units) / sizeof(units[0]); i++) {
        if (strcmp(end, units[i].suffix) == 0 && value * (double)units[i].bytes <= (double)BYTES_MAX) {
            *ret_bytes = (uint64_t)(value * (double)units[i].bytes);
            return true;
        }
    }
    return false;
}

static bool number_read(const char *text, uint64_t *ret_value)
{
    char *end;

    errno = 0;
    *ret_value = strtoull(text, &end, 10);
    return text[0] >= '0' && text[0] <= '9' && !*end && errno == 0;
}

static void on_signal(int number)
{
    (void)number;
    stopped = 1;
}

static int usage(const char *what, const char *value)
{
    (void)fprintf(stderr, "resvisor-make-model: %s%s%s\nSee resvisor-make-model --help\n", what, value ? ": " : "",
                  value ? value : "");
    return EXIT_USAGE;
}

enum option_id { OPTION_BYTES, OPTION_DTYPE, OPTION_SEED, OPTION_TENSORS, OPTION_HELP };

static const struct option options[] = {
    {"bytes", required_argument, NULL, OPTION_BYTES}, {"dtype", required_argument, NULL, OPTION_DTYPE},
    {"seed", required_argument, NULL, OPTION_SEED},   {"tensors", required_argument, NULL, OPTION_TENSORS},
    {"help", no_argument, NULL, OPTION_HELP},         {0}};

/* 0 = go on, -1 = done (help), else the exit code. */
static int options_read(int argc, char **argv, struct rv_plan_request *request)
{
    bool good = true;
    int id;

    while ((id = getopt_long(argc, argv, "", options, NULL)) >= 0) {
        if (id == OPTION_HELP) {
            (void)fputs(help, stdout);
            return -1;
        } else if (id == OPTION_BYTES)
            good = size_read(optarg, &request->bytes);
        else if (id == OPTION_DTYPE)
            request->dtype = optarg;
        else if (id == OPTION_SEED)
            good = number_read(optarg, &request->seed);
        else if (id == OPTION_TENSORS)
            good = number_read(optarg, &request->tensors) && request->tensors > 0;
        else
            return usage("unknown option or missing value", NULL);
        if (!good)
            return usage("not a number, or too large", optarg);
    }
    return 0;
}

static int model_make(const struct rv_plan_request *request, const char *path)
{
    struct sigaction action = {.sa_handler = on_signal};
    char problem[PROBLEM_TEXT] = "out of memory";
    struct rv_plan plan;
    uint64_t bytes = 0;
    int r = rv_plan_init(&plan, request, problem, sizeof(problem));

    if (r < 0) {
        (void)fprintf(stderr, "resvisor-make-model: %s\n", problem);
        rv_plan_fini(&plan);
        return r == -EINVAL ? EXIT_USAGE : EXIT_FAILURE;
    }
    (void)sigaction(SIGINT, &action, NULL);
    (void)sigaction(SIGTERM, &action, NULL);
    r = rv_model_write(&plan, path, &stopped, &bytes);
    if (r == -E2BIG)
        (void)fprintf(stderr, "resvisor-make-model: %s: the header would be over 100 MB; ask for fewer tensors\n",
                      path);
    else if (r < 0)
        (void)fprintf(stderr, "resvisor-make-model: cannot write %s: %s; nothing was left behind\n", path,
                      strerror(-r));
    else if (plan.layers)
        (void)printf("%s: %s, %.1f MiB, %llu tensors of %s, %u layers of %u x %u\n", path, request->kind,
                     (double)bytes / (1 << 20), (unsigned long long)plan.count, request->dtype, plan.layers, plan.width,
                     plan.hidden);
    else
        (void)printf("%s: %s, %.1f MiB, %llu tensors of %s\n", path, request->kind, (double)bytes / (1 << 20),
                     (unsigned long long)plan.count, request->dtype);
    rv_plan_fini(&plan);
    return r < 0 ? EXIT_FAILURE : EXIT_SUCCESS;
}

int main(int argc, char **argv)
{
    struct rv_plan_request request = {.dtype = "F32", .bytes = BYTES_DEFAULT, .seed = 1};
    int r = options_read(argc, argv, &request);

    if (r != 0)
        return r < 0 ? EXIT_SUCCESS : r;
    if (argc - optind != 2)
        return usage("needed are KIND and FILE", NULL);
    request.kind = argv[optind];
    return model_make(&request, argv[optind + 1]);
}
