/*
 * resvisor-device: touches devices for the supervisor, which never loads their libraries itself. What for is told by
 * DeviceStart: the self-test, the holder of one device's cuda-ipc arenas, or the watch.
 *
 * Descriptor RESVISOR_CONTROL_FD (3) is the channel to the supervisor; when that closes, this process ends at once. The
 * self-test starts actors: this same program with a hidden first argument. By hand: `resvisor-device --help`.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "actor.h"
#include "child.h"
#include "works.h"

static int (*const works[])(int, const Rv__DeviceStart *) = {
    [RV__DEVICE_START__WORK__WORK_TEST] = rv_work_test,
    [RV__DEVICE_START__WORK__WORK_HOLD] = rv_work_hold,
    [RV__DEVICE_START__WORK__WORK_WATCH] = rv_work_watch,
};

static int serve(int socket)
{
    struct rv_frame frame = RV_FRAME_INIT;
    unsigned work = 0;
    int code = 1;

    if (rv_child_hello(socket, RV__ROLE__ROLE_DEVICE, "resvisor-device") < 0 || rv_child_watch(socket) < 0 ||
        rv_child_wait(socket, RV__FRAME__BODY_DEVICE_START, &frame) < 0)
        return code;
    work = (unsigned)frame.message->device_start->work;
    if (work < sizeof(works) / sizeof(works[0]) && works[work])
        code = works[work](socket, frame.message->device_start);
    rv_frame_fini(&frame);
    return code;
}

int main(int argc, char **argv)
{
    int socket;

    if (argc == 4 && strcmp(argv[1], RV_ACTOR_ROLE) == 0)
        return rv_actor_main(atoi(argv[2]));
    if (argc > 1)
        return rv_by_hand(argc, argv);
    socket = rv_child_socket();
    rv_child_set_up();
    if (socket < 0) {
        (void)fprintf(stderr, "resvisor-device is started by resvisor; by hand: resvisor-device --help\n");
        return 2;
    }
    return serve(socket);
}
