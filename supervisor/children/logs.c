/*
 * What children print: a bounded ring per child for `resvisor logs`, and a copy of each line in our own log, at a
 * bounded rate. A child that floods its log costs a bounded piece of each turn of the loop.
 */
#include <errno.h>
#include <event2/event.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "children_private.h"
#include "clock.h"
#include "control/control.h"
#include "log.h"
#include "supervisor.h"

#define LINE_BYTES 1024u               /* a longer line is cut into pieces */
#define TURN_BYTES (16u * 1024)        /* read from one pipe per turn of the loop */
#define RELAY_LINES 200u               /* lines of one child in our log per second; all are in its ring */
#define FLOOD_BYTES_PER_S (64u * 1024) /* of one child, kept and relayed; what it prints faster is cut … */
#define FLOOD_BURST (1024u * 1024)     /* … once it has printed so much more than that */
#define FLOOD_LOOK_US RV_SEC           /* how often a cut one is looked at */
#define LAST_LINE_BYTES 384u
#define ORNAMENT_MIN 3u
#define FOLLOWERS_MAX 64u
#define CHUNK_BYTES (32u * 1024) /* of a ring per LogLines frame */

struct rv_log {
    struct rv_supervisor *supervisor;
    struct rv_log *next;
    char name[RV_WORKER_ID_MAX];
    char type[RV_NAME_MAX + 1];
    struct event *event; /* of the pipe; NULL = closed */
    int pipe;
    char line[LINE_BYTES];
    uint32_t line_length;
    char *ring; /* RV_LOG_RING bytes, finished lines with newline */
    uint32_t ring_start, ring_used;
    uint64_t second; /* of the relay limit */
    uint32_t relayed, suppressed;
    uint64_t allowed, allowed_at_us; /* bytes that may be kept now, as of when */
    struct event *cut_timer;         /* pending = it is being cut */
    uint64_t cut_bytes, cut_lines;   /* not kept since then */
    uint64_t cut_seen;               /* cut_bytes when the timer last looked */
    bool line_cut;                   /* a part of the line under way was left out: it is not kept */
    char last[LAST_LINE_BYTES];      /* its last whole line that is no ornament */
};

struct rv_log_follower {
    struct rv_session *session;
    uint64_t id;
    char type[RV_NAME_MAX + 1];
};

static void send_lines(struct rv_session *session, uint64_t id, const char *text, size_t length, bool last)
{
    Rv__Frame frame = RV__FRAME__INIT;
    Rv__LogLines lines = RV__LOG_LINES__INIT;

    lines.text.data = (uint8_t *)text;
    lines.text.len = length;
    lines.last = last;
    frame.id = id;
    frame.body_case = RV__FRAME__BODY_LOG_LINES;
    frame.log_lines = &lines;
    rv_session_send(session, &frame, NULL, 0);
}

static void ring_add(struct rv_log *log, const char *text, uint32_t length)
{
    for (uint32_t i = 0; i < length; i++) {
        log->ring[(log->ring_start + log->ring_used) % RV_LOG_RING] = text[i];
        if (log->ring_used < RV_LOG_RING)
            log->ring_used++;
        else
            log->ring_start = (log->ring_start + 1) % RV_LOG_RING;
    }
}

/* Keeps one finished line and sends it to whoever follows. */
static void keep_line(struct rv_log *log, const char *text, uint32_t length)
{
    struct rv_children *c = log->supervisor->children;
    char line[LINE_BYTES + RV_WORKER_ID_MAX + 8];
    int n = snprintf(line, sizeof(line), "%s: %.*s\n", log->name, (int)length, text);

    if (n < 0)
        return;
    if ((size_t)n >= sizeof(line)) { /* escapes have made it longer; it is a line all the same */
        n = (int)sizeof(line) - 1;
        line[n - 1] = '\n';
    }
    ring_add(log, line, (uint32_t)n);
    for (uint32_t i = 0; i < c->follower_count; i++)
        if (strcmp(c->followers[i].type, log->type) == 0)
            send_lines(c->followers[i].session, c->followers[i].id, line, (size_t)n, false);
}

