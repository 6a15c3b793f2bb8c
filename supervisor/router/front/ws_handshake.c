/* The opening handshake, RFC 6455 section 4: as a server to clients, as a client to workers. */
#include <nettle/base64.h>
#include <nettle/sha1.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>
#include <sys/random.h>

#include "ws_parts.h"

#define GUID "258EAFA5-E914-47DA-95CA-C5AB0DC85B11" /* RFC 6455 section 1.3 */
#define KEY_BYTES 16u

_Static_assert(BASE64_ENCODE_RAW_LENGTH(KEY_BYTES) == RV_WS_KEY_LENGTH, "a key in base64");
_Static_assert(BASE64_ENCODE_RAW_LENGTH(SHA1_DIGEST_SIZE) == RV_WS_ACCEPT_LENGTH, "a digest in base64");

void rv_ws_accept(const char key[RV_WS_KEY_LENGTH], char ret_accept[RV_WS_ACCEPT_LENGTH + 1])
{
    struct sha1_ctx context;
    uint8_t digest[SHA1_DIGEST_SIZE];

    sha1_init(&context);
    sha1_update(&context, RV_WS_KEY_LENGTH, (const uint8_t *)key);
    sha1_update(&context, strlen(GUID), (const uint8_t *)GUID);
    sha1_digest(&context, sizeof(digest), digest);
    base64_encode_raw(ret_accept, sizeof(digest), digest);
    ret_accept[RV_WS_ACCEPT_LENGTH] = '\0';
}

bool rv_ws_make_key(char ret_key[RV_WS_KEY_LENGTH + 1])
{
    uint8_t bytes[KEY_BYTES];

    if (getrandom(bytes, sizeof(bytes), 0) != sizeof(bytes))
        return false;
    base64_encode_raw(ret_key, sizeof(bytes), bytes);
    ret_key[RV_WS_KEY_LENGTH] = '\0';
    return true;
}

/* One of a list of words, separated by commas. */
static bool has_word(const char *list, size_t length, const char *word)
{
    size_t wanted = strlen(word), at = 0;

    while (at < length) {
        size_t end = at, next;

        while (end < length && list[end] != ',')
            end++;
        next = end + 1;
        while (at < end && (list[at] == ' ' || list[at] == '\t'))
            at++;
        while (end > at && (list[end - 1] == ' ' || list[end - 1] == '\t'))
            end--;
        if (end - at == wanted && strncasecmp(list + at, word, wanted) == 0)
            return true;
        at = next;
    }
    return false;
}

static bool key_is_valid(const char *key, size_t length)
{
    struct base64_decode_ctx context;
    uint8_t bytes[BASE64_DECODE_LENGTH(RV_WS_KEY_LENGTH)];
    size_t decoded = sizeof(bytes);

    if (length != RV_WS_KEY_LENGTH)
        return false;
    base64_decode_init(&context);
    return base64_decode_update(&context, &decoded, bytes, length, key) && base64_decode_final(&context) &&
           decoded == KEY_BYTES;
}

/* A field may come in several lines: together they are one list. */
static bool some_field_has(const struct rv_http_head *head, const char *name, const char *word)
{
    for (unsigned i = 0; i < head->field_count; i++) {
        const struct rv_http_field *field = &head->fields[i];

        if (field->name_length == strlen(name) && strncasecmp(field->name, name, field->name_length) == 0 &&
            has_word(field->value, field->value_length, word))
            return true;
    }
    return false;
}

unsigned rv_ws_check_request(const struct rv_http_head *head, char ret_accept[RV_WS_ACCEPT_LENGTH + 1],
                             const char **why)
{
    unsigned versions, keys;
    const struct rv_http_field *version = rv_http_find(head, "Sec-WebSocket-Version", &versions);
    const struct rv_http_field *key = rv_http_find(head, "Sec-WebSocket-Key", &keys);

    *why = "this path is a WebSocket: the request must ask for the upgrade";
    if (!head->method || strcmp(head->method, "GET") != 0 || !head->version || strcmp(head->version, "HTTP/1.1") != 0)
        return 400;
    if (!some_field_has(head, "Upgrade", "websocket") || !some_field_has(head, "Connection", "upgrade"))
        return 400;
    *why = "only version 13 of WebSocket is spoken here";
    if (!version || versions != 1 || version->value_length != 2 || memcmp(version->value, "13", 2) != 0)
        return 426;
    *why = "Sec-WebSocket-Key must be 16 bytes in base64";
    if (!key || keys != 1 || !key_is_valid(key->value, key->value_length))
        return 400;
    rv_ws_accept(key->value, ret_accept);
    return 0;
}

