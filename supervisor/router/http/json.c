/*
 * Messages of rpc.proto as JSON, by their descriptors: each field under its own name, so that docs/rpc.md describes
 * both. An enum value is its name without the enum's part ("DONE"), an error code is the name of the error table
 * ("queue_full"), a message that is absent is left out.
 */
#include <stdlib.h>
#include <string.h>

#include "http.h"

static json_t *enum_json(const ProtobufCFieldDescriptor *field, int value)
{
    const ProtobufCEnumDescriptor *type = field->descriptor;
    const ProtobufCEnumValue *found;
    const char *part;

    if (type == &resvisor__v1__error_code__descriptor)
        return json_string(rv_error_row(value)->name);
    found = protobuf_c_enum_descriptor_get_value(type, value);
    part = found ? strchr(found->name, '_') : NULL;
    return json_string(part ? part + 1 : "UNKNOWN");
}

static json_t *number_json(uint64_t number)
{
    return json_integer(number > INT64_MAX ? INT64_MAX : (json_int_t)number);
}

/* One value; `at` points to it. Types that rpc.proto has none of give null. */
static json_t *value_json(const ProtobufCFieldDescriptor *field, const void *at)
{
    switch (field->type) {
    case PROTOBUF_C_TYPE_INT32:
    case PROTOBUF_C_TYPE_SINT32:
        return json_integer(*(const int32_t *)at);
    case PROTOBUF_C_TYPE_UINT32:
        return json_integer(*(const uint32_t *)at);
    case PROTOBUF_C_TYPE_UINT64:
        return number_json(*(const uint64_t *)at);
    case PROTOBUF_C_TYPE_BOOL:
        return json_boolean(*(const protobuf_c_boolean *)at);
    case PROTOBUF_C_TYPE_ENUM:
        return enum_json(field, *(const int *)at);
    case PROTOBUF_C_TYPE_STRING:
        return json_string(*(const char *const *)at);
    case PROTOBUF_C_TYPE_MESSAGE:
        return rv_http_json(*(const ProtobufCMessage *const *)at);
    default:
        return json_null();
    }
}

static size_t value_size(const ProtobufCFieldDescriptor *field)
{
    switch (field->type) {
    case PROTOBUF_C_TYPE_STRING:
    case PROTOBUF_C_TYPE_MESSAGE:
        return sizeof(void *);
    case PROTOBUF_C_TYPE_UINT64:
        return sizeof(uint64_t);
    default:
        return sizeof(uint32_t);
    }
}

static json_t *list_json(const ProtobufCFieldDescriptor *field, const uint8_t *message)
{
    size_t count = *(const size_t *)(const void *)(message + field->quantifier_offset);
    const uint8_t *values = *(uint8_t *const *)(const void *)(message + field->offset);
    json_t *list = json_array();

    for (size_t i = 0; list && i < count; i++) {
        if (json_array_append_new(list, value_json(field, values + i * value_size(field))) < 0) {
            json_decref(list);
            list = NULL;
        }
    }
    return list;
}

json_t *rv_http_json(const ProtobufCMessage *message)
{
    json_t *object = json_object();

    for (unsigned i = 0; object && i < message->descriptor->n_fields; i++) {
        const ProtobufCFieldDescriptor *field = &message->descriptor->fields[i];
        const uint8_t *base = (const uint8_t *)message;
        json_t *value;

        if (field->label == PROTOBUF_C_LABEL_REPEATED)
            value = list_json(field, base);
        else if (field->type == PROTOBUF_C_TYPE_MESSAGE && !*(void *const *)(const void *)(base + field->offset))
            continue;
        else
            value = value_json(field, base + field->offset);
        if (json_object_set_new(object, field->name, value) < 0) {
            json_decref(object);
            object = NULL;
        }
    }
    return object;
}
