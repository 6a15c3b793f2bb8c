/* Streams, each with a worker thread, and events. */
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "fake.h"

#define HOLD_LOOK_NS 2000000l

enum op_kind { OP_COPY, OP_EVENT };

struct CUevent_st {
    struct CUctx_st *context;
    uint64_t recorded, reached;
    unsigned pending; /* operations that name it */
    bool destroyed;
    struct CUevent_st *next;
};

struct operation {
    enum op_kind kind;
    enum fake_way way;
    uint64_t sequence;
    uint64_t address, length;
    void *host;
    void *staged; /* a copy of pageable memory, freed afterwards unless kept */
    bool kept;
    uint8_t byte;
    bool damage;
    struct CUevent_st *event;
    uint64_t record;
    struct operation *next;
};

struct CUstream_st {
    struct CUctx_st *context;
    struct operation *head, **tail; /* the head stays until it is done */
    bool apart;                     /* CU_STREAM_NON_BLOCKING */
    bool destroyed;
    unsigned waiters; /* threads that look at it without the lock's protection */
    struct CUstream_st *next;
};

static bool before(const struct CUstream_st *stream, uint64_t sequence)
{
    return stream != NULL && stream->head != NULL && stream->head->sequence < sequence;
}

/* The legacy default stream and the streams that are not apart wait for each other; cuda.h, CU_STREAM_LEGACY. */
static bool may_start(const struct CUstream_st *stream)
{
    const struct CUctx_st *context = stream->context;
    uint64_t sequence = stream->head->sequence;
    if (stream->apart)
        return true;
    if (stream != context->standard)
        return !before(context->standard, sequence);
    for (const struct CUstream_st *other = context->streams; other != NULL; other = other->next)
        if (other != stream && !other->apart && before(other, sequence))
            return false;
    return true;
}

static void event_unpin(struct CUevent_st *event)
{
    struct CUevent_st **at = &event->context->events;
    if (event->pending > 0 || !event->destroyed)
        return;
    while (*at != event)
        at = &(*at)->next;
    *at = event->next;
    free(event);
}

static void operation_end(struct CUstream_st *stream)
{
    struct operation *operation = stream->head;
    stream->head = operation->next;
    if (stream->head == NULL)
        stream->tail = &stream->head;
    if (operation->event != NULL) {
        operation->event->reached = operation->record;
        operation->event->pending--;
        event_unpin(operation->event);
    }
    if (!operation->kept)
        free(operation->staged);
    free(operation);
    fake_changed();
}

/* The first byte becomes another one, where the copy went. */
static void damage(struct CUctx_st *context, const struct operation *operation, void *host)
{
    uint8_t byte = 0;
    if (operation->way == FAKE_TO_HOST) {
        *(uint8_t *)host ^= 0xff;
        return;
    }
    fake_copy(context, FAKE_TO_HOST, operation->address, &byte, 0, 1);
    byte ^= 0xff;
    fake_copy(context, FAKE_TO_DEVICE, operation->address, &byte, 0, 1);
}

static void operation_run(struct CUstream_st *stream, struct operation *operation)
{
    unsigned late = fake_config()->late_us;
    if (operation->kind != OP_COPY)
        return;
    fake_unlock();
    nanosleep(&(struct timespec){late / 1000000, late % 1000000 * 1000l}, NULL);
    while (fake_state_held(stream->context->gpu) && fake_state_lost(stream->context->gpu) == 0)
        nanosleep(&(struct timespec){0, HOLD_LOOK_NS}, NULL);
    fake_lock();
    void *host = operation->staged != NULL ? operation->staged : operation->host;
    CUresult result =
        fake_copy(stream->context, operation->way, operation->address, host, operation->byte, operation->length);
    if (result == CUDA_SUCCESS && operation->damage)
        damage(stream->context, operation, host);
    if (result != CUDA_SUCCESS)
        fake_gpu_poison(stream->context->gpu, result);
}

