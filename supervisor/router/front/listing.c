/* Lists of jobs as answers. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "prompts.h"

#define PIECE_BYTES (256u * 1024) /* what is made at once; a list that fits has a Content-Length */

struct item {
    char id[RV_NAME_MAX + 1];
    uint8_t section;
};

struct rv_listing {
    struct rv_router *router;
    rv_listing_write *write;
    const char *between, *tail;
    struct item *items;
    uint32_t count, room, at;
    unsigned section;
    bool first, finished;
    struct rv_shape shape;
    size_t sent; /* of the shape's bytes */
};

struct rv_listing *rv_listing_create(struct rv_router *router, rv_listing_write *write, const char *head,
                                     const char *between, const char *tail)
{
    struct rv_listing *listing = calloc(1, sizeof(*listing));

    if (!listing)
        return NULL;
    listing->router = router;
    listing->write = write;
    listing->between = between;
    listing->tail = tail;
    listing->first = true;
    rv_shape_text(&listing->shape, head);
    return listing;
}

void rv_listing_destroy(struct rv_listing *listing)
{
    if (!listing)
        return;
    rv_shape_fini(&listing->shape);
    free(listing->items);
    free(listing);
}

int rv_listing_add(struct rv_listing *listing, const struct rv_job_record *job, unsigned section)
{
    if (listing->count == listing->room) {
        uint32_t room = listing->room ? 2 * listing->room : 64; /* bounded by the job table */
        struct item *grown = reallocarray(listing->items, room, sizeof(*grown));

        if (!grown)
            return -ENOMEM;
        listing->items = grown;
        listing->room = room;
    }
    memcpy(listing->items[listing->count].id, job->id, sizeof(job->id));
    listing->items[listing->count++].section = (uint8_t)section;
    return 0;
}

static void enter_section(struct rv_listing *listing)
{
    rv_shape_text(&listing->shape, listing->between);
    listing->section = 1;
    listing->first = true;
}

/* Adds the next job, or the end. */
static void step(struct rv_listing *listing)
{
    const struct item *item = listing->at < listing->count ? &listing->items[listing->at++] : NULL;
    struct rv_job_record *job = item ? rv_jobs_find(listing->router, item->id) : NULL;

    if (listing->between && listing->section == 0 && (!item || item->section > 0))
        enter_section(listing);
    if (!item) {
        rv_shape_text(&listing->shape, listing->tail);
        listing->finished = true;
    } else if (job && listing->write(&listing->shape, job, item->section, listing->first)) {
        listing->first = false;
    }
}

static void fill(struct rv_listing *listing)
{
    while (!listing->finished && !listing->shape.failed && listing->shape.length < PIECE_BYTES)
        step(listing);
}

static ssize_t on_read(void *context, uint64_t position, char *to, size_t size)
{
    struct rv_listing *listing = context;
    size_t n;

    (void)position;
    if (listing->sent == listing->shape.length) {
        if (listing->finished)
            return MHD_CONTENT_READER_END_OF_STREAM;
        listing->sent = listing->shape.length = 0;
        fill(listing);
    }
    if (listing->shape.failed)
        return MHD_CONTENT_READER_END_WITH_ERROR;
    n = listing->shape.length - listing->sent;
    n = n < size ? n : size;
    memcpy(to, listing->shape.bytes + listing->sent, n);
    listing->sent += n;
    return (ssize_t)n;
}

static void on_end(void *context)
{
    rv_listing_destroy(context);
}

void rv_listing_answer(struct rv_http_request *request, struct rv_listing *listing)
{
    fill(listing);
    if (listing->shape.failed) {
        rv_front_answer_error(request, 503, "no_memory", "", RV_FRONT_RETRY_MS, "no memory for the list");
    } else if (listing->finished) {
        rv_front_answer_text(request, 200, listing->shape.bytes, listing->shape.length);
        listing->shape = (struct rv_shape){0};
    } else {
        request->status = 200;
        request->response = MHD_create_response_from_callback(MHD_SIZE_UNKNOWN, PIECE_BYTES, on_read, listing, on_end);
        rv_http_add_header(request, "Content-Type", "application/json; charset=utf-8");
        rv_http_add_header(request, "Cache-Control", "no-store");
        rv_http_add_header(request, "X-Content-Type-Options", "nosniff");
        if (request->response)
            return;
    }
    rv_listing_destroy(listing);
}