static void relay_line(struct rv_log *log, const char *text, uint32_t length)
{
    uint64_t second = rv_now_us() / RV_SEC;

    if (second != log->second) {
        if (log->suppressed)
            rv_log_warning("%s: %u more lines; `resvisor logs %s` has the last ones", log->name, log->suppressed,
                           log->type);
        log->second = second;
        log->relayed = log->suppressed = 0;
    }
    if (log->relayed < RELAY_LINES) {
        log->relayed++;
        rv_log_relay(log->name, text, length);
    } else {
        log->suppressed++;
    }
}

/* ---- floods ----------------------------------------------------------------------------------------------------- */

/* A line of ours about it, in its log and in ours. */
static void say_of(struct rv_log *log, const char *format, ...) __attribute__((format(printf, 2, 3)));
static void say_of(struct rv_log *log, const char *format, ...)
{
    char text[256];
    va_list arguments;

    va_start(arguments, format);
    (void)vsnprintf(text, sizeof(text), format, arguments);
    va_end(arguments);
    keep_line(log, text, (uint32_t)strlen(text));
    rv_log_warning("%s: %s", log->name, text);
}

static void say_cut(struct rv_log *log)
{
    if (log->cut_bytes)
        say_of(log, "%llu bytes, about %llu lines, were left out of this log", (unsigned long long)log->cut_bytes,
               (unsigned long long)log->cut_lines);
    log->cut_bytes = log->cut_lines = 0;
}

static void refill(struct rv_log *log)
{
    uint64_t now = rv_now_us(), passed = now - log->allowed_at_us;

    log->allowed_at_us = now;
    if (passed > RV_SEC * (FLOOD_BURST / FLOOD_BYTES_PER_S + 1))
        log->allowed = FLOOD_BURST;
    else
        log->allowed += passed * FLOOD_BYTES_PER_S / RV_SEC;
    if (log->allowed > FLOOD_BURST)
        log->allowed = FLOOD_BURST;
}

/* The flood is over when for a whole second less came than is allowed in one. Else it stays cut: a bit of each second
 * would push what came before the flood out of the ring, and that is what people look for. */
static void on_cut_timer(int fd, short what, void *context)
{
    static const struct timeval again = {FLOOD_LOOK_US / RV_SEC, 0};
    struct rv_log *log = context;
    bool over = log->cut_bytes - log->cut_seen < FLOOD_BYTES_PER_S;

    (void)fd;
    (void)what;
    log->cut_seen = log->cut_bytes;
    if (!over) {
        (void)event_add(log->cut_timer, &again);
        return;
    }
    say_cut(log);
    log->cut_seen = 0;
    refill(log);
}

static bool is_cut(const struct rv_log *log)
{
    return log->cut_timer && event_pending(log->cut_timer, EV_TIMEOUT, NULL);
}

/* May `length` more bytes be kept? */
static bool admit(struct rv_log *log, size_t length)
{
    static const struct timeval soon = {FLOOD_LOOK_US / RV_SEC, 0};

    if (is_cut(log))
        return false;
    refill(log);
    if (log->allowed >= length || !log->cut_timer) {
        log->allowed -= log->allowed >= length ? length : log->allowed;
        return true;
    }
    say_of(log, "it prints more than %u KiB per second: what follows is left out until that ends",
           FLOOD_BYTES_PER_S / 1024);
    (void)event_add(log->cut_timer, &soon);
    return false;
}

/* A line between two rows of marks, such as "****** ERROR ******" or "-------": it says nothing about the reason. */
static bool is_ornament(const char *line, uint32_t length)
{
    return length >= ORNAMENT_MIN && memchr("*=-#_~", line[0], 6) && line[1] == line[0] && line[2] == line[0] &&
           line[length - 1] == line[0] && line[length - 2] == line[0] && line[length - 3] == line[0];
}

/* How a child ended is most often its last line. */
static void remember_last(struct rv_log *log, const char *line, uint32_t length)
{
    if (length > 0 && !is_ornament(line, length))
        (void)rv_escape(log->last, sizeof(log->last), line, length);
}

/* The line under way is collected also while nothing is kept, for what was printed at once may come in pieces. The last
 * place stays free: the next byte that is kept ends a line that is too long. */
static void collect(struct rv_log *log, const char *text, size_t length)
{
    size_t free_bytes = log->line_length < LINE_BYTES - 1 ? LINE_BYTES - 1 - log->line_length : 0;

    if (length > free_bytes)
        length = free_bytes;
    memcpy(log->line + log->line_length, text, length);
    log->line_length += (uint32_t)length;
}

