#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "paths.h"
#include "verify.h"

#define CODE(name) RESVISOR__V1__ERROR_CODE__ERROR_##name
#define MODULE "resvisor.comfyui.baseline"

/* The helper's process: it runs the plain ComfyUI, and ends it. */
struct helper {
    pid_t pid;
    int to;     /* its standard input: it ends when this is closed */
    FILE *from; /* lines of JSON */
};

/* ---- starting it ------------------------------------------------------------------------------------------------- */

/* What it shall do, as one line. */
static char *write_order(const struct rv_verify *verify)
{
    const struct rv_config_type *type = &verify->types.config->types[verify->files[0].type];
    json_t *root = json_object(), *args = json_array(), *graphs = json_array(), *runs = json_array();
    char *text;

    for (uint32_t i = 0; i < type->arg_count; i++)
        (void)json_array_append_new(args, rv_json_text(type->args[i]));
    for (unsigned i = 0; i < verify->file_count; i++)
        (void)json_array_append_new(graphs, json_stringn(verify->files[i].text, verify->files[i].length));
    for (unsigned i = 0; i < verify->run_count; i++) {
        json_t *run = json_object();

        rv_json_set_integer(run, "graph", verify->runs[i].file);
        rv_json_set_integer(run, "seed_offset", verify->runs[i].seed_offset);
        (void)json_array_append_new(runs, run);
    }
    rv_json_set_text(root, "directory", type->directory);
    rv_json_set_integer(root, "start_timeout_us", type->start_timeout_us);
    (void)json_object_set_new(root, "args", args);
    (void)json_object_set_new(root, "graphs", graphs);
    (void)json_object_set_new(root, "runs", runs);
    text = json_dumps(root, JSON_COMPACT);
    json_decref(root);
    return text;
}

/* In the child: the type's environment, with the package of this installation in front, as its workers have it. */
static void set_environment(const struct rv_config_type *type, const char *package)
{
    const char *path;
    char *all = NULL;

    for (uint32_t i = 0; i < type->env_count; i++)
        (void)setenv(type->env[i].key, type->env[i].value, 1);
    path = getenv("PYTHONPATH");
    if (asprintf(&all, "%s%s%s", package, path && *path ? ":" : "", path ? path : "") >= 0)
        (void)setenv("PYTHONPATH", all, 1);
    free(all);
}

static void exec_helper(const struct rv_config_type *type, const char *package, int in, int out)
{
    struct sigaction action = {.sa_handler = SIG_DFL};

    (void)sigaction(SIGPIPE, &action, NULL);
    (void)prctl(PR_SET_PDEATHSIG, SIGTERM);
    if (dup2(in, STDIN_FILENO) < 0 || dup2(out, STDOUT_FILENO) < 0)
        _exit(126);
    set_environment(type, package);
    execl(type->python, type->python, "-m", MODULE, (char *)NULL);
    fprintf(stderr, "resvisor: %s cannot be started: %s\n", type->python, strerror(errno));
    _exit(127);
}

static int start(struct helper *helper, const struct rv_config_type *type, struct rv_error *err)
{
    int in[2] = {-1, -1}, out[2] = {-1, -1}, r = 0;
    char package[PATH_MAX];

    if (rv_installed_path(RV_LIB, "python", package, sizeof(package)) < 0)
        return rv_error_set(err, ENOENT, CODE(INTERNAL), "the Python package is not found");
    if (pipe2(in, O_CLOEXEC) < 0 || pipe2(out, O_CLOEXEC) < 0) {
        r = rv_error_set(err, errno, CODE(LIMIT), "no pipe for the plain ComfyUI: %s", strerror(errno));
        goto out;
    }
    (void)fflush(stdout);
    helper->pid = fork();
    if (helper->pid == 0)
        exec_helper(type, package, in[0], out[1]);
    if (helper->pid < 0) {
        r = rv_error_set(err, errno, CODE(LIMIT), "no process for the plain ComfyUI: %s", strerror(errno));
        goto out;
    }
    helper->to = in[1];
    helper->from = fdopen(out[0], "r");
    if (!helper->from)
        r = rv_error_set(err, ENOMEM, CODE(NO_MEMORY), "no memory for the plain ComfyUI's answers");
    else
        out[0] = -1;
    in[1] = -1;
out:
    for (unsigned i = 0; i < 2; i++) {
        if (in[i] >= 0)
            (void)close(in[i]);
        if (out[i] >= 0)
            (void)close(out[i]);
    }
    return r;
}

