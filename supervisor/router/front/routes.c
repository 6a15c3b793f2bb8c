/* The table of paths: ComfyUI's API, and what becomes of each part of it. The first row that matches counts. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "front.h"

#define SMALL RV_FRONT_BODY_MAX

static void nothing_here(struct rv_http_request *request)
{
    rv_front_answer_error(request, 404, "not_found", "", 0, "nothing is at this path");
}

/* clang-format off */
static const struct rv_front_route routes[] = {
    /* A prompt is a job: of all workers there is one queue and one history. */
    {"GET",  "prompt",              RV_FRONT_HANDLE, false, false, 0, rv_front_prompt_get},
    {"POST", "prompt",              RV_FRONT_HANDLE, false, false, RV_FRONT_PROMPT_MAX, rv_front_prompt_post},
    {"GET",  "queue",               RV_FRONT_HANDLE, false, false, 0, rv_front_queue_get},
    {"POST", "queue",               RV_FRONT_HANDLE, false, false, SMALL, rv_front_queue_post},
    {"POST", "interrupt",           RV_FRONT_HANDLE, false, false, SMALL, rv_front_interrupt},
    {"GET",  "history",             RV_FRONT_HANDLE, false, false, 0, rv_front_history_get},
    {"GET",  "history/*",           RV_FRONT_HANDLE, false, false, 0, rv_front_history_get_one},
    {"POST", "history",             RV_FRONT_HANDLE, false, false, SMALL, rv_front_history_post},
    {"GET",  "jobs",                RV_FRONT_HANDLE, true, false, 0, rv_front_jobs_list},
    {"POST", "jobs/cancel",         RV_FRONT_HANDLE, true, false, SMALL, rv_front_jobs_cancel_many},
    {"GET",  "jobs/*",              RV_FRONT_HANDLE, true, false, 0, rv_front_jobs_get},
    {"POST", "jobs/*/cancel",       RV_FRONT_HANDLE, true, false, SMALL, rv_front_jobs_cancel},
    {"GET",  "ws",                  RV_FRONT_HANDLE, false, false, 0, rv_front_ws_open},
    /* What all have, in one answer. */
    {"GET",  "object_info",         RV_FRONT_HANDLE, false, false, 0, rv_front_object_info},
    {"GET",  "object_info/*",       RV_FRONT_HANDLE, false, false, 0, rv_front_object_info_one},
    {"GET",  "extensions",          RV_FRONT_HANDLE, false, false, 0, rv_front_extensions},
    {"GET",  "system_stats",        RV_FRONT_HANDLE, false, false, 0, rv_front_system_stats},
    {"POST", "free",                RV_FRONT_HANDLE, false, false, SMALL, rv_front_free},
    /* Files: inputs are in one folder, the rest is where it was made. */
    {"GET",  "view",                RV_FRONT_HANDLE, false, false, 0, rv_front_view},
    {"POST", "upload/image",        RV_FRONT_ANY, false, false, 0, NULL},
    {"POST", "upload/mask",         RV_FRONT_ANY, false, false, 0, NULL},
    /* The users' files, and what only one worker may change. */
    {"",     "userdata/**",         RV_FRONT_PRIMARY, false, false, 0, NULL},
    {"",     "v2/userdata/**",      RV_FRONT_PRIMARY, false, false, 0, NULL},
    {"",     "settings/**",         RV_FRONT_PRIMARY, false, false, 0, NULL},
    {"",     "users/**",            RV_FRONT_PRIMARY, false, false, 0, NULL},
    {"",     "internal/**",         RV_FRONT_PRIMARY, false, false, 0, NULL},
    /* Workers have routes for the router itself. */
    {"",     "resvisor/**",         RV_FRONT_HANDLE, false, false, SMALL, nothing_here},
    /* Packs that restart ComfyUI. */
    {"",     "manager/reboot",      RV_FRONT_HANDLE, false, true, SMALL, rv_front_reboot},
    {"",     "v2/manager/reboot",   RV_FRONT_HANDLE, false, true, SMALL, rv_front_reboot},
    /* Static files, models and lists of them, routes of packs: a read may be answered by anybody. */
    {"GET",  "**",                  RV_FRONT_SEARCH, false, false, 0, NULL},
    {"",     "**",                  RV_FRONT_PRIMARY, false, false, 0, NULL},
};
/* clang-format on */

