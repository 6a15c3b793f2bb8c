#include "log.h"

#include <errno.h>
#include <poll.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "clock.h"

#define LINE_MAX_BYTES 2048
#define FILE_MAX (64 * 1024 * 1024) /* bytes of a log file; a full one starts again */
#define FILE_LOOK (1024 * 1024)     /* bytes between two looks at its size */

static struct {
    const char *program;
    enum rv_log_level level;
    bool journal;
    bool relayed; /* the supervisor reads our lines and adds time and name */
    uint64_t dropped;
    uint64_t since_look;
    void (*tee)(const char *line, uint64_t length, void *context);
    void *tee_context;
} state = {.program = "resvisor", .level = RV_LOG_INFO};

void rv_log_set_tee(void (*tee)(const char *line, uint64_t length, void *context), void *context)
{
    state.tee = tee;
    state.tee_context = context;
}

static const struct {
    const char *word;
    char journal;
} levels[] = {
    [RV_LOG_ERROR] = {"error", '3'},
    [RV_LOG_WARNING] = {"warning", '4'},
    [RV_LOG_INFO] = {"info", '6'},
    [RV_LOG_DEBUG] = {"debug", '7'},
};

void rv_log_init(const char *program, enum rv_log_level level)
{
    state.program = program;
    state.level = level;
    state.relayed = getenv("RESVISOR_CONTROL_FD") != NULL;
    state.journal = !state.relayed && getenv("JOURNAL_STREAM") != NULL;
}

bool rv_log_level_parse(const char *text, enum rv_log_level *ret_level)
{
    for (unsigned i = 0; i < sizeof(levels) / sizeof(levels[0]); i++) {
        if (strcmp(text, levels[i].word) == 0) {
            *ret_level = (enum rv_log_level)i;
            return true;
        }
    }
    return false;
}

/* `start --detach` logs to a file, which nobody rotates: it must not fill the disk. */
static void keep_file_small(size_t written)
{
    struct stat st;

    state.since_look += written;
    if (state.since_look < FILE_LOOK)
        return;
    state.since_look = 0;
    if (fstat(STDERR_FILENO, &st) == 0 && S_ISREG(st.st_mode) && st.st_size > FILE_MAX)
        (void)!ftruncate(STDERR_FILENO, 0);
}

/* Standard error may be a pipe whose reader stands still, and may be shared with programs that want it blocking: so ask
 * before writing instead of setting O_NONBLOCK. A line is under PIPE_BUF, and a writable pipe takes that many whole. */
static bool write_line(const char *line, size_t length)
{
    struct pollfd pfd = {.fd = STDERR_FILENO, .events = POLLOUT};
    ssize_t n;

    if (poll(&pfd, 1, 0) != 1 || !(pfd.revents & POLLOUT))
        return false;
    do {
        n = write(STDERR_FILENO, line, length);
    } while (n < 0 && errno == EINTR);
    keep_file_small(length);
    return n == (ssize_t)length;
}

static size_t line_start(char *line, enum rv_log_level level, const char *program)
{
    struct timespec ts = {0};
    struct tm tm = {0};
    size_t n;

    if (state.relayed)
        return level <= RV_LOG_WARNING ? (size_t)snprintf(line, LINE_MAX_BYTES, "%s: ", levels[level].word) : 0;
    if (state.journal)
        return (size_t)snprintf(line, LINE_MAX_BYTES, "<%c>%s: ", levels[level].journal, program);
    (void)clock_gettime(CLOCK_REALTIME, &ts);
    (void)localtime_r(&ts.tv_sec, &tm);
    n = strftime(line, LINE_MAX_BYTES, "%Y-%m-%d %H:%M:%S", &tm);
    n += (size_t)snprintf(line + n, LINE_MAX_BYTES - n, ".%03ld %-7s %s: ", ts.tv_nsec / 1000000, levels[level].word,
                          program);
    return n;
}

static void line_end(char *line, size_t length)
{
    if (length > LINE_MAX_BYTES - 2)
        length = LINE_MAX_BYTES - 2;
    line[length] = '\n';
    if (state.dropped) {
        char note[LINE_MAX_BYTES];
        size_t n = line_start(note, RV_LOG_WARNING, state.program);

        n += (size_t)snprintf(note + n, sizeof(note) - n,
                              "%llu log lines were lost: the reader of the log stood still\n",
                              (unsigned long long)state.dropped);
        if (!write_line(note, n)) {
            state.dropped++;
            return;
        }
        state.dropped = 0;
    }
    if (!write_line(line, length + 1))
        state.dropped++;
}

/* Whoever formats names and paths escapes them; what was forgotten must not forge lines or reach a terminal. */
static void mend_controls(char *text, size_t length)
{
    for (size_t i = 0; i < length; i++)
        if ((unsigned char)text[i] < 0x20 || text[i] == 0x7f)
            text[i] = '?';
}

void rv_log(enum rv_log_level level, const char *format, ...)
{
    char line[LINE_MAX_BYTES];
    int saved = errno;
    size_t n;
    int m;
    va_list ap;

    if (level > state.level)
        return;
    n = line_start(line, level, state.program);
    va_start(ap, format);
    m = vsnprintf(line + n, sizeof(line) - n, format, ap);
    va_end(ap);
    if (m < 0)
        m = 0;
    if ((size_t)m >= sizeof(line) - n)
        m = (int)(sizeof(line) - n - 1);
    mend_controls(line + n, (size_t)m);
    line_end(line, n + (size_t)m);
    if (state.tee)
        state.tee(line + n, (uint64_t)m, state.tee_context);
    errno = saved;
}

void rv_log_relay(const char *program, const char *text, uint64_t length)
{
    char line[LINE_MAX_BYTES];
    size_t n = line_start(line, RV_LOG_INFO, program);

    if (length > sizeof(line) - n - 1)
        length = sizeof(line) - n - 1;
    memcpy(line + n, text, length);
    line_end(line, n + length);
}