static void *stream_work(void *argument)
{
    struct CUstream_st *stream = argument, **at = &stream->context->streams;
    fake_lock();
    for (;;) {
        if (stream->head != NULL && may_start(stream)) {
            operation_run(stream, stream->head);
            operation_end(stream);
        } else if (stream->head == NULL && stream->destroyed && stream->waiters == 0) {
            break;
        } else {
            fake_wait();
        }
    }
    while (*at != stream)
        at = &(*at)->next;
    *at = stream->next;
    free(stream);
    fake_changed();
    fake_unlock();
    return NULL;
}

static struct CUstream_st *stream_create(struct CUctx_st *context, bool apart)
{
    pthread_t thread;
    sigset_t all, mask;
    struct CUstream_st *stream = calloc(1, sizeof(*stream));
    if (stream == NULL)
        return NULL;
    *stream = (struct CUstream_st){.context = context, .apart = apart, .next = context->streams};
    stream->tail = &stream->head;
    context->streams = stream;
    /* The program's signals are not for threads that it does not know. */
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &mask);
    int failed = pthread_create(&thread, NULL, stream_work, stream);
    pthread_sigmask(SIG_SETMASK, &mask, NULL);
    if (failed != 0) {
        context->streams = stream->next;
        free(stream);
        return NULL;
    }
    pthread_detach(thread);
    return stream;
}

/* The stream of a handle, NULL = the handle is wrong. */
static struct CUstream_st *stream_of(struct CUctx_st *context, CUstream handle)
{
    if (handle == NULL || handle == CU_STREAM_LEGACY) {
        if (context->standard == NULL)
            context->standard = stream_create(context, false);
        return context->standard;
    }
    struct CUstream_st *stream = context->streams;
    while (stream != NULL && (stream != handle || stream->destroyed || stream == context->standard))
        stream = stream->next;
    return stream;
}

static void stream_drain(struct CUstream_st *stream)
{
    uint64_t last = stream->context->sequence;
    stream->waiters++; /* it may be destroyed meanwhile */
    while (before(stream, last + 1))
        fake_wait();
    stream->waiters--;
    fake_changed();
}

void fake_context_drain(struct CUctx_st *context)
{
    for (;;) {
        const struct CUstream_st *busy = context->streams;
        while (busy != NULL && busy->head == NULL)
            busy = busy->next;
        if (busy == NULL)
            return;
        fake_wait();
    }
}

void fake_streams_end(struct CUctx_st *context)
{
    for (struct CUstream_st *stream = context->streams; stream != NULL; stream = stream->next)
        stream->destroyed = true;
    fake_changed();
    while (context->streams != NULL)
        fake_wait();
    context->standard = NULL;
    for (struct CUevent_st *event = context->events, *next; event != NULL; event = next) {
        next = event->next;
        event->destroyed = true;
        event_unpin(event);
    }
    while (context->events != NULL) /* somebody waits for one */
        fake_wait();
}

static CUresult enqueue(struct CUstream_st *stream, const struct operation *filled)
{
    struct operation *operation = malloc(sizeof(*operation));
    if (operation == NULL)
        return CUDA_ERROR_OUT_OF_MEMORY;
    *operation = *filled;
    operation->sequence = ++stream->context->sequence;
    operation->next = NULL;
    *stream->tail = operation;
    stream->tail = &operation->next;
    fake_changed();
    return CUDA_SUCCESS;
}

/* ---- copies ----------------------------------------------------------------------------------------------------- */

