/*
 * Every message type of rpc.proto and control.proto: any bytes through rv_message_unpack. What is accepted must pack to
 * something that is accepted again and packs to the same bytes. The first byte chooses the type.
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "frame.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

#define TYPES_MAX 128

static const ProtobufCMessageDescriptor *types[TYPES_MAX];
static unsigned type_count;

/* Adds a type and all that it contains. */
static void collect(const ProtobufCMessageDescriptor *d)
{
    for (unsigned i = 0; i < type_count; i++)
        if (types[i] == d)
            return;
    if (type_count == TYPES_MAX)
        abort();
    types[type_count++] = d;
    for (unsigned i = 0; i < d->n_fields; i++)
        if (d->fields[i].type == PROTOBUF_C_TYPE_MESSAGE)
            collect(d->fields[i].descriptor);
}

static void round_trip(const ProtobufCMessageDescriptor *d, const ProtobufCMessage *message)
{
    size_t length = protobuf_c_message_get_packed_size(message), again_length;
    uint8_t *bytes = malloc(length + 1), *again_bytes;
    void *arena = NULL;
    ProtobufCMessage *again;

    if (!bytes || protobuf_c_message_pack(message, bytes) != length)
        abort();
    /* Packed anew it can be shorter, so its cap can be tighter: that is not what is tested here. */
    again = rv_message_unpack(d, bytes, length, rv_message_cap(length) + (1u << 22), &arena, NULL);
    if (!again)
        abort();
    again_length = protobuf_c_message_get_packed_size(again);
    again_bytes = malloc(again_length + 1);
    if (!again_bytes || again_length != length || protobuf_c_message_pack(again, again_bytes) != length ||
        memcmp(bytes, again_bytes, length) != 0)
        abort();
    free(again_bytes);
    free(bytes);
    free(arena);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    const ProtobufCMessageDescriptor *d;
    ProtobufCMessage *message;
    const char *why = "";
    void *arena = NULL;

    if (type_count == 0) {
        collect(&rv__frame__descriptor);
        collect(&resvisor__v1__request__descriptor);
        collect(&resvisor__v1__reply__descriptor);
        collect(&resvisor__v1__event__descriptor);
    }
    if (size < 1)
        return 0;
    d = types[data[0] % type_count];
    message = rv_message_unpack(d, data + 1, size - 1, rv_message_cap(size - 1), &arena, &why);
    if (message) {
        round_trip(d, message);
        if (d == &resvisor__v1__error__descriptor) {
            struct rv_error err;

            (void)rv_error_from_message(&err, (const Resvisor__V1__Error *)message);
            if (!rv_text_is_valid(err.message) || !rv_text_is_valid(err.remedy))
                abort();
        }
        free(arena);
    } else if (!*why) {
        abort();
    }
    return 0;
}
