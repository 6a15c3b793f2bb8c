#include "error.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "json_text.h"
#include "rpc.pb-c.h"

#define CODE(name) [RESVISOR__V1__ERROR_CODE__ERROR_##name]

static const struct rv_error_row rows[] = {
    CODE(OK) = {"ok", "done", "", RV_EXIT_DONE, 200, false},
    CODE(INTERNAL) = {"internal", "a fault of resvisor itself", "see the log", RV_EXIT_INTERNAL, 500, false},
    CODE(BAD_REQUEST) = {"bad_request", "the request is malformed", "", RV_EXIT_USAGE, 400, false},
    CODE(BAD_VERSION) = {"bad_version", "the other side speaks another protocol version",
                         "use programs of one resvisor version", RV_EXIT_REFUSED, 400, false},
    CODE(UNAUTHENTICATED) = {"unauthenticated", "token missing or wrong",
                             "send the token of the file named by rpc.token_file", RV_EXIT_REFUSED, 401, false},
    CODE(NOT_PERMITTED) = {"not_permitted", "not admitted",
                           "see clients.group, rpc.group and model_folders in the configuration", RV_EXIT_REFUSED, 403,
                           false},
    CODE(NO_SUCH_MODEL) = {"no_such_model", "no such model", "`resvisor models` lists them", RV_EXIT_NOT_FOUND, 404,
                           false},
    CODE(NO_SUCH_TYPE) = {"no_such_type", "no such workflow type", "`resvisor status` lists them", RV_EXIT_NOT_FOUND,
                          404, false},
    CODE(NO_SUCH_JOB) = {"no_such_job", "no such job", "`resvisor jobs` lists them", RV_EXIT_NOT_FOUND, 404, false},
    CODE(NO_SUCH_RESULT) = {"no_such_result", "no such result, or it has expired",
                            "submit the job again under a new id", RV_EXIT_NOT_FOUND, 404, false},
    CODE(JOB_EXISTS) = {"job_exists", "the job id is taken by another job", "choose a new job id", RV_EXIT_REFUSED, 409,
                        false},
    CODE(QUEUE_FULL) = {"queue_full", "the queue is full", "try again later, or raise types.NAME.queue",
                        RV_EXIT_NO_ROOM, 503, true},
    CODE(TYPE_FAILED) = {"type_failed", "the type's workers died too often",
                         "read `resvisor logs TYPE`, mend the cause, then `resvisor restart TYPE`", RV_EXIT_REFUSED,
                         503, false},
    CODE(DEADLINE) = {"deadline", "the deadline passed", "", RV_EXIT_DEADLINE, 504, true},
    CODE(CANCELLED) = {"cancelled", "cancelled", "", RV_EXIT_CANCELLED, 409, false},
    CODE(JOB_FAILED) = {"job_failed", "the executor reported a failure", "read `resvisor logs TYPE`",
                        RV_EXIT_JOB_FAILED, 422, false},
    CODE(WORKER_DIED) = {"worker_died", "the worker died while it ran this job",
                         "read `resvisor logs TYPE`; submit again under a new id", RV_EXIT_JOB_FAILED, 502, false},
    CODE(JOB_LOST) = {"job_lost", "the job was started, and its outcome is lost",
                      "check whether its effect is there; submit again under a new id", RV_EXIT_JOB_FAILED, 502, false},
    CODE(QUARANTINED) = {"quarantined", "the job killed its worker twice and is not tried again",
                         "read `resvisor logs TYPE`, mend the cause, submit under a new id", RV_EXIT_JOB_FAILED, 422,
                         false},
    CODE(MODEL_INVALID) = {"model_invalid", "the model file is malformed", "copy or download the file again",
                           RV_EXIT_REFUSED, 422, false},
    CODE(MODEL_CHANGED) = {"model_changed", "the model file changed while it was read",
                           "wait until it is written, then try again", RV_EXIT_REFUSED, 409, true},
    CODE(MODEL_IN_USE) = {"model_in_use", "the model has leases", "stop its users first; `resvisor status` names them",
                          RV_EXIT_REFUSED, 409, true},
    CODE(MODEL_PINNED) = {"model_pinned", "the model is pinned", "`resvisor unpin MODEL` first", RV_EXIT_REFUSED, 409,
                          false},
    CODE(FILE) = {"file", "the file cannot be read", "", RV_EXIT_REFUSED, 422, false},
    CODE(OVER_BUDGET) = {"over_budget", "the model does not fit into the pool's budget",
                         "unload a model, or raise pool.budget", RV_EXIT_NO_ROOM, 507, true},
    CODE(NO_MEMORY) = {"no_memory", "no memory", "unload a model or stop another program", RV_EXIT_NO_ROOM, 507, true},
    CODE(TOO_LARGE) = {"too_large", "over the size limit", "", RV_EXIT_REFUSED, 413, false},
    CODE(LIMIT) = {"limit", "a table is full", "try again later", RV_EXIT_NO_ROOM, 503, true},
    CODE(SHUTTING_DOWN) = {"shutting_down", "resvisor is stopping", "start it again", RV_EXIT_REFUSED, 503, true},
    CODE(NOT_READY) = {"not_ready", "just started", "try again in a second", RV_EXIT_REFUSED, 503, true},
    CODE(NOT_RUNNING) = {"not_running", "resvisor is not running", "start it with `resvisor start`",
                         RV_EXIT_NOT_RUNNING, 503, true},
    CODE(ALREADY_RUNNING) = {"already_running", "resvisor is already running",
                             "stop it with `resvisor stop`, or give another --runtime-dir", RV_EXIT_ALREADY_RUNNING,
                             409, false},
    CODE(UNSUPPORTED) = {"unsupported", "not supported by this version", "", RV_EXIT_REFUSED, 501, false},
    CODE(CONFIG) = {"config", "the configuration is wrong", "`resvisor check` says what is allowed", RV_EXIT_USAGE, 500,
                    false},
    CODE(USAGE) = {"usage", "wrong command line", "`resvisor help` shows the commands", RV_EXIT_USAGE, 400, false},
    CODE(PORT_TAKEN) = {"port_taken", "another program has the worker's port",
                        "end that program, or leave --port out of types.NAME.args", RV_EXIT_REFUSED, 503, true},
    CODE(FILE_DAMAGED) = {"file_damaged", "a settings file that the worker reads is damaged",
                          "mend it, or `resvisor restore-config TYPE`; then `resvisor restart TYPE`", RV_EXIT_REFUSED,
                          503, false},
    CODE(NO_SUCH_DEVICE) = {"no_such_device", "no such device", "`resvisor devices` lists them and says what they lack",
                            RV_EXIT_NOT_FOUND, 404, false},
    CODE(DEVICE) = {"device", "a call of the device's driver failed", "`resvisor devices` says what works",
                    RV_EXIT_REFUSED, 502, false},
    CODE(DEVICE_LOST) = {"device_lost", "the device is marked bad",
                         "see the kernel's log; `resvisor devices --test` tries it again", RV_EXIT_REFUSED, 503, false},
};
_Static_assert(sizeof(rows) / sizeof(rows[0]) == RESVISOR__V1__ERROR_CODE__ERROR_DEVICE_LOST + 1,
               "one row per error code of rpc.proto");

