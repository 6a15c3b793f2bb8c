/* What a request must satisfy before anything looks at it: its shape first, then where it goes, then who sent it. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "../front/front.h"
#include "http.h"

#define BEARER "Bearer "

static enum MHD_Result collect(void *context, enum MHD_ValueKind kind, const char *name, size_t name_length,
                               const char *value, size_t value_length)
{
    struct rv_http_head *head = context;

    (void)kind;
    if (head->field_count == RV_HTTP_FIELDS_MAX) {
        head->too_many = true;
        return MHD_NO;
    }
    head->fields[head->field_count++] =
        (struct rv_http_field){name, value ? value : "", name_length, value ? value_length : 0};
    return MHD_YES;
}

void rv_http_read_head(struct rv_http_request *request, const char *method, const char *version,
                       struct rv_http_head *head)
{
    const union MHD_ConnectionInfo *info =
        MHD_get_connection_info(request->connection, MHD_CONNECTION_INFO_REQUEST_HEADER_SIZE);

    head->method = method;
    head->version = version;
    head->uri_length = request->uri_length;
    head->size = info ? info->header_size : 0;
    (void)MHD_get_connection_values_n(request->connection, MHD_HEADER_KIND, collect, head);
}

/* Takes the same time wherever the first difference is. */
static bool same_secret(const char *right, const char *shown, size_t length)
{
    size_t right_length = strlen(right);
    volatile unsigned char difference = right_length != length;

    if (right_length == 0 || length == 0)
        return false;
    for (size_t i = 0; i < right_length; i++)
        difference = difference | (unsigned char)(right[i] ^ shown[i % length]);
    return difference == 0;
}

bool rv_http_is_token(const struct rv_http_request *request, const char *shown, size_t length)
{
    return same_secret(request->http->router->setup->http_token, shown, length);
}

/* A browser cannot show a token by itself: at ComfyUI's paths, the cookie that it was given does. */
static bool has_cookie(const struct rv_http_request *request, const struct rv_http_head *head)
{
    unsigned count;
    const struct rv_http_field *field = request->front ? rv_http_find(head, "Cookie", &count) : NULL;
    size_t length;
    const char *shown =
        field ? rv_front_find_cookie(field->value, field->value_length, RV_FRONT_COOKIE, &length) : NULL;

    return shown && rv_http_is_token(request, shown, length);
}

static bool check_token(struct rv_http_request *request, const struct rv_http_head *head, enum rv_http_access access)
{
    const char *token = request->http->router->setup->http_token;
    const struct rv_http_field *field;
    unsigned count;

    if (token[0] == '\0') {
        struct rv_error err = {0};

        if (access < RV_HTTP_OPERATOR)
            return true;
        (void)rv_error_set(&err, 0, RV_CODE(NOT_PERMITTED), "by HTTP, only who shows a token may do that");
        rv_error_remedy(&err, "set http.token_file, or use the command line");
        rv_http_answer_error(request, &err, 0, 0);
        return false;
    }
    field = rv_http_find(head, "Authorization", &count);
    if (access == RV_HTTP_OPEN || has_cookie(request, head) ||
        (count == 1 && field->value_length > strlen(BEARER) && strncasecmp(field->value, BEARER, strlen(BEARER)) == 0 &&
         same_secret(token, field->value + strlen(BEARER), field->value_length - strlen(BEARER))))
        return true;
    {
        struct rv_error err = {0};

        (void)rv_error_set(&err, 0, RV_CODE(UNAUTHENTICATED), "the token is %s", count ? "wrong" : "missing");
        rv_error_remedy(&err, "send `Authorization: Bearer` with the token of the file named by http.token_file");
        rv_http_answer_error(request, &err, 0, 0);
    }
    return false;
}

/*
 * A page of any website can make its visitor's browser send requests to loopback. It cannot hide where it is from
 * (Origin), nor send JSON without asking first, nor, under a name of its own that points here (Host), pretend to be an
 * address.
 */
static bool check_browser(struct rv_http_request *request, const struct rv_http_head *head)
{
    const struct rv_http_field *host = rv_http_find(head, "Host", NULL), *origin = rv_http_find(head, "Origin", NULL);

    if (request->http->router->setup->http_token[0] == '\0' && host &&
        !rv_http_host_is_local(host->value, host->value_length)) {
        rv_http_refuse(request, 0, RV_CODE(NOT_PERMITTED),
                       "without a token, the Host field must be localhost or an address");
        return false;
    }
    if (origin &&
        !(host && rv_http_origin_matches(origin->value, origin->value_length, host->value, host->value_length))) {
        rv_http_refuse(request, 0, RV_CODE(NOT_PERMITTED), "pages of other origins are not admitted");
        return false;
    }
    return true;
}

static bool field_is(const struct rv_http_head *head, const char *name, const char *value)
{
    const struct rv_http_field *field = rv_http_find(head, name, NULL);

    return field && field->value_length == strlen(value) && strncasecmp(field->value, value, strlen(value)) == 0;
}