static CUresult copy_enqueue(enum fake_way way, uint64_t address, void *host, uint8_t byte, uint64_t length,
                             CUstream handle)
{
    struct CUctx_st *context = fake_current();
    struct CUstream_st *stream = stream_of(context, handle);
    struct operation operation = {.kind = OP_COPY, .way = way, .address = address, .length = length, .host = host};
    operation.byte = byte;
    operation.damage = fake_damaged();
    if (stream == NULL)
        return CUDA_ERROR_INVALID_HANDLE;
    if (length == 0)
        return CUDA_SUCCESS;
    CUresult result = fake_copy_check(context, address, length);
    if (result == CUDA_SUCCESS && way != FAKE_SET && host == NULL)
        result = CUDA_ERROR_INVALID_VALUE;
    if (result != CUDA_SUCCESS)
        return result;
    /* Pageable memory: staged before this returns, or complete when it returns; a wrong host pointer is SIGSEGV. */
    if (way != FAKE_SET && !fake_host_pinned(host, length)) {
        operation.staged = malloc(length);
        operation.kept = way == FAKE_TO_HOST;
        if (operation.staged == NULL)
            return CUDA_ERROR_OUT_OF_MEMORY;
        if (way == FAKE_TO_DEVICE)
            memcpy(operation.staged, host, length);
    }
    result = enqueue(stream, &operation);
    if (result == CUDA_SUCCESS && operation.kept) {
        stream_drain(stream);
        result = fake_gpu_health(context->gpu);
        if (result == CUDA_SUCCESS)
            memcpy(host, operation.staged, length);
        free(operation.staged);
    } else if (result != CUDA_SUCCESS) {
        free(operation.staged);
    }
    return result;
}

CUresult fake_MemcpyHtoDAsync(CUdeviceptr device, const void *host, size_t length, CUstream stream)
{
    CUresult result = fake_enter(FN_MemcpyHtoDAsync, FAKE_CONTEXT);
    if (result != CUDA_SUCCESS)
        return result;
    return fake_leave(copy_enqueue(FAKE_TO_DEVICE, device, (void *)(uintptr_t)host, 0, length, stream));
}

CUresult fake_MemcpyDtoHAsync(void *host, CUdeviceptr device, size_t length, CUstream stream)
{
    CUresult result = fake_enter(FN_MemcpyDtoHAsync, FAKE_CONTEXT);
    if (result != CUDA_SUCCESS)
        return result;
    return fake_leave(copy_enqueue(FAKE_TO_HOST, device, host, 0, length, stream));
}

CUresult fake_MemsetD8Async(CUdeviceptr device, unsigned char byte, size_t length, CUstream stream)
{
    CUresult result = fake_enter(FN_MemsetD8Async, FAKE_CONTEXT);
    if (result != CUDA_SUCCESS)
        return result;
    return fake_leave(copy_enqueue(FAKE_SET, device, NULL, byte, length, stream));
}

/* ---- streams ---------------------------------------------------------------------------------------------------- */

CUresult fake_StreamCreate(CUstream *stream, unsigned int flags)
{
    CUresult result = fake_enter(FN_StreamCreate, FAKE_CONTEXT);
    if (result != CUDA_SUCCESS)
        return result;
    if (stream == NULL || flags > CU_STREAM_NON_BLOCKING)
        return fake_leave(CUDA_ERROR_INVALID_VALUE);
    struct CUstream_st *created = stream_create(fake_current(), flags == CU_STREAM_NON_BLOCKING);
    if (created == NULL)
        return fake_leave(CUDA_ERROR_OUT_OF_MEMORY);
    *stream = created;
    return fake_leave(CUDA_SUCCESS);
}

static CUresult stream_enter(enum fake_function function, CUstream handle, struct CUstream_st **ret_stream)
{
    CUresult result = fake_enter(function, FAKE_CONTEXT);
    if (result != CUDA_SUCCESS)
        return result;
    *ret_stream = stream_of(fake_current(), handle);
    return *ret_stream == NULL ? fake_leave(CUDA_ERROR_INVALID_HANDLE) : CUDA_SUCCESS;
}

CUresult fake_StreamQuery(CUstream handle)
{
    struct CUstream_st *stream;
    CUresult result = stream_enter(FN_StreamQuery, handle, &stream);
    if (result != CUDA_SUCCESS)
        return result;
    return fake_leave(stream->head == NULL ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY);
}

CUresult fake_StreamSynchronize(CUstream handle)
{
    struct CUstream_st *stream;
    CUresult result = stream_enter(FN_StreamSynchronize, handle, &stream);
    if (result != CUDA_SUCCESS)
        return result;
    stream_drain(stream);
    return fake_leave(fake_gpu_health(fake_current()->gpu));
}