/* Counts what is not kept, and remembers its last line. */
static void leave_out(struct rv_log *log, const char *text, size_t length)
{
    const char *limit = text + length, *line = text, *last = NULL, *end;
    uint32_t last_length = 0;

    log->cut_bytes += length;
    for (; (end = memchr(line, '\n', (size_t)(limit - line))); line = end + 1) {
        log->cut_lines++;
        if (log->line_length > 0) { /* it began in an earlier piece */
            collect(log, line, (size_t)(end - line));
            remember_last(log, log->line, log->line_length);
            log->line_length = 0;
        } else if (end > line) {
            last = line;
            last_length = (uint32_t)(end - line);
        }
    }
    if (last)
        remember_last(log, last, last_length);
    collect(log, line, (size_t)(limit - line));
    log->line_cut = log->line_length > 0;
}

static void finish_line(struct rv_log *log)
{
    char escaped[2 * LINE_BYTES];

    remember_last(log, log->line, log->line_length);
    if (log->line_length == 0 || log->line_cut) {
        log->line_length = 0;
        log->line_cut = false;
        return;
    }
    (void)rv_escape(escaped, sizeof(escaped), log->line, log->line_length);
    log->line_length = 0;
    keep_line(log, escaped, (uint32_t)strlen(escaped));
    relay_line(log, escaped, (uint32_t)strlen(escaped));
}

/* Reads up to `limit` bytes. False = the pipe is at its end, or has nothing now. */
static bool read_pipe(struct rv_log *log, size_t limit)
{
    char buffer[4096];

    while (limit > 0) {
        ssize_t n = read(log->pipe, buffer, sizeof(buffer));

        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            return n < 0 && errno == EAGAIN;
        limit -= (size_t)n < limit ? (size_t)n : limit;
        if (!admit(log, (size_t)n)) {
            leave_out(log, buffer, (size_t)n);
            continue;
        }
        for (ssize_t i = 0; i < n; i++) {
            if (buffer[i] == '\n') {
                finish_line(log);
            } else {
                log->line[log->line_length++] = buffer[i];
                if (log->line_length == LINE_BYTES)
                    finish_line(log);
            }
        }
    }
    return true;
}

static void close_pipe(struct rv_log *log)
{
    if (!log->event)
        return;
    event_free(log->event);
    log->event = NULL;
    (void)close(log->pipe);
    log->pipe = -1;
    finish_line(log);
    if (is_cut(log)) {
        (void)event_del(log->cut_timer);
        say_cut(log);
        if (log->last[0])
            say_of(log, "its last line was: %s", log->last);
    }
    log->cut_seen = 0;
}

static void on_readable(int pipe, short what, void *context)
{
    struct rv_log *log = context;

    (void)pipe;
    (void)what;
    if (!read_pipe(log, TURN_BYTES))
        close_pipe(log);
}

struct rv_log *rv_log_create(struct rv_supervisor *s, const char *name, const char *type)
{
    struct rv_log *log = calloc(1, sizeof(*log)), **tail;

    if (!log)
        return NULL;
    log->ring = malloc(RV_LOG_RING);
    if (!log->ring) {
        free(log);
        return NULL;
    }
    log->supervisor = s;
    log->pipe = -1;
    log->cut_timer = event_new(s->base, -1, 0, on_cut_timer, log); /* without memory for it there is no limit */
    (void)snprintf(log->name, sizeof(log->name), "%s", name);
    (void)snprintf(log->type, sizeof(log->type), "%s", type);
    tail = &s->children->logs; /* workers are shown in their order */
    while (*tail)
        tail = &(*tail)->next;
    *tail = log;
    return log;
}

void rv_log_destroy(struct rv_log *log)
{
    if (!log)
        return;
    close_pipe(log);
    for (struct rv_log **p = &log->supervisor->children->logs; *p; p = &(*p)->next) {
        if (*p == log) {
            *p = log->next;
            break;
        }
    }
    if (log->cut_timer)
        event_free(log->cut_timer);
    free(log->ring);
    free(log);
}

const char *rv_log_last_line(const struct rv_log *log)
{
    return log->last;
}

