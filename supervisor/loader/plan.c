#include "plan.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "hash.h"
#include "rpc.pb-c.h"
#include "safetensors.h"

#define ERROR(name) RESVISOR__V1__ERROR_CODE__ERROR_##name

#define PREFIX_BYTES 8u
#define SUFFIX ".safetensors"
#define BLOB_NAME "blob"
#define SHOWN_NAME 160u

/* Reads exactly length bytes. */
static int read_at(int file, void *buffer, uint64_t length, uint64_t offset, struct rv_error *err)
{
    uint8_t *p = buffer;

    while (length > 0) {
        ssize_t n = pread(file, p, length, (off_t)offset);

        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return rv_error_set(err, errno, ERROR(FILE), "cannot read the file at byte %llu: %s",
                                (unsigned long long)offset, strerror(errno));
        if (n == 0)
            return rv_error_set(err, ESTALE, ERROR(MODEL_CHANGED),
                                "the file became shorter while it was read: it ends at byte %llu",
                                (unsigned long long)offset);
        p += n;
        offset += (uint64_t)n;
        length -= (uint64_t)n;
    }
    return 0;
}

/* The first bytes: *ret_length is the header's length as the file says it; *ret_brace: a '{' follows. */
static int read_prefix(int file, uint64_t file_size, uint64_t *ret_length, bool *ret_brace, struct rv_error *err)
{
    uint8_t bytes[PREFIX_BYTES + 1] = {0};
    uint64_t length = 0;
    int r = read_at(file, bytes, file_size < sizeof(bytes) ? file_size : sizeof(bytes), 0, err);

    if (r < 0)
        return r;
    for (unsigned i = 0; i < PREFIX_BYTES; i++)
        length |= (uint64_t)bytes[i] << 8 * i;
    *ret_length = length;
    *ret_brace = file_size > PREFIX_BYTES && bytes[PREFIX_BYTES] == '{';
    return 0;
}

static int place(struct rv_plan *plan, const char *name, uint32_t name_length, struct rv_index_entry *entry,
                 struct rv_error *err)
{
    char shown[SHOWN_NAME];
    int r;

    /* Cannot overflow: at most the file's size and 256 bytes for each of RV_TENSORS_MAX. */
    entry->offset = (plan->arena_used + RV_TENSOR_ALIGN - 1) / RV_TENSOR_ALIGN * RV_TENSOR_ALIGN;
    r = rv_index_builder_add(plan->builder, name, name_length, entry);
    if (r == -ENOMEM)
        return rv_error_set(err, ENOMEM, ERROR(NO_MEMORY), "no memory for the index");
    if (r < 0)
        return rv_error_set(err, -r, ERROR(MODEL_INVALID), "tensor \"%s\": %s",
                            rv_escape(shown, sizeof(shown), name, name_length),
                            r == -ELOOP ? "too many names that fall into one place of the index" : strerror(-r));
    plan->arena_used = entry->offset + entry->length;
    plan->count++;
    return 0;
}

static int plan_safetensors(int file, uint64_t header_length, uint64_t file_size, struct rv_plan *plan,
                            struct rv_error *err)
{
    struct rv_safetensors st = {0};
    uint64_t names = 0;
    uint8_t *header = NULL;
    int r;

    if (header_length <= RV_SAFETENSORS_HEADER_MAX && header_length <= file_size - PREFIX_BYTES) {
        header = malloc(header_length + 1);
        if (!header)
            return rv_error_set(err, ENOMEM, ERROR(NO_MEMORY), "no memory for a header of %llu bytes",
                                (unsigned long long)header_length);
        r = read_at(file, header, header_length, PREFIX_BYTES, err);
        if (r < 0)
            goto out;
    }
    r = rv_safetensors_parse(header, header_length, file_size, &st, err); /* refuses such a length, with words */
    if (r < 0)
        goto out;
    for (uint32_t i = 0; i < st.count; i++)
        names += (uint64_t)st.tensors[i].name_length + 1;
    plan->builder = rv_index_builder_create(st.count, names);
    if (!plan->builder) {
        r = rv_error_set(err, ENOMEM, ERROR(NO_MEMORY), "no memory for the index of %u tensors", st.count);
        goto out;
    }
    for (uint32_t i = 0; i < st.count && r == 0; i++) {
        const struct rv_safetensor *t = &st.tensors[i];
        struct rv_index_entry entry = {.dtype = t->dtype, .rank = t->rank, .length = t->end - t->begin};

        memcpy(entry.shape, t->shape, sizeof(entry.shape));
        r = place(plan, t->name, t->name_length, &entry, err);
    }
    plan->data_start = st.data_start;
    plan->data_length = st.data_length;
    memcpy(plan->header_digest, st.header_digest, sizeof(plan->header_digest));
    plan->metadata = st.metadata;
    plan->metadata_length = st.metadata_length;
    st.metadata = NULL;
out:
    rv_safetensors_fini(&st);
    free(header);
    return r;
}

