/*
 * Packs that manage packs end ComfyUI's process to start it anew, by a request that anybody may send. Here it becomes
 * what `resvisor restart TYPE` does: jobs that run are finished, and who may not restart by HTTP may not do it so.
 */
#include "front.h"

static void render_restarted(struct rv_http_request *request, const Resvisor__V1__Reply *reply, int fd)
{
    (void)reply;
    (void)fd;
    rv_front_answer_json(request, 200, json_pack("{s:b}", "restarted", 1));
}

void rv_front_reboot(struct rv_http_request *request)
{
    struct rv_front *front = request->http->router->front;
    const char *name = MHD_lookup_connection_value(request->connection, MHD_HEADER_KIND, RV_FRONT_TYPE_FIELD);
    struct rv_asker asker = {.local = true, .socket = -1, .http = request};
    struct rv_error err = {0};

    request->render = render_restarted;
    if (rv_ask_restart(front->router, &asker, name ? name : front->primary->name, &err) < 0)
        rv_http_answer_error(request, &err, 0, 0);
}
