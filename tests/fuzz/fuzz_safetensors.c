/* Any bytes as a safetensors file: the scanner must refuse or give tensors that tile the data section exactly. */
#include <stdlib.h>
#include <string.h>

#include "index.h"
#include "safetensors.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

#define MUST(condition)   \
    do {                  \
        if (!(condition)) \
            abort();      \
    } while (0)

/* Byte 0 says how long the data section is, so that good files are found soon. */
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct rv_safetensors st = {0};
    struct rv_error err = {0};
    uint64_t at = 0;

    if (size < 1)
        return 0;
    if (rv_safetensors_parse(data + 1, size - 1, 8 + (size - 1) + data[0], &st, &err) < 0) {
        MUST(err.code != 0 && err.message[0] != '\0');
        return 0;
    }
    for (uint32_t i = 0; i < st.count; i++) {
        const struct rv_safetensor *t = &st.tensors[i];
        uint64_t bytes;

        MUST(t->begin == at && t->end >= t->begin && t->rank <= RV_RANK_MAX);
        MUST(rv_shape_bytes(t->dtype, t->shape, t->rank, &bytes) && bytes == t->end - t->begin);
        MUST(strlen(t->name) == t->name_length);
        at = t->end;
    }
    MUST(at == st.data_length);
    MUST(!st.metadata || strlen(st.metadata) == st.metadata_length);
    rv_safetensors_fini(&st);
    return 0;
}