const struct rv_front_route *rv_front_find_route(const char *method, const char *const *segments, unsigned count,
                                                 bool api)
{
    const char *wanted = strcmp(method, "HEAD") == 0 ? "GET" : method;
    unsigned i = 0;

    while (i + 1 < sizeof(routes) / sizeof(routes[0]) &&
           ((routes[i].only_api && !api) || (routes[i].method[0] && strcmp(routes[i].method, wanted) != 0) ||
            !rv_front_path_matches(segments, count, routes[i].path)))
        i++;
    return &routes[i];
}

/* ---- browsers ---------------------------------------------------------------------------------------------------- */

/* /?token=TOKEN in a browser: it gets a cookie, and the page without the token in its address. */
static bool let_in(struct rv_http_request *request, const char *method)
{
    const char *shown = rv_http_query(&request->target, "token");
    char cookie[RV_HTTP_URI_MAX + 64];

    if (request->target.segment_count > 0 || request->api || !shown || strcmp(method, "GET") != 0 ||
        !rv_http_is_token(request, shown, strlen(shown)) || !rv_front_is_cookie_value(shown))
        return false;
    (void)snprintf(cookie, sizeof(cookie), RV_FRONT_COOKIE "=%s; Path=/; HttpOnly; SameSite=Strict", shown);
    rv_http_answer_text(request, 303, NULL, strdup(""), 0);
    rv_http_add_header(request, "Location", "/");
    rv_http_add_header(request, "Set-Cookie", cookie);
    rv_http_add_header(request, "Referrer-Policy", "no-referrer");
    return true;
}

/* ---- what a request must satisfy -------------------------------------------------------------------------------- */

static bool is_ours(const char *uri, const char *path)
{
    size_t n = strlen(path);

    return strncmp(uri, path, n) == 0 && (uri[n] == '\0' || uri[n] == '/' || uri[n] == '?');
}

/* aiohttp takes a CONNECT for the beginning of a tunnel, and what others send on that connection for its contents. */
static bool is_passed_on(const char *method)
{
    static const char *const known[] = {"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"};

    for (unsigned i = 0; i < sizeof(known) / sizeof(known[0]); i++)
        if (strcmp(method, known[i]) == 0)
            return true;
    return false;
}

/* Where a request is until it is admitted. There may be no memory for the answer that refuses it: then it ends here,
 * and a worker does not see it. */
static void end_without_answer(struct rv_http_request *request)
{
    (void)request;
}

static const struct rv_front_route nowhere = {"", "**", RV_FRONT_HANDLE, false, false, 0, end_without_answer};

bool rv_front_check(struct rv_http_request *request, const char *method, const struct rv_http_head *head)
{
    static const char *const ours[] = {"/healthz", "/readyz", "/metrics", "/resvisor"};
    const struct rv_front_route *route;
    const char *why = "";
    unsigned status;

    if (!request->http->router->front)
        return false;
    for (unsigned i = 0; i < sizeof(ours) / sizeof(ours[0]); i++)
        if (is_ours(request->uri, ours[i]))
            return false;
    request->front = &nowhere; /* from here on errors have ComfyUI's shape */
    status = rv_front_parse_target(request->uri, request->uri_length, &request->target, &request->api, &why);
    if (status) {
        rv_http_refuse(request, status, RV_CODE(BAD_REQUEST), "%s", why);
        return true;
    }
    if (!is_passed_on(method)) {
        rv_http_refuse(request, 501, RV_CODE(BAD_REQUEST), "this method is not passed on to ComfyUI");
        return true;
    }
    if (let_in(request, method)) {
        request->close = !request->framing.keep_alive;
        return true;
    }
    route = rv_front_find_route(method, request->target.segments, request->target.segment_count, request->api);
    if (!rv_http_check_client(request, head, route->operator? RV_HTTP_OPERATOR : RV_HTTP_CLIENT))
        return true;
    if (route->action == RV_FRONT_HANDLE) {
        request->body_max = route->body_max;
        if (request->framing.length > route->body_max) {
            rv_http_refuse(request, 0, RV_CODE(TOO_LARGE), "the request's body is larger than %u KiB",
                           route->body_max / 1024);
            return true;
        }
    }
    request->front = route;
    request->close = !request->framing.keep_alive;
    return true;
}
