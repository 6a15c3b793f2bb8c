/* The `resvisor` program: the supervisor's start, and the commands that talk to a running one. */
#include <fcntl.h>
#include <unistd.h>

#include "cli/cli.h"
#include "start.h"

/* clang-format off */
const struct rv_command *const rv_commands[] = {
    &rv_command_start,
    &rv_command_stop,
    &rv_command_status,
    &rv_command_models, &rv_command_devices,
    &rv_command_load,
    &rv_command_unload,
    &rv_command_pin,
    &rv_command_unpin,
    &rv_command_submit,
    &rv_command_jobs,
    &rv_command_job,
    &rv_command_fetch,
    &rv_command_cancel,
    &rv_command_restart,
    &rv_command_logs,
    &rv_command_route,
    &rv_command_verify,
    &rv_command_init,
    &rv_command_restore_config,
    &rv_command_check,
    &rv_command_errors,
    &rv_command_version,
    &rv_command_help,
    &rv_command_complete,
    &rv_command_words,
    &rv_command_supervisor,
    NULL,
};
/* clang-format on */

/* Started with a standard descriptor closed: what is opened next would become the one that everybody prints to. */
static void fill_standard_descriptors(void)
{
    int fd;

    do {
        fd = open("/dev/null", O_RDWR | O_CLOEXEC);
    } while (fd >= 0 && fd <= STDERR_FILENO);
    if (fd >= 0)
        (void)close(fd);
}

int main(int argc, char **argv)
{
    fill_standard_descriptors();
    return rv_cli_run(argc, argv);
}