const struct rv_error_row *rv_error_row(int code)
{
    if (code < 0 || code >= rv_error_count())
        code = RESVISOR__V1__ERROR_CODE__ERROR_INTERNAL;
    return &rows[code];
}

int rv_error_count(void)
{
    return (int)(sizeof(rows) / sizeof(rows[0]));
}

/* Length of the valid UTF-8 sequence at p (at most left bytes), 0 if there is none. */
static unsigned utf8_length(const unsigned char *p, uint64_t left)
{
    return p[0] < 0x80 ? 1 : rv_utf8_sequence(p, left);
}

/* Takes away half a character that snprintf left at the end: a message with one in it would be refused by its receiver.
 */
static void mend_cut(char *text, int wanted, size_t size)
{
    size_t length, start;

    if (wanted < 0 || (size_t)wanted < size)
        return;
    length = start = strlen(text);
    while (start > 0 && length - start < 4 && ((unsigned char)text[start - 1] & 0xc0) == 0x80)
        start--;
    if (start > 0 && (unsigned char)text[start - 1] >= 0xc0 &&
        utf8_length((const unsigned char *)text + start - 1, length - start + 1) == 0)
        text[start - 1] = '\0';
}

char *rv_text_mend(char *text)
{
    size_t left = strlen(text);

    for (char *p = text; left > 0;) {
        unsigned n = utf8_length((const unsigned char *)p, left);

        if (n == 0) {
            *p = '?';
            n = 1;
        }
        p += n;
        left -= n;
    }
    return text;
}

int rv_error_set(struct rv_error *err, int err_number, int code, const char *format, ...)
{
    va_list ap;

    if (err) {
        err->code = code;
        va_start(ap, format);
        mend_cut(err->message, vsnprintf(err->message, sizeof(err->message), format, ap), sizeof(err->message));
        va_end(ap);
        (void)rv_text_mend(err->message);
        (void)snprintf(err->remedy, sizeof(err->remedy), "%s", rv_error_row(code)->remedy);
    }
    return -err_number;
}

void rv_error_remedy(struct rv_error *err, const char *format, ...)
{
    va_list ap;

    if (!err)
        return;
    va_start(ap, format);
    mend_cut(err->remedy, vsnprintf(err->remedy, sizeof(err->remedy), format, ap), sizeof(err->remedy));
    va_end(ap);
    (void)rv_text_mend(err->remedy);
}

char *rv_escape(char *buffer, uint64_t size, const void *text, uint64_t length)
{
    const unsigned char *p = text;
    uint64_t out = 0, i = 0;

    if (size == 0)
        return buffer;
    while (i < length) {
        unsigned n = p[i] < 0x20 || p[i] == 0x7f ? 0 : utf8_length(p + i, length - i);
        unsigned need = n ? n : 4;

        if (out + need + 4 > size) { /* room for "..." and NUL */
            if (i < length && out + 4 <= size) {
                memcpy(buffer + out, "...", 3);
                out += 3;
            }
            break;
        }
        if (n) {
            memcpy(buffer + out, p + i, n);
            i += n;
        } else {
            (void)snprintf(buffer + out, 5, "\\x%02x", p[i]);
            i++;
        }
        out += need;
    }
    buffer[out] = '\0';
    return buffer;
}
