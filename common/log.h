/*
 * The log: one line per event to standard error. With JOURNAL_STREAM set each line starts with "<N>" (the level that
 * journald reads), else with time and level; a child of the supervisor
 * (RESVISOR_CONTROL_FD) leaves both to it. Writing never blocks a process: lines that do not fit are counted, and
 * the count is logged with the next line that does. One thread at a time per process, no allocation.
 *
 * Library code does not log; an error is logged once, where it is decided. Bytes from peers go through rv_escape.
 */
#ifndef RV_LOG_H
#define RV_LOG_H

#include <stdbool.h>
#include <stdint.h>

enum rv_log_level { RV_LOG_ERROR, RV_LOG_WARNING, RV_LOG_INFO, RV_LOG_DEBUG };

/* program: a static string, shown in each line. */
void rv_log_init(const char *program, enum rv_log_level level);

/* Finds "error", "warning", "info" or "debug"; false = another word. */
bool rv_log_level_parse(const char *text, enum rv_log_level *ret_level);

void rv_log(enum rv_log_level level, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* One finished line of another process (no newline), shown under that process' name. */
void rv_log_relay(const char *program, const char *line, uint64_t length);

/* Each line of rv_log (not of rv_log_relay) is also given to this function, without time and newline. NULL = to nobody.
 */
void rv_log_set_tee(void (*tee)(const char *line, uint64_t length, void *context), void *context);

#define rv_log_error(...) rv_log(RV_LOG_ERROR, __VA_ARGS__)
#define rv_log_warning(...) rv_log(RV_LOG_WARNING, __VA_ARGS__)
#define rv_log_info(...) rv_log(RV_LOG_INFO, __VA_ARGS__)
#define rv_log_debug(...) rv_log(RV_LOG_DEBUG, __VA_ARGS__)

#endif
