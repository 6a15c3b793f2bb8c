/*
 * A strict reader of safetensors headers. Format: 8 bytes little-endian N, then N bytes of JSON, then the data
 * section; JSON: name -> {"dtype", "shape", "data_offsets": [begin, end)} relative to the data section, and optionally
 * "__metadata__": {string: string} (https://github.com/huggingface/safetensors#format).
 *
 * Refused, each with a message that says where: a header over 100 MB or past the end, not JSON, not an object,
 * duplicate names, keys that a tensor does not have, unknown or sub-byte dtypes, rank over 8, products that overflow,
 * offsets that do not match the shape, overlap, leave gaps, or do not end at the end of the file.
 *
 * Used by the loader (and the fuzzers). Does not log. One call per file; thread-safe.
 */
#ifndef RV_SAFETENSORS_H
#define RV_SAFETENSORS_H

#include <stdint.h>

#include "error.h"
#include "rv_limits.h"

#define RV_SAFETENSORS_HEADER_MAX (100u * 1000 * 1000) /* bytes: the limit of the format's own library */

struct rv_safetensor {
    const char *name; /* UTF-8, NUL-terminated, owned by the file object; may contain no NUL */
    uint32_t name_length;
    uint16_t dtype; /* enum rv_index_dtype */
    uint8_t rank;
    uint64_t shape[RV_RANK_MAX];
    uint64_t begin, end; /* bytes in the data section */
};

struct rv_safetensors {
    struct rv_safetensor *tensors; /* in the order of their data (zero-length ones by name) */
    uint32_t count;
    uint64_t data_start;  /* bytes from the start of the file */
    uint64_t data_length; /* bytes */
    char *metadata;       /* compact JSON, NULL = none */
    uint64_t metadata_length;
    uint8_t header_digest[16]; /* XXH3-128, canonical, of the N bytes of JSON */
    void *memory;              /* owns the names */
};

/*
 * Parses the header bytes (without the length prefix) of a file of file_size bytes. *ret_file is the caller's on
 * success. -EBADMSG = malformed (ERROR_MODEL_INVALID), -EOPNOTSUPP = sub-byte dtype (ERROR_UNSUPPORTED), -ENOMEM.
 */
int rv_safetensors_parse(const uint8_t *header, uint64_t header_length, uint64_t file_size,
                         struct rv_safetensors *ret_file, struct rv_error *err);
void rv_safetensors_fini(struct rv_safetensors *file);

#endif