/* It ends ComfyUI within some seconds, and then itself. Returns how it ended, as waitpid says it. */
static int stop(struct helper *helper)
{
    int status = 0;

    if (helper->pid <= 0)
        return 0;
    if (helper->to >= 0)
        (void)close(helper->to);
    while (waitpid(helper->pid, &status, 0) < 0 && errno == EINTR)
        ;
    if (helper->from)
        (void)fclose(helper->from);
    return status;
}

/* ---- its answers ------------------------------------------------------------------------------------------------- */

static int send_line(struct helper *helper, const char *text, struct rv_error *err)
{
    const char *pieces[] = {text, "\n"};

    for (unsigned i = 0; i < 2; i++) {
        size_t left = strlen(pieces[i]);

        while (left > 0) {
            ssize_t n = write(helper->to, pieces[i] + strlen(pieces[i]) - left, left);

            if (n < 0 && (errno != EINTR || rv_verify_interrupted()))
                return rv_error_set(err, EPIPE, CODE(INTERNAL), "the plain ComfyUI's helper has ended");
            left -= n > 0 ? (size_t)n : 0;
        }
    }
    return 0;
}

/* The next line. -EPIPE without words = there is none. */
static int read_answer(struct helper *helper, json_t **ret_answer, struct rv_error *err)
{
    char *line = NULL;
    size_t size = 0;
    json_t *answer = NULL;
    const char *problem;

    if (getline(&line, &size, helper->from) > 0)
        answer = json_loads(line, 0, NULL);
    free(line);
    if (rv_verify_interrupted()) {
        json_decref(answer);
        return rv_error_set(err, EINTR, CODE(CANCELLED), "interrupted");
    }
    if (!json_is_object(answer)) {
        json_decref(answer);
        return -EPIPE;
    }
    problem = json_string_value(json_object_get(answer, "error"));
    if (problem) {
        (void)rv_error_set(err, EIO, CODE(JOB_FAILED), "%s", problem);
        rv_error_remedy(err, "start it by hand with the type's python and args, or leave --baseline out");
    }
    *ret_answer = answer;
    return problem ? -EIO : 0;
}

static int read_answers(struct rv_verify *verify, struct helper *helper, struct rv_error *err)
{
    struct rv_progress progress;
    json_t *first = NULL;
    char what[64];
    int r;

    rv_progress_init(&progress, false, verify->args.json);
    rv_progress_show(&progress, "plain ComfyUI", 0, 0, "starting");
    r = read_answer(helper, &first, err);
    verify->plain_ready_us = rv_verify_number(first, "ready_us");
    json_decref(first);
    for (unsigned i = 0; r == 0 && i < verify->run_count; i++) {
        (void)snprintf(what, sizeof(what), "run %u of %u, %c", i + 1, verify->run_count,
                       'A' + (int)verify->runs[i].file);
        rv_progress_show(&progress, what, 0, 0, "plain ComfyUI");
        r = read_answer(helper, &verify->runs[i].plain, err);
    }
    rv_progress_end(&progress);
    return r;
}

int rv_verify_plain(struct rv_verify *verify, struct rv_error *err)
{
    const struct rv_config_type *type = &verify->types.config->types[verify->files[0].type];
    struct sigaction ignore = {.sa_handler = SIG_IGN}, before;
    struct helper helper = {.pid = 0, .to = -1};
    char *order = write_order(verify);
    int r, status;

    if (!order)
        return rv_error_set(err, ENOMEM, CODE(NO_MEMORY), "no memory for the plain ComfyUI's order");
    (void)sigaction(SIGPIPE, &ignore, &before);
    r = start(&helper, type, err);
    if (r == 0)
        r = send_line(&helper, order, err);
    if (r == 0)
        r = read_answers(verify, &helper, err);
    status = stop(&helper);
    (void)sigaction(SIGPIPE, &before, NULL);
    free(order);
    if (r == -EPIPE && WIFEXITED(status))
        r = rv_error_set(err, EPIPE, CODE(INTERNAL), "the plain ComfyUI's helper ended with exit code %d",
                         WEXITSTATUS(status));
    else if (r == -EPIPE)
        r = rv_error_set(err, EPIPE, CODE(INTERNAL), "the plain ComfyUI's helper was ended by signal %d",
                         WTERMSIG(status));
    return r;
}