CUresult fake_StreamDestroy(CUstream handle)
{
    struct CUstream_st *stream;
    CUresult result = stream_enter(FN_StreamDestroy, handle, &stream);
    if (result != CUDA_SUCCESS)
        return result;
    if (stream == fake_current()->standard)
        return fake_leave(CUDA_ERROR_INVALID_HANDLE);
    stream->destroyed = true; /* returns at once; what is queued is still done; cuda.h cuStreamDestroy */
    fake_changed();
    return fake_leave(CUDA_SUCCESS);
}

/* ---- events ----------------------------------------------------------------------------------------------------- */

static struct CUevent_st *event_of(struct CUctx_st *context, CUevent handle)
{
    struct CUevent_st *event = context->events;
    while (event != NULL && (event != handle || event->destroyed))
        event = event->next;
    return event;
}

CUresult fake_EventCreate(CUevent *event, unsigned int flags)
{
    CUresult result = fake_enter(FN_EventCreate, FAKE_CONTEXT);
    if (result != CUDA_SUCCESS)
        return result;
    struct CUctx_st *context = fake_current();
    if (event == NULL || flags > 7)
        return fake_leave(CUDA_ERROR_INVALID_VALUE);
    struct CUevent_st *created = calloc(1, sizeof(*created));
    if (created == NULL)
        return fake_leave(CUDA_ERROR_OUT_OF_MEMORY);
    created->context = context;
    created->next = context->events;
    *event = context->events = created;
    return fake_leave(CUDA_SUCCESS);
}

CUresult fake_EventRecord(CUevent handle, CUstream stream_handle)
{
    struct CUstream_st *stream;
    CUresult result = stream_enter(FN_EventRecord, stream_handle, &stream);
    if (result != CUDA_SUCCESS)
        return result;
    struct CUevent_st *event = event_of(fake_current(), handle);
    if (event == NULL)
        return fake_leave(CUDA_ERROR_INVALID_HANDLE);
    struct operation operation = {.kind = OP_EVENT, .event = event, .record = event->recorded + 1};
    result = enqueue(stream, &operation);
    if (result == CUDA_SUCCESS) {
        event->recorded++;
        event->pending++;
    }
    return fake_leave(result);
}

CUresult fake_EventQuery(CUevent handle)
{
    CUresult result = fake_enter(FN_EventQuery, FAKE_CONTEXT);
    if (result != CUDA_SUCCESS)
        return result;
    const struct CUevent_st *event = event_of(fake_current(), handle);
    if (event == NULL)
        return fake_leave(CUDA_ERROR_INVALID_HANDLE);
    return fake_leave(event->reached == event->recorded ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY);
}

/* Waits for what the event held when it was called; cuda.h cuEventSynchronize. */
CUresult fake_EventSynchronize(CUevent handle)
{
    CUresult result = fake_enter(FN_EventSynchronize, FAKE_CONTEXT);
    if (result != CUDA_SUCCESS)
        return result;
    const unsigned gpu = fake_current()->gpu;
    struct CUevent_st *event = event_of(fake_current(), handle);
    if (event == NULL)
        return fake_leave(CUDA_ERROR_INVALID_HANDLE);
    const uint64_t wanted = event->recorded;
    event->pending++; /* it stays until this is over */
    while (event->reached < wanted)
        fake_wait();
    event->pending--;
    event_unpin(event);
    fake_changed();
    return fake_leave(fake_gpu_health(gpu));
}

CUresult fake_EventDestroy(CUevent handle)
{
    CUresult result = fake_enter(FN_EventDestroy, FAKE_CONTEXT);
    if (result != CUDA_SUCCESS)
        return result;
    struct CUevent_st *event = event_of(fake_current(), handle);
    if (event == NULL)
        return fake_leave(CUDA_ERROR_INVALID_HANDLE);
    event->destroyed = true;
    event_unpin(event);
    return fake_leave(CUDA_SUCCESS);
}
