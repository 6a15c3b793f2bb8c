/* resvisor-worker: what no restart will mend ends with 78 and a line that says what to do. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>

#include <cmocka.h>

static const struct {
    const char *arguments, *says;
    int code;
} cases[] = {
    {"--help", "Exit status", 0},
    {"--version", RV_VERSION, 0},
    {"", "--executor is missing", 78},
    {"--executor", "requires an argument", 78},
    {"--unknown", "unrecognized option", 78},
    {"--executor x stray", "an argument without an option", 78},
    {"--executor x --mapping writable", "writable is not allowed here", 78},
    {"--executor x --model ''", "is not allowed here", 78},
    {"--executor /nonexistent.so", "cannot load the executor: /nonexistent.so", 78},
    {"--executor nonexistent", "lib/resvisor/executors/nonexistent.so", 78},
    {"--executor /dev/null", "cannot load the executor", 78},
    {"--executor libc.so.6", "libc.so.6", 78},
    {"--executor '" RV_EXECUTORS "/executor_wrong_0.so'", "RESVISOR_CONTROL_FD is not set", 1},
    {"--executor '" RV_EXECUTORS "/executor_wrong_1.so'", "executor ABI version 2, this host needs 1", 78},
    {"--executor '" RV_EXECUTORS "/executor_wrong_2.so'", "struct_size 8", 78},
    {"--executor '" RV_EXECUTORS "/executor_wrong_3.so'", "no run function", 78},
    {"--executor '" RV_LIBRARY "'", "no symbol resvisor_executor", 78},
};

static void every_mistake_has_its_message_and_exit_code(void **state)
{
    (void)state;
    for (unsigned i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        char command[1024], output[4096] = "";
        FILE *pipe;
        size_t n;
        int status;

        (void)snprintf(command, sizeof(command), "unset RESVISOR_CONTROL_FD; '%s' %s 2>&1", RV_WORKER,
                       cases[i].arguments);
        pipe = popen(command, "r");
        assert_non_null(pipe);
        n = fread(output, 1, sizeof(output) - 1, pipe);
        output[n] = '\0';
        status = pclose(pipe);
        if (!WIFEXITED(status) || WEXITSTATUS(status) != cases[i].code || !strstr(output, cases[i].says))
            fail_msg("resvisor-worker %s: status %x, said: %s", cases[i].arguments, (unsigned)status, output);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(every_mistake_has_its_message_and_exit_code)};

    return cmocka_run_group_tests(tests, NULL, NULL);
}
