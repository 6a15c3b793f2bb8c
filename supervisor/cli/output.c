#include "output.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "clock.h"
#include "config_keys.h"
#include "error.h"

#define CELL_MAX 512
#define BAR_WIDTH 24u
#define DRAW_INTERVAL_US (100 * RV_MSEC) /* a terminal line is drawn at most this often */
#define COLOR_OFF "\033[0m"

/* ---- JSON -------------------------------------------------------------------------------------------------------- */

json_t *rv_json_text(const char *text)
{
    json_t *value = text ? json_string(text) : NULL;

    return value ? value : json_string("");
}

json_t *rv_json_error(int code, const char *message, const char *remedy)
{
    const struct rv_error_row *row = rv_error_row(code);
    json_t *error = json_object();

    (void)json_object_set_new(error, "code", json_integer(code));
    (void)json_object_set_new(error, "name", json_string(row->name));
    (void)json_object_set_new(error, "message", rv_json_text(message && *message ? message : row->text));
    (void)json_object_set_new(error, "remedy", rv_json_text(remedy && *remedy ? remedy : row->remedy));
    return error;
}

void rv_json_set_text(json_t *object, const char *name, const char *value)
{
    (void)json_object_set_new(object, name, rv_json_text(value));
}

void rv_json_set_integer(json_t *object, const char *name, uint64_t value)
{
    (void)json_object_set_new(object, name, json_integer((json_int_t)value));
}

json_t *rv_model_json(const Resvisor__V1__ModelStatus *model)
{
    json_t *root = json_object();

    rv_json_set_text(root, "name", model->name);
    rv_json_set_text(root, "path", model->path);
    rv_json_set_text(root, "state", model->state);
    rv_json_set_integer(root, "generation", model->generation);
    rv_json_set_integer(root, "bytes", model->bytes);
    rv_json_set_integer(root, "tensors", model->tensors);
    rv_json_set_integer(root, "leases", model->leases);
    (void)json_object_set_new(root, "pinned", json_boolean(model->pinned));
    rv_json_set_integer(root, "loads", model->loads);
    rv_json_set_integer(root, "load_ms", model->load_ms);
    rv_json_set_integer(root, "read_bytes", model->read_bytes);
    rv_json_set_integer(root, "old_generations", model->old_generations);
    rv_json_set_text(root, "backend", model->backend);
    rv_json_set_text(root, "device", model->device);
    if (model->total_bytes) {
        rv_json_set_integer(root, "progress_bytes", model->progress_bytes);
        rv_json_set_integer(root, "total_bytes", model->total_bytes);
    }
    if (model->error && model->error->code != RESVISOR__V1__ERROR_CODE__ERROR_OK)
        (void)json_object_set_new(root, "error",
                                  rv_json_error((int)model->error->code, model->error->message, model->error->remedy));
    return root;
}

void rv_json_print(json_t *root)
{
    if (!root || json_dumpf(root, stdout, JSON_INDENT(2)) < 0)
        fprintf(stderr, "resvisor: no memory for the output\n");
    (void)fputc('\n', stdout);
    json_decref(root);
}

/* ---- tables ------------------------------------------------------------------------------------------------------ */

bool rv_is_color_terminal(int fd)
{
    const char *no_color = getenv("NO_COLOR"), *term = getenv("TERM");

    return isatty(fd) && !(no_color && *no_color) && term && *term && strcmp(term, "dumb") != 0;
}

const char *rv_color_of_state(const char *state, bool terminal)
{
    static const struct {
        const char *state, *color;
    } colors[] = {
        {"READY", "\033[32m"},   {"RESIDENT", "\033[32m"}, {"DONE", "\033[32m"},
        {"RUNNING", "\033[32m"}, {"STARTING", "\033[33m"}, {"LOADING", "\033[33m"},
        {"BACKOFF", "\033[33m"}, {"DRAINING", "\033[33m"}, {"FAILED", "\033[31m"},
    };

    for (unsigned i = 0; terminal && i < sizeof(colors) / sizeof(colors[0]); i++)
        if (strcmp(colors[i].state, state) == 0)
            return colors[i].color;
    return "";
}

void rv_table_init(struct rv_table *table, const char *const *titles)
{
    memset(table, 0, sizeof(*table));
    while (titles[table->columns] && table->columns < RV_TABLE_COLUMNS_MAX) {
        table->titles[table->columns] = titles[table->columns];
        table->columns++;
    }
}

void rv_table_add(struct rv_table *table, const char *format, ...)
{
    char text[CELL_MAX], safe[CELL_MAX];
    va_list ap;
    int n;

    if (table->count == table->room) {
        unsigned room = table->room ? table->room * 2 : 64;
        char **cells = reallocarray(table->cells, room, sizeof(*cells));

        if (!cells) {
            table->no_memory = true;
            return;
        }
        table->cells = cells;
        table->room = room;
    }
    va_start(ap, format);
    n = vsnprintf(text, sizeof(text), format, ap);
    va_end(ap);
    rv_escape(safe, sizeof(safe), text, n < 0 ? 0 : strlen(text));
    table->cells[table->count] = strdup(safe);
    table->no_memory |= !table->cells[table->count];
    table->count++;
}

/* Characters, not bytes: good enough for columns, since names are ASCII. */
static unsigned text_width(const char *text)
{
    unsigned width = 0;

    for (; *text; text++)
        width += ((unsigned char)*text & 0xc0) != 0x80;
    return width;
}

