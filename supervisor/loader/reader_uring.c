/* O_DIRECT by io_uring. */
#include <errno.h>
#include <liburing.h>
#include <stdlib.h>

#include "reader_way.h"

struct uring {
    struct io_uring ring;
    unsigned in_flight;
};

static int uring_open(struct rv_reader *reader)
{
    struct uring *u = calloc(1, sizeof(*u));
    int r;

    if (!u)
        return -ENOMEM;
    /* Completions run when this thread asks for them: no interrupted system calls, no signals between. */
    r = io_uring_queue_init(RV_READER_SLOTS, &u->ring, IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN);
    if (r == -EINVAL) /* before Linux 6.1 */
        r = io_uring_queue_init(RV_READER_SLOTS, &u->ring, 0);
    if (r < 0) {
        free(u);
        return r;
    }
    reader->state = u;
    return 0;
}

static void uring_start(struct rv_reader *reader, struct reader_slot *slot)
{
    struct uring *u = reader->state;
    struct io_uring_sqe *sqe = io_uring_get_sqe(&u->ring);
    int r;

    if (!sqe) { /* cannot be: as many entries as slots. EAGAIN makes reader.c read it itself */
        slot->result = -EAGAIN;
        slot->done = true;
        return;
    }
    io_uring_prep_read(sqe, reader->fd, slot->buffer, slot->request, slot->offset);
    io_uring_sqe_set_data(sqe, slot);
    u->in_flight++;
    do {
        r = io_uring_submit(&u->ring);
    } while (r == -EINTR); /* any other failure leaves it in the queue: uring_wait submits again */
}

/* Takes one completion, waiting for it. */
static int reap(struct uring *u)
{
    struct io_uring_cqe *cqe = NULL;
    struct reader_slot *slot;
    int r = io_uring_submit_and_wait(&u->ring, 1);

    if (r >= 0 || r == -EINTR || r == -EAGAIN || r == -EBUSY)
        r = io_uring_peek_cqe(&u->ring, &cqe);
    if (r == -EAGAIN)
        return 0;
    if (r < 0)
        return r;
    while (cqe) {
        slot = io_uring_cqe_get_data(cqe);
        slot->result = cqe->res;
        slot->done = true;
        u->in_flight--;
        io_uring_cqe_seen(&u->ring, cqe);
        cqe = NULL;
        if (io_uring_peek_cqe(&u->ring, &cqe) < 0)
            break;
    }
    return 0;
}

static void uring_wait(struct rv_reader *reader, struct reader_slot *slot)
{
    struct uring *u = reader->state;
    int r = 0;

    while (!slot->done && r == 0)
        r = reap(u);
    if (!slot->done) {
        slot->result = r;
        slot->done = true;
    }
}

static void uring_close(struct rv_reader *reader)
{
    struct uring *u = reader->state;

    if (!u)
        return;
    while (u->in_flight > 0 && reap(u) == 0)
        ;
    io_uring_queue_exit(&u->ring);
    free(u);
    reader->state = NULL;
}

const struct reader_way rv_reader_uring = {"io_uring", uring_open, uring_start, uring_wait, uring_close};
