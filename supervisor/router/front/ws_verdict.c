/*
 * How prompts ended that no worker tells about. ComfyUI tells its client of most ends itself; a worker that died does
 * not, nor does a prompt that never reached one. The job table knows, but it hears by another way than the client: so a
 * worker that lives, or whose last bytes are not read yet, has its say first, and nobody is told twice.
 */
#include <event2/event.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "clock.h"
#include "prompts.h"
#include "ws.h"

static struct rv_ws_prompt *find_prompt(struct rv_ws_client *client, const char *id)
{
    for (unsigned i = 0; i < RV_WS_PROMPTS_KEPT; i++)
        if (client->prompts[i].id[0] && strcmp(client->prompts[i].id, id) == 0)
            return &client->prompts[i];
    return NULL;
}

static struct rv_ws_prompt *keep_prompt(struct rv_ws_client *client, const char *id)
{
    struct rv_ws_prompt *prompt = find_prompt(client, id);

    if (!prompt) {
        prompt = &client->prompts[client->next_prompt++ % RV_WS_PROMPTS_KEPT];
        (void)snprintf(prompt->id, sizeof(prompt->id), "%s", id);
        prompt->node[0] = '\0';
    }
    prompt->ended = false;
    return prompt;
}

static void remove_entry(struct rv_ws_client *client, struct rv_ws_verdict_entry *entry)
{
    TAILQ_REMOVE(&client->verdicts, entry, link);
    client->verdict_count--;
    free(entry->message);
    free(entry);
}

static void deliver(struct rv_ws_client *client, struct rv_ws_verdict_entry *entry)
{
    struct rv_ws_prompt *prompt = find_prompt(client, entry->prompt_id);
    struct rv_ws_verdict verdict = {
        .prompt_id = entry->prompt_id,
        .node = entry->node[0] || !prompt ? entry->node : prompt->node,
        .node_type = entry->node_type,
        .interrupted = entry->interrupted,
        .exception_type = entry->type,
        .message = entry->message ? entry->message : "",
    };
    char *text = rv_ws_verdict_text(&verdict);

    keep_prompt(client, entry->prompt_id)->ended = true;
    remove_entry(client, entry);
    if (text)
        rv_ws_client_send(client, true, text, strlen(text));
    free(text);
    rv_ws_client_send_status(client, NULL);
}

static void on_timer(int fd, short what, void *context)
{
    struct rv_ws_client *client = context;
    struct timeval again = rv_timeval(RV_WS_VERDICT_US);

    (void)fd;
    (void)what;
    if (client->choked) { /* what the workers have told is not read yet */
        (void)event_add(client->verdict_timer, &again);
        return;
    }
    while (!TAILQ_EMPTY(&client->verdicts))
        deliver(client, TAILQ_FIRST(&client->verdicts));
}

int rv_ws_verdicts_init(struct rv_ws_client *client)
{
    TAILQ_INIT(&client->verdicts);
    client->verdict_timer = event_new(client->ws->front->router->base, -1, 0, on_timer, client);
    return client->verdict_timer ? 0 : -1;
}

void rv_ws_verdicts_fini(struct rv_ws_client *client)
{
    while (!TAILQ_EMPTY(&client->verdicts))
        remove_entry(client, TAILQ_FIRST(&client->verdicts));
    if (client->verdict_timer)
        event_free(client->verdict_timer);
    client->verdict_timer = NULL;
}

static void forget(struct rv_ws_client *client, const char *prompt_id)
{
    struct rv_ws_verdict_entry *entry;

    TAILQ_FOREACH (entry, &client->verdicts, link) {
        if (strcmp(entry->prompt_id, prompt_id) == 0) {
            remove_entry(client, entry);
            break;
        }
    }
    if (TAILQ_EMPTY(&client->verdicts))
        (void)event_del(client->verdict_timer);
}

void rv_ws_verdicts_note(struct rv_ws_client *client, const struct rv_ws_event *event)
{
    struct rv_ws_prompt *prompt;

    if (event->prompt_id[0] == '\0')
        return;
    if (event->kind == RV_WS_EXECUTION_START || event->kind == RV_WS_EXECUTING) {
        prompt = event->kind == RV_WS_EXECUTION_START ? keep_prompt(client, event->prompt_id)
                                                      : find_prompt(client, event->prompt_id);
        if (prompt && event->node[0])
            (void)snprintf(prompt->node, sizeof(prompt->node), "%s", event->node);
        return;
    }
    keep_prompt(client, event->prompt_id)->ended = true;
    forget(client, event->prompt_id);
}

void rv_ws_verdicts_worker_ended(struct rv_ws_client *client, const char *worker)
{
    struct rv_ws_verdict_entry *entry, *next;

    for (entry = TAILQ_FIRST(&client->verdicts); entry; entry = next) {
        next = TAILQ_NEXT(entry, link);
        if (strcmp(entry->worker, worker) == 0)
            deliver(client, entry);
    }
}

static char *write_message(const struct rv_job_record *job)
{
    const struct rv_error_row *row = rv_error_row(job->error_code);
    const char *message = job->error_message ? job->error_message : row->text;
    const char *remedy = job->error_remedy ? job->error_remedy : row->remedy;
    char *text = NULL;

    if (asprintf(&text, "%s%s%s\n", message, remedy[0] ? "; " : "", remedy) < 0)
        return NULL;
    return text;
}

/* The node that the client was last told of, and its class, which only the graph says. */
static void name_node(struct rv_ws_verdict_entry *entry, const struct rv_job_record *job, const char *node)
{
    const char *text = job->submit ? (const char *)job->submit + job->payload_at : NULL;
    struct rv_span found;

    (void)snprintf(entry->node, sizeof(entry->node), "%s", node);
    if (!text || !job->prompt || job->prompt->prompt.length == 0 || node[0] == '\0' ||
        !rv_scan_find(text, job->prompt->prompt, node, &found) || !rv_scan_find(text, found, "class_type", &found) ||
        rv_scan_copy(text, found, entry->node_type, sizeof(entry->node_type)) < 0)
        entry->node_type[0] = '\0';
}

void rv_ws_verdicts_job(struct rv_ws_client *client, const struct rv_job_record *job)
{
    bool cancelled = job->error_code == RV_CODE(CANCELLED);
    struct rv_ws_prompt *prompt = find_prompt(client, job->id);
    struct timeval wait = rv_timeval(RV_WS_VERDICT_US);
    struct rv_ws_verdict_entry *entry;

    if (job->error_code == 0 || strlen(job->id) > RV_WS_PROMPT_ID_MAX || (prompt && prompt->ended) ||
        (cancelled && job->attempts == 0)) /* it left the queue: ComfyUI tells that by the status only */
        return;
    entry = calloc(1, sizeof(*entry));
    if (!entry)
        return;
    (void)snprintf(entry->prompt_id, sizeof(entry->prompt_id), "%s", job->id);
    (void)snprintf(entry->worker, sizeof(entry->worker), "%s", job->worker_name);
    entry->type = rv_prompt_failure_type(job->error_code);
    name_node(entry, job, prompt ? prompt->node : "");
    entry->message = write_message(job);
    entry->interrupted = cancelled;
    TAILQ_INSERT_TAIL(&client->verdicts, entry, link);
    client->verdict_count++;
    if (job->attempts == 0 || client->verdict_count > RV_WS_VERDICTS_MAX ||
        !rv_ws_upstreams_has(client, job->worker_name))
        deliver(client, entry);
    else
        (void)event_add(client->verdict_timer, &wait);
}