static void print_cell(const char *text, unsigned width, bool right, bool last, bool color)
{
    unsigned used = text_width(text);
    unsigned pad = width > used ? width - used : 0;
    const char *code = rv_color_of_state(text, color);

    if (right)
        printf("%*s", (int)pad, "");
    printf("%s%s%s", code, text, *code ? COLOR_OFF : "");
    if (!last)
        printf("%*s", (int)(right ? 2 : pad + 2), "");
}

void rv_table_print(struct rv_table *table)
{
    unsigned widths[RV_TABLE_COLUMNS_MAX] = {0};
    bool color = rv_is_color_terminal(STDOUT_FILENO);

    for (unsigned c = 0; c < table->columns; c++)
        widths[c] = text_width(table->titles[c] + (*table->titles[c] == '>'));
    for (unsigned i = 0; i < table->count && !table->no_memory; i++) {
        unsigned width = text_width(table->cells[i]);

        if (width > widths[i % table->columns])
            widths[i % table->columns] = width;
    }
    for (unsigned c = 0; c < table->columns; c++) {
        bool right = *table->titles[c] == '>';

        print_cell(table->titles[c] + right, widths[c], right, c + 1 == table->columns, false);
    }
    (void)putchar('\n');
    for (unsigned i = 0; i + table->columns <= table->count && !table->no_memory; i += table->columns) {
        unsigned last = table->columns; /* no spaces at the end of a line */

        while (last > 1 && *table->cells[i + last - 1] == '\0')
            last--;
        for (unsigned c = 0; c < last; c++)
            print_cell(table->cells[i + c], widths[c], *table->titles[c] == '>', c + 1 == last, color);
        (void)putchar('\n');
    }
    if (table->no_memory)
        fprintf(stderr, "resvisor: no memory for the table\n");
    for (unsigned i = 0; i < table->count; i++)
        free(table->cells[i]);
    free(table->cells);
}

/* ---- progress ---------------------------------------------------------------------------------------------------- */

void rv_progress_init(struct rv_progress *progress, bool bytes, bool quiet)
{
    const char *term = getenv("TERM");

    memset(progress, 0, sizeof(*progress));
    progress->terminal = isatty(STDERR_FILENO) && term && strcmp(term, "dumb") != 0;
    progress->bytes = bytes;
    progress->quiet = quiet;
    progress->start_us = rv_now_us();
    progress->last_tenth = UINT32_MAX;
}

static void format_count(const struct rv_progress *progress, uint64_t value, char *buffer, size_t size)
{
    if (progress->bytes)
        rv_format_size(value, buffer, size);
    else
        (void)snprintf(buffer, size, "%" PRIu64, value);
}

static void draw_bar(struct rv_progress *progress, const char *what, uint64_t done, uint64_t total, const char *text)
{
    char bar[BAR_WIDTH + 1], done_text[32], total_text[32];
    unsigned filled = total ? (unsigned)((double)done * BAR_WIDTH / (double)total) : 0;
    uint64_t now = rv_now_us();

    if (progress->drawn && now - progress->last_us < DRAW_INTERVAL_US && done < total)
        return;
    progress->last_us = now;
    progress->drawn = true;
    for (unsigned i = 0; i < BAR_WIDTH; i++)
        bar[i] = i < filled ? '#' : '.';
    bar[BAR_WIDTH] = '\0';
    format_count(progress, done, done_text, sizeof(done_text));
    format_count(progress, total, total_text, sizeof(total_text));
    if (total)
        fprintf(stderr, "\r%s [%s] %3u%% %s of %s, %.1f s %s\033[K", what, bar,
                (unsigned)((double)done * 100 / (double)total), done_text, total_text,
                (double)(now - progress->start_us) / 1e6, text);
    else
        fprintf(stderr, "\r%s %.1f s %s\033[K", what, (double)(now - progress->start_us) / 1e6, text);
    (void)fflush(stderr);
}

static void say_line(struct rv_progress *progress, const char *what, uint64_t done, uint64_t total, const char *text)
{
    unsigned tenth = total ? (unsigned)((double)done * 10 / (double)total) : 0;
    char done_text[32], total_text[32];

    if (tenth == progress->last_tenth && strncmp(progress->last_text, text, sizeof(progress->last_text) - 1) == 0)
        return;
    progress->last_tenth = tenth;
    (void)snprintf(progress->last_text, sizeof(progress->last_text), "%s", text);
    format_count(progress, done, done_text, sizeof(done_text));
    format_count(progress, total, total_text, sizeof(total_text));
    if (total)
        fprintf(stderr, "%s: %s of %s%s%s\n", what, done_text, total_text, *text ? ", " : "", text);
    else
        fprintf(stderr, "%s%s%s\n", what, *text ? ": " : "", text);
}

void rv_progress_show(struct rv_progress *progress, const char *what, uint64_t done, uint64_t total, const char *text)
{
    char safe_what[128], safe_text[128];

    if (progress->quiet)
        return;
    if (total && done > total)
        done = total;
    rv_escape(safe_what, sizeof(safe_what), what, strlen(what));
    rv_escape(safe_text, sizeof(safe_text), text, strlen(text));
    if (progress->terminal)
        draw_bar(progress, safe_what, done, total, safe_text);
    else
        say_line(progress, safe_what, done, total, safe_text);
}

void rv_progress_end(struct rv_progress *progress)
{
    if (progress->drawn)
        fprintf(stderr, "\r\033[K");
    progress->drawn = false;
}

/* ---- words ------------------------------------------------------------------------------------------------------- */

const char *rv_job_state_name(Resvisor__V1__JobState state)
{
    static const char *const names[] = {"UNKNOWN", "QUEUED", "RUNNING", "DONE", "FAILED", "CANCELLED"};

    return (unsigned)state < sizeof(names) / sizeof(names[0]) ? names[state] : "UNKNOWN";
}