/*
 * A picture or a script of another page is asked for without an Origin, and a cookie is shown to all ports of a host.
 * Browsers say where such a request comes from. A link to this page may be followed, but not to what an operator does.
 */
static bool check_site(struct rv_http_request *request, const struct rv_http_head *head, enum rv_http_access access)
{
    if (!rv_http_find(head, "Sec-Fetch-Site", NULL) || field_is(head, "Sec-Fetch-Site", "same-origin") ||
        field_is(head, "Sec-Fetch-Site", "none") ||
        (access < RV_HTTP_OPERATOR && field_is(head, "Sec-Fetch-Mode", "navigate")))
        return true;
    rv_http_refuse(request, 0, RV_CODE(NOT_PERMITTED), "pages of other origins are not admitted");
    return false;
}

bool rv_http_check_client(struct rv_http_request *request, const struct rv_http_head *head, enum rv_http_access access)
{
    return check_browser(request, head) && check_site(request, head, access) && check_token(request, head, access);
}

static bool check_content(struct rv_http_request *request, const struct rv_http_head *head,
                          const struct rv_http_route *route)
{
    static const char json[] = "application/json";
    const struct rv_http_field *type = rv_http_find(head, "Content-Type", NULL);

    if (request->framing.length > RV_HTTP_BODY_MAX) {
        rv_http_refuse(request, 0, RV_CODE(TOO_LARGE), "the request's body is larger than %u KiB",
                       RV_HTTP_BODY_MAX / 1024);
        return false;
    }
    if (!route->body)
        return true;
    if (!type || type->value_length < strlen(json) || strncasecmp(type->value, json, strlen(json)) != 0 ||
        (type->value_length > strlen(json) && !strchr("; ", type->value[strlen(json)]))) {
        rv_http_refuse(request, 415, RV_CODE(BAD_REQUEST),
                       "the body must be JSON, with Content-Type: application/json");
        return false;
    }
    return true;
}

static bool check_queries(struct rv_http_request *request, const struct rv_http_route *route)
{
    char wanted[RV_NAME_MAX], shown[RV_NAME_MAX];

    for (unsigned i = 0; i < request->target.query_count; i++) {
        const char *name = request->target.query[i].name;

        (void)snprintf(wanted, sizeof(wanted), "%s ", name);
        if (*name && !strchr(name, ' ') && strlen(name) < sizeof(wanted) - 2 && strstr(route->queries, wanted) &&
            (strstr(route->queries, wanted) == route->queries || strstr(route->queries, wanted)[-1] == ' '))
            continue;
        rv_http_refuse(request, 0, RV_CODE(BAD_REQUEST), "there is no query parameter \"%s\" here",
                       rv_escape(shown, sizeof(shown), name, strlen(name)));
        return false;
    }
    return true;
}

static const struct rv_http_route *find_route(struct rv_http_request *request, const char *method)
{
    char allowed[128];
    const struct rv_http_route *route = rv_http_find_route(&request->target, method, allowed, sizeof(allowed));

    if (route)
        return route;
    if (allowed[0] == '\0') {
        rv_http_refuse(request, 404, RV_CODE(BAD_REQUEST), "nothing is at this path; docs/http.md lists what there is");
        return NULL;
    }
    if (strcmp(method, "OPTIONS") == 0)
        rv_http_answer_text(request, 204, NULL, strdup(""), 0);
    else
        rv_http_refuse(request, 405, RV_CODE(BAD_REQUEST), "this path has no such method; it has %s", allowed);
    rv_http_add_header(request, "Allow", allowed);
    return NULL;
}

void rv_http_check(struct rv_http_request *request, const char *method, const char *version)
{
    static const char no_memory[] = "no memory for the request";
    struct rv_http_head head = {0};
    const struct rv_http_route *route;
    const char *why = "";
    unsigned status;

    rv_http_read_head(request, method, version, &head);
    status = rv_http_check_head(&head, &request->framing, &why);
    if (status) {
        request->close = true;
        rv_http_refuse(request, status, RV_CODE(BAD_REQUEST), "%s", why);
        return;
    }
    request->close = !request->framing.keep_alive;
    if (!request->uri) {
        rv_http_refuse(request, 0, RV_CODE(NO_MEMORY), "%s", no_memory);
        return;
    }
    if (request->framing.has_body) /* until all of it is read, an answer leaves bytes behind */
        request->close = true;
    request->body_max = RV_HTTP_BODY_MAX;
    request->method = method;
    request->head_only = strcmp(method, "HEAD") == 0;
    if (rv_front_check(request, method, &head))
        return;
    status = rv_http_parse_target(request->uri, request->uri_length, &request->target, &why);
    if (status) {
        rv_http_refuse(request, status, RV_CODE(BAD_REQUEST), "%s", why);
        return;
    }
    route = find_route(request, method);
    if (!route || !rv_http_check_client(request, &head, route->access) || !check_content(request, &head, route) ||
        !check_queries(request, route))
        return;
    request->close = !request->framing.keep_alive;
    request->route = route;
}
