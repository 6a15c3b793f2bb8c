#include "start.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "error.h"
#include "keeper/keeper.h"
#include "log.h"
#include "runtime.h"
#include "supervisor.h"

#define LOG_FILE "resvisor.log"

static const struct rv_option options[] = {
    {"detach", 'd', NULL,
     "Return when requests are served, and leave it running. Its log goes to RUNTIME/" LOG_FILE "."},
    {"ready-fd", 0, "N", "Write \"ready\" and a newline to this descriptor when requests are served."},
    {0},
};

static int run(int argc, char **argv);

const struct rv_command rv_command_start = {
    .name = "start",
    .arguments = "[-c FILE] [--detach]",
    .summary = "Start the supervisor, the router and the workers.",
    .text = "Runs in the foreground until it is told to stop, as a service manager wants it: SIGTERM drains the "
            "workers and\n"
            "ends, a second SIGTERM ends at once. With --detach it returns when requests are served, or with the "
            "reason why not.",
    .common = RV_COMMON_CONFIG | RV_COMMON_LOG,
    .options = options,
    .run = run,
};

const struct rv_command rv_command_supervisor = {
    .name = "_supervisor",
    .arguments = "",
    .summary = "",
    .text = "",
    .common = RV_COMMON_CONFIG | RV_COMMON_LOG,
    .run = rv_supervisor_main,
    .hidden = true,
};

int rv_start_arguments_read(const struct rv_command *command, int argc, char **argv, struct rv_start_arguments *ret,
                            bool *ret_go_on)
{
    struct rv_start_arguments a = {.ready_fd = -1};
    struct rv_config_sources sources;
    const char *value;
    int64_t number;
    int i;

    *ret_go_on = false;
    rv_args_init(&a.args, command, argc, argv);
    while ((i = rv_args_next(&a.args, &value)) >= 0) {
        if (strcmp(command->options[i].name, "detach") == 0) {
            a.detach = true;
        } else {
            if (!rv_args_number(&a.args, "ready-fd", value, 0, 1 << 20, &number))
                return rv_args_exit(&a.args, RV_ARGS_ERROR);
            a.ready_fd = (int)number;
            if (fcntl(a.ready_fd, F_SETFD, FD_CLOEXEC) < 0) {
                i = rv_args_wrong(&a.args, "--ready-fd %d: %s", a.ready_fd, strerror(errno));
                rv_args_fini(&a.args);
                return i;
            }
        }
    }
    if (i != RV_ARGS_END)
        return rv_args_exit(&a.args, i);
    rv_args_sources(&a.args, &sources);
    i = rv_config_load(&sources, stderr, &a.config);
    if (i < 0) {
        if (i != -EINVAL)
            (void)fprintf(stderr, "resvisor: the configuration cannot be read: %s\n", strerror(-i));
        rv_args_fini(&a.args);
        return RV_EXIT_USAGE;
    }
    *ret = a;
    *ret_go_on = true;
    return RV_EXIT_DONE;
}

/* The supervisor reads the same file with the same overrides. Texts stay with args. NULL = no memory. */
static char **supervisor_argv(const struct rv_start_arguments *a)
{
    char **argv = calloc(2 * (size_t)a->args.set_count + 5, sizeof(*argv));
    unsigned n = 0;

    if (!argv)
        return NULL;
    argv[n++] = (char *)"resvisor";
    argv[n++] = (char *)"_supervisor";
    if (a->args.config_file) {
        argv[n++] = (char *)"-c";
        argv[n++] = (char *)a->args.config_file;
    }
    for (unsigned i = 0; i < a->args.set_count; i++) {
        argv[n++] = (char *)"--set";
        argv[n++] = a->args.sets[i];
    }
    return argv;
}

