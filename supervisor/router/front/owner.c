/*
 * Which worker has a file. Folders of outputs and temporary files may be one worker's own, so of what was not seen
 * before, all are asked at once (HEAD), and the first that has it sends it. What a finished prompt says that it wrote
 * is remembered.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "clock.h"
#include "gather.h"
#include "scan.h"

#define PLACES 16384u /* a power of two; a newer file takes the place of an older one */
#define PROBE_US (10 * RV_SEC)
#define NAME_MAX_BYTES 1024u
#define HISTORY_NAME "history.json"
#define HISTORY_MAX (16ull * 1024 * 1024) /* bytes of it that are looked through */

struct place {
    uint64_t key;         /* 0 = empty */
    uint64_t incarnation; /* 0 = any: the file stays when the worker ends */
    char worker[RV_WORKER_NAME_MAX + 1];
};

struct rv_front_owners {
    uint64_t seed;
    struct place *places; /* NULL until there is something to remember */
};

int rv_front_owners_init(struct rv_front *front)
{
    front->owners = calloc(1, sizeof(*front->owners));
    if (!front->owners)
        return -ENOMEM;
    return getrandom(&front->owners->seed, sizeof(front->owners->seed), 0) < 0 ? -EIO : 0;
}

void rv_front_owners_fini(struct rv_front *front)
{
    if (front->owners)
        free(front->owners->places);
    free(front->owners);
    front->owners = NULL;
}

static uint64_t key_of(const struct rv_front *front, const char *kind, const char *folder, const char *file)
{
    char text[3 * NAME_MAX_BYTES];
    int n = snprintf(text, sizeof(text), "%s\n%s\n%s", kind, folder, file);
    uint64_t key;

    if (n < 0 || (size_t)n >= sizeof(text))
        return 0;
    key = XXH3_64bits_withSeed(text, (size_t)n, front->owners->seed);
    return key ? key : 1;
}

static void remember(struct rv_front *front, uint64_t key, const char *worker, uint64_t incarnation)
{
    struct rv_front_owners *owners = front->owners;
    struct place *place;

    if (!owners->places)
        owners->places = calloc(PLACES, sizeof(struct place));
    if (!owners->places || key == 0)
        return;
    place = &owners->places[key & (PLACES - 1)];
    place->key = key;
    place->incarnation = incarnation;
    (void)snprintf(place->worker, sizeof(place->worker), "%s", worker);
}

/* A temporary file goes with the process that made it. */
static uint64_t lasts(const char *kind, uint64_t incarnation)
{
    return strcmp(kind, "temp") == 0 ? incarnation : 0;
}

/* True = it is known who has it; *ret_worker is NULL while that one is not ready. */
static bool owner_of(const struct rv_front *front, const struct place *place, struct rv_worker_entry **ret_worker)
{
    struct rv_worker_entry *worker;

    TAILQ_FOREACH (worker, &front->router->workers, link) {
        if (strcmp(worker->name, place->worker) != 0 ||
            (place->incarnation && place->incarnation != worker->incarnation))
            continue;
        *ret_worker = rv_front_worker_is_ready(worker) ? worker : NULL;
        return true;
    }
    return false;
}

static const struct place *find(const struct rv_front *front, uint64_t key)
{
    const struct place *place = front->owners->places ? &front->owners->places[key & (PLACES - 1)] : NULL;

    return place && key && place->key == key ? place : NULL;
}

/* ---- what prompts say ------------------------------------------------------------------------------------------- */

/* Every {"filename", "subfolder", "type"} below "outputs", whatever the list is called. */
static void learn_file(struct rv_front *front, const char *text, struct rv_span item,
                       const struct rv_worker_entry *worker)
{
    static const char *const names[] = {"type", "subfolder", "filename"};
    char values[3][NAME_MAX_BYTES];
    struct rv_span found;

    for (unsigned i = 0; i < 3; i++)
        if (!rv_scan_find(text, item, names[i], &found) || rv_scan_copy(text, found, values[i], sizeof(values[i])) < 0)
            return;
    remember(front, key_of(front, values[0], values[1], values[2]), worker->name,
             lasts(values[0], worker->incarnation));
}

static void learn_node(struct rv_front *front, const char *text, struct rv_span node,
                       const struct rv_worker_entry *worker)
{
    struct rv_span key, list, item;
    uint32_t at = 0;

    while (rv_scan_next(text, node, &at, &key, &list)) {
        uint32_t place = 0;

        if (!rv_scan_is(text, list, '['))
            continue;
        while (rv_scan_next(text, list, &place, NULL, &item))
            if (rv_scan_is(text, item, '{'))
                learn_file(front, text, item, worker);
    }
}

