/* O_DIRECT by io_uring. */
#include <errno.h>
#include <liburing.h>
#include <stdlib.h>

#include "reader_way.h"

#define VAIN_TRIES 1000u /* submissions in a row that brought nothing */

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

/* Waits for a completion and takes all there are: how many, or a negative errno. */
static int reap(struct uring *u)
{
    struct io_uring_cqe *cqe = NULL;
    int taken = 0;
    int r = io_uring_submit_and_wait(&u->ring, 1);

    if (r < 0 && r != -EINTR && r != -EAGAIN && r != -EBUSY)
        return r;
    while (io_uring_peek_cqe(&u->ring, &cqe) == 0) {
        struct reader_slot *slot = io_uring_cqe_get_data(cqe);

        slot->result = cqe->res;
        slot->done = true;
        u->in_flight--;
        taken++;
        io_uring_cqe_seen(&u->ring, cqe);
    }
    return taken;
}

/* Until the slot is done, or the ring cannot take work (no kernel memory): then 0 or a negative errno. */
static int reap_until(struct uring *u, const struct reader_slot *slot)
{
    unsigned vain = 0;

    while (u->in_flight > 0 && !(slot && slot->done)) {
        int r = reap(u);

        if (r < 0)
            return r;
        vain = r > 0 ? 0 : vain + 1;
        if (vain == VAIN_TRIES)
            return -EBUSY;
    }
    return 0;
}

static void uring_wait(struct rv_reader *reader, struct reader_slot *slot)
{
    int r = reap_until(reader->state, slot);

    if (!slot->done) { /* never an error that makes reader.c read again: the ring may still write into the buffer */
        slot->result = r < 0 ? r : -EIO;
        slot->done = true;
    }
}

static void uring_close(struct rv_reader *reader)
{
    struct uring *u = reader->state;

    if (!u)
        return;
    (void)reap_until(u, NULL);
    io_uring_queue_exit(&u->ring);
    free(u);
    reader->state = NULL;
}

const struct reader_way rv_reader_uring = {
    .name = "io_uring",
    .direct = true,
    .block = READER_DIRECT_BLOCK,
    .open = uring_open,
    .start = uring_start,
    .wait = uring_wait,
    .close = uring_close,
};