static int plan_blob(uint64_t file_size, struct rv_plan *plan, struct rv_error *err)
{
    struct rv_index_entry entry = {.dtype = RV_INDEX_BLOB, .rank = 1, .length = file_size, .shape = {file_size}};
    const struct rv_hash_way *way = rv_hash_way();
    struct rv_hash *hash = way->create();

    plan->builder = rv_index_builder_create(1, sizeof(BLOB_NAME));
    if (!hash || !plan->builder) {
        if (hash)
            way->destroy(hash);
        return rv_error_set(err, ENOMEM, ERROR(NO_MEMORY), "no memory for the index");
    }
    way->digest(hash, plan->header_digest); /* of nothing */
    way->destroy(hash);
    plan->data_length = file_size;
    return place(plan, BLOB_NAME, sizeof(BLOB_NAME) - 1, &entry, err);
}

static bool has_suffix(const char *path)
{
    size_t length = strlen(path), suffix = sizeof(SUFFIX) - 1;

    return length >= suffix && strcmp(path + length - suffix, SUFFIX) == 0;
}

int rv_plan_make(int file, uint64_t file_size, const char *path, const char *format, struct rv_plan *ret_plan,
                 struct rv_error *err)
{
    struct rv_plan plan = {0};
    uint64_t header_length;
    bool brace, named = strcmp(format, "safetensors") == 0 || (strcmp(format, "blob") != 0 && has_suffix(path));
    int r = read_prefix(file, file_size, &header_length, &brace, err);

    if (r < 0)
        return r;
    if (named && file_size < PREFIX_BYTES)
        return rv_error_set(err, EBADMSG, ERROR(MODEL_INVALID), "a file of %llu bytes is too short for safetensors",
                            (unsigned long long)file_size);
    if (named || (strcmp(format, "blob") != 0 && brace && header_length <= file_size - PREFIX_BYTES &&
                  header_length <= RV_SAFETENSORS_HEADER_MAX)) {
        r = plan_safetensors(file, header_length, file_size, &plan, err);
        if (r == -EBADMSG)
            rv_error_remedy(err, "get the file again; if it is of another format, set the model's format to blob");
    } else {
        r = plan_blob(file_size, &plan, err);
    }
    if (r < 0) {
        rv_plan_fini(&plan);
        return r;
    }
    *ret_plan = plan;
    return 0;
}

void rv_plan_fini(struct rv_plan *plan)
{
    rv_index_builder_destroy(plan->builder);
    free(plan->metadata);
    *plan = (struct rv_plan){0};
}

bool rv_cursor_next(struct rv_cursor *cursor, const struct rv_plan *plan, uint64_t max, struct rv_piece *ret_piece)
{
    struct rv_index_entry *entry;
    uint64_t left, n;

    if (cursor->tensor == plan->count)
        return false;
    entry = rv_index_builder_entry(plan->builder, cursor->tensor);
    left = entry->length - cursor->done;
    if (left > 0 && max == 0)
        return false;
    n = left < max ? left : max;
    *ret_piece = (struct rv_piece){.entry = entry,
                                   .offset = entry->offset + cursor->done,
                                   .length = n,
                                   .first = cursor->done == 0,
                                   .last = n == left};
    cursor->done += n;
    if (n == left) {
        cursor->tensor++;
        cursor->done = 0;
    }
    return true;
}
