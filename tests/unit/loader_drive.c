#include "loader_drive.h"

#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

/* ---- files ----------------------------------------------------------------------------------------------------- */

char drive_directory[] = "/var/tmp/test_loader_XXXXXX"; /* not /tmp: that may be a tmpfs, which knows no O_DIRECT */
char drive_path[128];

uint8_t drive_pattern(uint64_t i)
{
    return (uint8_t)((i * 2654435761u) >> 13 ^ i >> 7);
}

int drive_make_file(const char *name, uint64_t prefix, const char *header, uint64_t data)
{
    static uint8_t block[1 << 20];
    uint64_t n = prefix ? prefix : strlen(header);
    FILE *f;

    (void)snprintf(drive_path, sizeof(drive_path), "%s/%s", drive_directory, name);
    f = fopen(drive_path, "we");
    assert_non_null(f);
    assert_int_equal(fwrite(&n, 1, 8, f), 8);
    assert_int_equal(fwrite(header, 1, strlen(header), f), strlen(header));
    for (uint64_t i = 0; i < data; i += sizeof(block)) {
        uint64_t part = data - i < sizeof(block) ? data - i : sizeof(block);

        for (uint64_t k = 0; k < part; k++)
            block[k] = drive_pattern(i + k);
        assert_int_equal(fwrite(block, 1, part, f), part);
    }
    assert_int_equal(fflush(f), 0);
    assert_int_equal(fdatasync(fileno(f)), 0); /* so that dropping it from the cache can work */
    assert_int_equal(fclose(f), 0);
    return open(drive_path, O_RDONLY | O_CLOEXEC);
}

/* ---- a loader -------------------------------------------------------------------------------------------------- */

struct drive drive_start_loader(const char *way)
{
    struct drive l;
    int pair[2];

    assert_int_equal(rv_frame_pair(pair), 0);
    l.pid = fork();
    assert_true(l.pid >= 0);
    if (l.pid == 0) {
        (void)dup2(pair[1], 3);
        if (pair[1] == 3)
            (void)fcntl(3, F_SETFD, 0);
        (void)setenv("RESVISOR_CONTROL_FD", "3", 1);
        if (way)
            (void)setenv("RESVISOR_LOADER_READER", way, 1);
        (void)execl(RV_LOADER, "resvisor-loader", (char *)NULL);
        _exit(127);
    }
    (void)close(pair[1]);
    l.socket = pair[0];
    return l;
}

struct rv_frame drive_receive(const struct drive *l)
{
    struct rv_frame frame = RV_FRAME_INIT;

    for (;;) { /* progress may come at any time */
        assert_int_equal(rv_frame_wait(l->socket, &frame, DRIVE_WAIT_US), 1);
        if (frame.message->body_case != RV__FRAME__BODY_LOAD_PROGRESS)
            return frame;
        assert_true(frame.message->load_progress->bytes_done <= frame.message->load_progress->bytes_total);
        rv_frame_fini(&frame);
    }
}

void drive_greet(const struct drive *l)
{
    struct rv_frame frame = drive_receive(l);
    Rv__Frame message = RV__FRAME__INIT;
    Rv__HelloReply reply = RV__HELLO_REPLY__INIT;

    assert_int_equal(frame.message->body_case, RV__FRAME__BODY_HELLO);
    assert_int_equal(frame.message->hello->role, RV__ROLE__ROLE_LOADER);
    assert_int_equal(frame.message->hello->version, RV_PROTOCOL_VERSION);
    assert_int_equal(frame.message->hello->pid, l->pid);
    reply.version = RV_PROTOCOL_VERSION;
    message.id = frame.message->id;
    message.body_case = RV__FRAME__BODY_HELLO_REPLY;
    message.hello_reply = &reply;
    assert_int_equal(rv_frame_send(l->socket, &message, NULL, 0, DRIVE_WAIT_US), 0);
    rv_frame_fini(&frame);
}

void drive_send_start(const struct drive *l, int file, const Rv__LoadStart *start)
{
    Rv__Frame message = RV__FRAME__INIT;

    message.body_case = RV__FRAME__BODY_LOAD_START;
    message.load_start = (Rv__LoadStart *)start;
    assert_int_equal(rv_frame_send(l->socket, &message, &file, 1, DRIVE_WAIT_US), 0);
}

void drive_send_admit(const struct drive *l, const Rv__LoadAdmit *admit)
{
    Rv__Frame message = RV__FRAME__INIT;

    message.body_case = RV__FRAME__BODY_LOAD_ADMIT;
    message.load_admit = (Rv__LoadAdmit *)admit;
    assert_int_equal(rv_frame_send(l->socket, &message, NULL, 0, DRIVE_WAIT_US), 0);
}

void drive_end_loader(struct drive *l, int code)
{
    int status;

    (void)close(l->socket);
    assert_int_equal(waitpid(l->pid, &status, 0), l->pid);
    assert_true(WIFEXITED(status));
    assert_int_equal(WEXITSTATUS(status), code);
}

int drive_make_blob(const char *name, uint64_t size)
{
    FILE *f;

    (void)snprintf(drive_path, sizeof(drive_path), "%s/%s", drive_directory, name);
    f = fopen(drive_path, "we");
    assert_non_null(f);
    for (uint64_t i = 0; i < size; i++)
        (void)fputc(drive_pattern(i), f);
    assert_int_equal(fclose(f), 0);
    return open(drive_path, O_RDONLY | O_CLOEXEC);
}

int drive_set_up(void **state)
{
    (void)state;
    return mkdtemp(drive_directory) ? 0 : -1;
}

int drive_tear_down(void **state)
{
    char command[128];

    (void)state;
    (void)snprintf(command, sizeof(command), "rm -rf %s", drive_directory);
    return system(command);
}