/* The waiting half of --detach: "ready" comes, or the pipe closes and the exit code says why. */
static int wait_until_ready(pid_t pid, int pipe)
{
    char text[16];
    ssize_t n;
    int status = 0;

    do {
        n = read(pipe, text, sizeof(text));
    } while (n < 0 && errno == EINTR);
    if (n > 0)
        return RV_EXIT_DONE;
    (void)waitpid(pid, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : RV_EXIT_INTERNAL;
}

/* In the child of --detach: away from the terminal; the log goes to a file from now on. */
static int detach_io(const char *runtime_dir)
{
    char path[RV_PATH_MAX + 32], old[RV_PATH_MAX + 40];
    int null = open("/dev/null", O_RDWR | O_CLOEXEC), log;

    (void)snprintf(path, sizeof(path), "%s/" LOG_FILE, runtime_dir);
    (void)snprintf(old, sizeof(old), "%s.old", path);
    (void)rename(path, old);
    log = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (null < 0 || log < 0) {
        rv_log_error("cannot write %s: %s", path, strerror(errno));
        return -errno;
    }
    (void)dup2(null, STDIN_FILENO);
    (void)dup2(null, STDOUT_FILENO);
    (void)dup2(log, STDERR_FILENO);
    return 0;
}

/* Forks for --detach. Returns 0 in the child, with a->ready_fd set; in the parent *ret_code is the exit code and 1 is
 * returned. Nothing of ours is running yet, so a plain fork is safe. */
static int detach(struct rv_start_arguments *a, int *ret_code)
{
    int pipe[2];
    pid_t pid;

    if (pipe2(pipe, O_CLOEXEC) < 0 || (pid = fork()) < 0) {
        (void)fprintf(stderr, "resvisor: cannot detach: %s\n", strerror(errno));
        *ret_code = RV_EXIT_INTERNAL;
        return 1;
    }
    if (pid > 0) {
        (void)close(pipe[1]);
        *ret_code = wait_until_ready(pid, pipe[0]);
        (void)close(pipe[0]);
        if (*ret_code == RV_EXIT_INTERNAL || *ret_code == RV_EXIT_SUPERVISOR_DIED)
            (void)fprintf(stderr, "resvisor: it could not be started; the reason is in %s/" LOG_FILE "\n",
                          a->config->runtime_dir);
        if (*ret_code == RV_EXIT_DONE)
            (void)printf("resvisor is ready, pid %d, log %s/" LOG_FILE "\n", (int)pid, a->config->runtime_dir);
        return 1;
    }
    (void)setsid();
    (void)close(pipe[0]);
    a->ready_fd = pipe[1];
    return 0;
}

static int run(int argc, char **argv)
{
    static char runtime_dir[RV_PATH_MAX];
    struct rv_start_arguments a;
    struct rv_error err = {0};
    char **child_argv;
    bool go_on;
    int lock, code = rv_start_arguments_read(&rv_command_start, argc, argv, &a, &go_on);

    if (!go_on)
        return code;
    if (a.detach && detach(&a, &code) != 0)
        goto out;
    rv_log_init("keeper", a.config->log_level);
    lock = rv_runtime_open(a.config, &err);
    if (lock < 0) {
        code = rv_say_error(&err, false);
        goto out;
    }
    child_argv = supervisor_argv(&a);
    (void)snprintf(runtime_dir, sizeof(runtime_dir), "%s", a.config->runtime_dir);
    if (!child_argv || (a.detach && detach_io(runtime_dir) < 0)) {
        rv_runtime_close(runtime_dir, lock);
        code = RV_EXIT_INTERNAL;
        goto out;
    }
    rv_config_destroy(a.config);
    a.config = NULL;
    (void)prctl(PR_SET_NAME, "resvisor-keeper");
    code = rv_keeper_run(&(struct rv_keeper_options){child_argv, a.ready_fd});
    rv_runtime_close(runtime_dir, lock);
    free(child_argv);
out:
    rv_config_destroy(a.config);
    rv_args_fini(&a.args);
    return code;
}