int rv_log_open_pipe(struct rv_log *log, int pipe)
{
    close_pipe(log);
    log->last[0] = '\0';
    (void)fcntl(pipe, F_SETFL, O_NONBLOCK);
    log->event = event_new(log->supervisor->base, pipe, EV_READ | EV_PERSIST, on_readable, log);
    if (!log->event || event_add(log->event, NULL) < 0) {
        if (log->event)
            event_free(log->event);
        log->event = NULL;
        return -ENOMEM;
    }
    log->pipe = pipe;
    return 0;
}

void rv_log_close_pipe(struct rv_log *log)
{
    if (log->event)
        (void)read_pipe(log, RV_LOG_RING);
    close_pipe(log);
}

/* ---- readers ---------------------------------------------------------------------------------------------------- */

static void send_ring(const struct rv_log *log, struct rv_session *session, uint64_t id, uint64_t most)
{
    uint32_t sent = log->ring_used > most ? log->ring_used - (uint32_t)most : 0;

    while (sent > 0 && sent < log->ring_used && log->ring[(log->ring_start + sent - 1) % RV_LOG_RING] != '\n')
        sent++; /* no half line */

    while (sent < log->ring_used) {
        uint32_t at = (log->ring_start + sent) % RV_LOG_RING;
        uint32_t n = log->ring_used - sent;

        if (n > RV_LOG_RING - at)
            n = RV_LOG_RING - at;
        if (n > CHUNK_BYTES)
            n = CHUNK_BYTES;
        send_lines(session, id, log->ring + at, n, false);
        sent += n;
    }
}

int rv_logs_send(struct rv_supervisor *s, struct rv_session *session, uint64_t id, const Rv__LogRequest *request,
                 struct rv_error *err)
{
    struct rv_children *c = s->children;
    const char *type = request->type;
    char shown[4 * RV_NAME_MAX];
    unsigned found = 0;

    for (const struct rv_log *log = c->logs; log; log = log->next)
        found += strcmp(log->type, type) == 0;
    if (!found)
        return rv_error_set(err, ENOENT, RESVISOR__V1__ERROR_CODE__ERROR_NO_SUCH_TYPE,
                            "no workflow type \"%s\"; also allowed: router, loader, template, resvisor",
                            rv_escape(shown, sizeof(shown), type, strlen(type)));
    if (request->follow && c->follower_count >= FOLLOWERS_MAX)
        return rv_error_set(err, EBUSY, RESVISOR__V1__ERROR_CODE__ERROR_LIMIT, "%u readers follow logs already",
                            FOLLOWERS_MAX);
    for (const struct rv_log *log = c->logs; log; log = log->next)
        if (strcmp(log->type, type) == 0)
            send_ring(log, session, id, request->max_bytes ? request->max_bytes / found : RV_LOG_RING);
    if (request->follow) {
        struct rv_log_follower *f = &c->followers[c->follower_count++];

        *f = (struct rv_log_follower){.session = session, .id = id};
        (void)snprintf(f->type, sizeof(f->type), "%s", type);
    } else {
        send_lines(session, id, "", 0, true);
    }
    return 0;
}

void rv_logs_forget_session(struct rv_supervisor *s, struct rv_session *session)
{
    struct rv_children *c = s->children;

    for (uint32_t i = 0; c && i < c->follower_count;) {
        if (c->followers[i].session == session)
            c->followers[i] = c->followers[--c->follower_count];
        else
            i++;
    }
}

static void tee_line(const char *line, uint64_t length, void *context)
{
    struct rv_children *c = context;
    static bool inside; /* sending the line to a follower may log */

    if (inside || !c->own_log)
        return;
    inside = true;
    keep_line(c->own_log, line, (uint32_t)length);
    inside = false;
}

int rv_logs_init(struct rv_supervisor *s)
{
    struct rv_children *c = s->children;

    c->followers = calloc(FOLLOWERS_MAX, sizeof(*c->followers));
    c->own_log = rv_log_create(s, "resvisor", "resvisor");
    if (!c->followers || !c->own_log)
        return -ENOMEM;
    rv_log_set_tee(tee_line, c);
    return 0;
}

void rv_logs_fini(struct rv_supervisor *s)
{
    rv_log_set_tee(NULL, NULL);
    while (s->children->logs)
        rv_log_destroy(s->children->logs);
    free(s->children->followers);
}
