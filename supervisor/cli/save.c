#include "save.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <unistd.h>

#include "config_keys.h"

#define CODE(name) RESVISOR__V1__ERROR_CODE__ERROR_##name
#define COPY_PIECE (1u << 20)
#define FETCH_TIMEOUT_US UINT64_C(60000000)

/* ---- copying ----------------------------------------------------------------------------------------------------- */

static int write_failed(const char *path, int number, struct rv_error *err)
{
    if (number == ENOSPC || number == EDQUOT)
        return rv_error_set(err, number, CODE(FILE), "no space left for %s", path);
    return rv_error_set(err, number, CODE(FILE), "%s cannot be written: %s", path, strerror(number));
}

static int write_all(int to, const uint8_t *bytes, size_t length, const char *path, struct rv_error *err)
{
    while (length > 0) {
        ssize_t n = write(to, bytes, length);

        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return write_failed(path, errno, err);
        bytes += n;
        length -= (size_t)n;
    }
    return 0;
}

static int copy_by_hand(int from, off_t offset, uint64_t size, int to, const char *path, struct rv_error *err)
{
    uint8_t *buffer = malloc(COPY_PIECE);
    int r = 0;

    if (!buffer)
        return rv_error_set(err, ENOMEM, CODE(NO_MEMORY), "no memory to copy the output");
    while (r == 0 && (uint64_t)offset < size) {
        ssize_t n = pread(from, buffer, COPY_PIECE, offset);

        if (n <= 0)
            r = rv_error_set(err, EIO, CODE(INTERNAL), "the output ends before its size");
        else
            r = write_all(to, buffer, (size_t)n, path, err);
        offset += n > 0 ? n : 0;
    }
    free(buffer);
    return r;
}

/* The output lies in a sealed memfd: the kernel copies, where it can. */
static int copy_descriptor(int from, uint64_t size, int to, const char *path, struct rv_error *err)
{
    off_t offset = 0;

    while ((uint64_t)offset < size) {
        ssize_t n = sendfile(to, from, &offset, size - (uint64_t)offset);

        if (n > 0 || (n < 0 && errno == EINTR))
            continue;
        if (n < 0 && errno != EINVAL && errno != ENOSYS)
            return write_failed(path, errno, err);
        return copy_by_hand(from, offset, size, to, path, err);
    }
    return 0;
}

/* ---- fetching ---------------------------------------------------------------------------------------------------- */

/* One answer written to `to`; *offset moves on. */
static int take_piece(struct rv_frame *answer, uint64_t size, int to, const char *path, uint64_t *offset,
                      struct rv_error *err)
{
    const Resvisor__V1__Reply *reply = answer->message->rpc_reply;
    const Resvisor__V1__Piece *piece = reply->body_case == RESVISOR__V1__REPLY__BODY_PIECE ? reply->piece : NULL;
    struct stat st;
    int r;

    if (!piece)
        return rv_error_set(err, EPROTO, CODE(INTERNAL), "the router answered without a piece of the output");
    if (answer->fd_count > 0) {
        if (*offset != 0 || fstat(answer->fds[0], &st) < 0 || (uint64_t)st.st_size < size)
            return rv_error_set(err, EPROTO, CODE(INTERNAL), "the output is shorter than the job says");
        *offset = size;
        return copy_descriptor(answer->fds[0], size, to, path, err);
    }
    if (piece->offset != *offset || piece->data.len > size - *offset || (piece->data.len == 0 && *offset < size))
        return rv_error_set(err, EPROTO, CODE(INTERNAL), "the router sent a piece that does not fit");
    r = write_all(to, piece->data.data, piece->data.len, path, err);
    *offset += piece->data.len;
    return r;
}

int rv_fetch_output(struct rv_router *router, const Resvisor__V1__Job *job, uint32_t number, int to, const char *path,
                    struct rv_error *err)
{
    uint64_t size = job->outputs[number]->size, offset = 0;
    int r;

    do {
        Resvisor__V1__Request request = RESVISOR__V1__REQUEST__INIT;
        Resvisor__V1__Fetch fetch = RESVISOR__V1__FETCH__INIT;
        struct rv_frame answer = RV_FRAME_INIT;

        fetch.job_id = job->job_id;
        fetch.output = number;
        fetch.offset = offset;
        request.body_case = RESVISOR__V1__REQUEST__BODY_FETCH;
        request.fetch = &fetch;
        r = rv_router_ask(router, &request, FETCH_TIMEOUT_US, RV_ROUTER_PATIENCE_US, &answer, err);
        if (r == 0)
            r = take_piece(&answer, size, to, path, &offset, err);
        rv_frame_fini(&answer);
    } while (r == 0 && offset < size);
    return r;
}

/* ---- files ------------------------------------------------------------------------------------------------------- */

/* The output's name comes from an executor: only its last part counts, and it may not be hidden or a folder. */
static void safe_name(const Resvisor__V1__Output *output, uint32_t number, char *buffer, size_t size)
{
    const char *slash = strrchr(output->name, '/');
    const char *name = slash ? slash + 1 : output->name;

    if (*name == '\0' || *name == '.' || strlen(name) > NAME_MAX - 64)
        (void)snprintf(buffer, size, "output-%u", number);
    else
        (void)snprintf(buffer, size, "%s", name);
    for (char *p = buffer; *p; p++)
        if ((unsigned char)*p < 0x20 || *p == 0x7f)
            *p = '_';
}