/* ---- to a worker ------------------------------------------------------------------------------------------------ */

struct writer {
    char *text;
    size_t size, length;
    bool full;
};

static void put(struct writer *w, const char *text)
{
    size_t length = strlen(text);

    if (w->full || length >= w->size - w->length) {
        w->full = true;
        return;
    }
    memcpy(w->text + w->length, text, length + 1);
    w->length += length;
}

static void put_encoded(struct writer *w, const char *text)
{
    static const char plain[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~";

    for (; *text; text++) {
        char piece[4] = {*text};

        if (!strchr(plain, *text))
            (void)snprintf(piece, sizeof(piece), "%%%02X", (unsigned)(unsigned char)*text);
        put(w, piece);
    }
}

size_t rv_ws_write_target(char *buffer, size_t size, const struct rv_http_target *target, const char *client_id)
{
    struct writer w = {.text = buffer, .size = size};

    put(&w, "/ws?clientId=");
    put_encoded(&w, client_id);
    for (unsigned i = 0; i < target->query_count; i++) {
        if (strcmp(target->query[i].name, "clientId") == 0 || strcmp(target->query[i].name, "token") == 0)
            continue;
        put(&w, "&");
        put_encoded(&w, target->query[i].name);
        put(&w, "=");
        put_encoded(&w, target->query[i].value);
    }
    return w.full ? 0 : w.length;
}

size_t rv_ws_write_request(char *buffer, size_t size, const char *target, const char *host, const char *key)
{
    struct writer w = {.text = buffer, .size = size};

    put(&w, "GET ");
    put(&w, target);
    put(&w, " HTTP/1.1\r\nHost: ");
    put(&w, host);
    put(&w, "\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: ");
    put(&w, key);
    put(&w, "\r\n\r\n");
    return w.full ? 0 : w.length;
}

/* The lines of a worker's answer, without their ends. */
static bool read_fields(const char *at, const char *end, struct rv_http_head *ret_head)
{
    while (at < end) {
        const char *stop = memchr(at, '\r', (size_t)(end - at));
        const char *colon = stop ? memchr(at, ':', (size_t)(stop - at)) : NULL;
        struct rv_http_field *field = &ret_head->fields[ret_head->field_count];

        if (!stop || stop + 1 >= end || stop[1] != '\n' || !colon || ret_head->field_count == RV_HTTP_FIELDS_MAX)
            return false;
        *field = (struct rv_http_field){at, colon + 1, (size_t)(colon - at), (size_t)(stop - colon - 1)};
        while (field->value_length > 0 && (*field->value == ' ' || *field->value == '\t')) {
            field->value++;
            field->value_length--;
        }
        while (field->value_length > 0 && strchr(" \t", field->value[field->value_length - 1]))
            field->value_length--;
        ret_head->field_count++;
        at = stop + 2;
    }
    return true;
}

enum rv_ws_response rv_ws_read_response(const char *text, size_t length, const char *accept, size_t *ret_length,
                                        const char **why)
{
    static const char status[] = "HTTP/1.1 101";
    const char *end = memmem(text, length, "\r\n\r\n", 4), *line;
    const struct rv_http_field *shown;
    struct rv_http_head head = {0};
    unsigned count;

    *why = "its answer to the handshake is too long";
    if (!end)
        return length >= RV_WS_RESPONSE_MAX ? RV_WS_RESPONSE_BAD : RV_WS_RESPONSE_MORE;
    *why = "it refused the handshake";
    if (length < strlen(status) || memcmp(text, status, strlen(status)) != 0)
        return RV_WS_RESPONSE_BAD;
    *why = "its answer to the handshake is malformed";
    line = memmem(text, length, "\r\n", 2);
    if (!read_fields(line + 2, end + 2, &head) || !some_field_has(&head, "Upgrade", "websocket") ||
        !some_field_has(&head, "Connection", "upgrade") || rv_http_find(&head, "Sec-WebSocket-Extensions", NULL))
        return RV_WS_RESPONSE_BAD;
    shown = rv_http_find(&head, "Sec-WebSocket-Accept", &count);
    *why = "its answer to the handshake is for another request";
    if (!shown || count != 1 || shown->value_length != strlen(accept) ||
        memcmp(shown->value, accept, shown->value_length) != 0)
        return RV_WS_RESPONSE_BAD;
    *ret_length = (size_t)(end - text) + 4;
    return RV_WS_RESPONSE_GOOD;
}