static void learn(struct rv_front *front, const char *text, size_t length, const struct rv_worker_entry *worker)
{
    struct rv_span root, outputs, key, node;
    uint32_t at = 0;
    size_t where;

    if (rv_scan_check(text, length, &root, &where) < 0 || !rv_scan_find(text, root, "outputs", &outputs) ||
        !rv_scan_is(text, outputs, '{'))
        return;
    while (rv_scan_next(text, outputs, &at, &key, &node))
        if (rv_scan_is(text, node, '{'))
            learn_node(front, text, node, worker);
}

void rv_front_owners_job_ended(struct rv_front *front, const struct rv_job_record *job)
{
    struct rv_worker_entry *worker;

    TAILQ_FOREACH (worker, &front->router->workers, link)
        if (strcmp(worker->name, job->worker_name) == 0)
            break;
    if (!worker || !rv_front_worker_port(worker))
        return;
    for (uint32_t i = 0; i < job->output_count; i++) {
        const struct rv_output *output = &job->outputs[i];
        void *text;

        if (strcmp(output->name, HISTORY_NAME) != 0 || output->fd < 0 || output->size == 0 ||
            output->size > HISTORY_MAX)
            continue;
        text = mmap(NULL, output->size, PROT_READ, MAP_PRIVATE, output->fd, 0);
        if (text == MAP_FAILED)
            return;
        learn(front, text, output->size, worker);
        (void)munmap(text, output->size);
    }
}

/* ---- view ------------------------------------------------------------------------------------------------------- */

static const char *query_of(const struct rv_http_request *request, const char *name, const char *otherwise)
{
    const char *value = rv_http_query(&request->target, name);

    return value ? value : otherwise;
}

static uint64_t key_of_request(const struct rv_http_request *request)
{
    return key_of(request->http->router->front, query_of(request, "type", "output"), query_of(request, "subfolder", ""),
                  query_of(request, "filename", ""));
}

static bool has_it(const struct rv_front_part *part)
{
    return part->r == 0 && part->status == 200;
}

static void probed(struct rv_front_gather *gather)
{
    struct rv_http_request *request = gather->request;
    struct rv_worker_entry *worker = NULL;

    for (unsigned i = 0; i < gather->count && !worker; i++) {
        const struct rv_front_part *part = &gather->parts[i];

        worker = has_it(part) && part->text ? rv_front_find(gather->front, part->worker, part->incarnation) : NULL;
        if (worker)
            remember(gather->front, key_of_request(request), worker->name,
                     lasts(query_of(request, "type", "output"), worker->incarnation));
    }
    if (!worker) /* nobody has it: ComfyUI's own words for that */
        worker = rv_front_any(gather->front, NULL);
    if (worker)
        rv_front_pass_on_to(request, worker);
    else
        rv_front_answer_not_ready(request, NULL);
}

static void probe(struct rv_http_request *request)
{
    struct rv_front_gather *gather = rv_front_gather_create(request, probed);
    struct rv_front_call_options options = {.method = "HEAD", .path = request->uri};

    if (!gather)
        return;
    gather->enough = has_it;
    rv_front_gather_all(gather);
    rv_front_gather_start(gather, &options, PROBE_US, PROBE_US);
}

void rv_front_view(struct rv_http_request *request)
{
    struct rv_front *front = request->http->router->front;
    struct rv_worker_entry *any = rv_front_any(front, NULL), *first = rv_front_next(front, NULL), *worker = NULL;
    const struct place *place = find(front, key_of_request(request));

    if (rv_front_is_pinned(request)) {
        rv_front_pass_on(request);
        return;
    }
    if (!any) {
        rv_front_answer_not_ready(request, NULL);
        return;
    }
    if (strcmp(query_of(request, "type", "output"), "input") == 0 || !rv_http_query(&request->target, "filename"))
        worker = any; /* the folder of inputs is everybody's */
    else if (place && owner_of(front, place, &worker) && !worker) {
        rv_front_answer_error(request, 503, "worker_not_ready", "try again in a moment", RV_FRONT_RETRY_MS,
                              "worker %s, which has the file, is restarting", place->worker);
        return;
    }
    if (!worker && !rv_front_next(front, first))
        worker = first;
    if (worker)
        rv_front_pass_on_to(request, worker);
    else
        probe(request);
}