/* Writes into a new file beside the target, which takes its place when all is there. */
static int save_regular(struct rv_router *router, const Resvisor__V1__Job *job, uint32_t number, const char *path,
                        struct rv_error *err)
{
    char target[PATH_MAX], temporary[PATH_MAX];
    const char *slash;
    int fd, r;

    if (!realpath(path, target)) /* a link stays a link: what it points to is replaced */
        (void)snprintf(target, sizeof(target), "%s", path);
    slash = strrchr(target, '/');
    r = snprintf(temporary, sizeof(temporary), "%.*s.%s.%d.part", slash ? (int)(slash + 1 - target) : 0, target,
                 slash ? slash + 1 : target, (int)getpid());
    if (r < 0 || (size_t)r >= sizeof(temporary))
        return write_failed(path, ENAMETOOLONG, err);
    fd = open(temporary, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (fd < 0)
        return write_failed(path, errno, err);
    r = rv_fetch_output(router, job, number, fd, path, err);
    if (close(fd) < 0 && r == 0)
        r = write_failed(path, errno, err);
    if (r == 0 && rename(temporary, target) < 0)
        r = write_failed(path, errno, err);
    if (r < 0)
        (void)unlink(temporary);
    return r;
}

static int save_one(struct rv_router *router, const Resvisor__V1__Job *job, uint32_t number, const char *path,
                    struct rv_error *err)
{
    struct stat st;
    int fd, r;

    if (stat(path, &st) < 0 || S_ISREG(st.st_mode))
        return save_regular(router, job, number, path, err);
    fd = open(path, O_WRONLY | O_CLOEXEC); /* a device or a FIFO: never replaced */
    if (fd < 0)
        return write_failed(path, errno, err);
    r = rv_fetch_output(router, job, number, fd, path, err);
    (void)close(fd);
    return r;
}

static bool is_folder(const char *path)
{
    struct stat st;

    return stat(path, &st) == 0 && S_ISDIR(st.st_mode);
}

/* Two outputs may have one name, also after cleaning. */
static bool name_is_taken(const Resvisor__V1__Job *job, uint32_t number, const char *name)
{
    char other[NAME_MAX + 1];

    for (uint32_t i = 0; i < number; i++) {
        safe_name(job->outputs[i], i, other, sizeof(other));
        if (strcmp(other, name) == 0)
            return true;
    }
    return false;
}

static int save_into(struct rv_router *router, const Resvisor__V1__Job *job, uint32_t number, const char *folder,
                     char *path, size_t size, struct rv_error *err)
{
    char name[NAME_MAX + 1];
    size_t n = strlen(folder);
    int r;

    safe_name(job->outputs[number], number, name, sizeof(name));
    r = snprintf(path, size, name_is_taken(job, number, name) ? "%s%s%u-%s" : "%s%s%.0u%s", folder,
                 n && folder[n - 1] != '/' ? "/" : "", name_is_taken(job, number, name) ? number : 0, name);
    if (r < 0 || (size_t)r >= size)
        return write_failed(folder, ENAMETOOLONG, err);
    return save_one(router, job, number, path, err);
}

static void say(const Resvisor__V1__Job *job, uint32_t number, const char *path, json_t *files, bool quiet)
{
    char size[32], safe[PATH_MAX];

    (void)json_array_append_new(files, rv_json_text(path));
    rv_format_size(job->outputs[number]->size, size, sizeof(size));
    if (!quiet)
        printf("%s  %s\n", rv_escape(safe, sizeof(safe), path, strlen(path)), size);
}

/* Decides whether `out` is a folder, and makes it if need be. */
static int prepare_folder(const char *out, bool several, bool *ret_is_folder, struct rv_error *err)
{
    size_t n = strlen(out);

    *ret_is_folder = is_folder(out);
    if (*ret_is_folder || (!several && out[n - 1] != '/'))
        return 0;
    if (mkdir(out, 0777) < 0)
        return rv_error_set(err, errno, CODE(FILE), "the folder %s cannot be made: %s", out, strerror(errno));
    *ret_is_folder = true;
    return 0;
}

int rv_save_outputs(struct rv_router *router, const Resvisor__V1__Job *job, int number, const char *out, json_t *files,
                    bool quiet, struct rv_error *err)
{
    uint32_t first = number == RV_SAVE_ALL ? 0 : (uint32_t)number;
    uint32_t end = number == RV_SAVE_ALL ? (uint32_t)job->n_outputs : first + 1;
    bool folder = false;
    int r;

    if (end > job->n_outputs || job->n_outputs == 0)
        return rv_error_set(err, ENOENT, CODE(NO_SUCH_RESULT), "job %s has %zu outputs", job->job_id, job->n_outputs);
    if (out && *out == '\0')
        return rv_error_set(err, EINVAL, CODE(USAGE), "the name of the output file is empty");
    if (out && strcmp(out, "-") == 0 && end - first > 1)
        return rv_error_set(err, EINVAL, CODE(USAGE), "the job has %zu outputs; choose one with --output",
                            job->n_outputs);
    if (out && strcmp(out, "-") == 0)
        return fflush(stdout), rv_fetch_output(router, job, first, STDOUT_FILENO, "standard output", err);
    r = prepare_folder(out ? out : ".", end - first > 1, &folder, err);
    for (uint32_t i = first; r == 0 && i < end; i++) {
        char path[PATH_MAX];

        if (folder) {
            r = save_into(router, job, i, out ? out : "", path, sizeof(path), err);
        } else {
            (void)snprintf(path, sizeof(path), "%s", out);
            r = save_one(router, job, i, path, err);
        }
        if (r == 0)
            say(job, i, path, files, quiet);
    }
    return r;
}
