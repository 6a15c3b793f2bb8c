#include "text.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "numbers.h"

#define WORDS_MAX 77u     /* further words are left out */
#define ORDER_STEP 0.125f /* how much less each next word counts, so that their order matters */

int rv_text_encoder_init(struct rv_text_encoder *encoder, const struct rv_model *model, struct rv_failure *err)
{
    int r;

    *encoder = (struct rv_text_encoder){0};
    r = rv_weight_find(model, RV_SHAPE(2, 0, 0), err, &encoder->embedding, RV_TEXT_MARK);
    if (r < 0)
        return r;
    return rv_stack_init(&encoder->stack, model, "text", encoder->embedding.columns, err);
}

void rv_text_encoder_fini(struct rv_text_encoder *encoder)
{
    rv_stack_fini(&encoder->stack);
}

/* ASCII letters and digits, and every byte of other characters. */
static bool is_word_byte(unsigned char c)
{
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c >= 0x80;
}

/* The next word in small letters; its hash goes to *ret_hash. NULL = no more. */
static const char *word_next(const char *text, uint64_t *ret_hash)
{
    char word[64];
    size_t length = 0;

    while (*text && !is_word_byte((unsigned char)*text))
        text++;
    if (!*text)
        return NULL;
    for (; is_word_byte((unsigned char)*text); text++) {
        if (length < sizeof(word))
            word[length++] = (char)(*text >= 'A' && *text <= 'Z' ? *text + ('a' - 'A') : *text);
    }
    *ret_hash = rv_hash_text(word, length);
    return text;
}

/* Rows of the embedding for the words of the prompt; one row at least. */
static int words_look_up(struct rv_run *run, const struct rv_weight *embedding, const char *prompt, float *x,
                         uint32_t *ret_count)
{
    uint64_t hash = rv_hash_text("", 0);
    uint32_t count = 0, i;

    while (count < WORDS_MAX && ((prompt = word_next(prompt, &hash)) || count == 0)) {
        const float *row = rv_weight_rows(run, embedding, (uint32_t)(hash % embedding->rows), 1);
        float *to = x + (size_t)count * embedding->columns;

        if (!row)
            return -ENOMEM;
        for (i = 0; i < embedding->columns; i++)
            to[i] = row[i] / (1 + ORDER_STEP * (float)count);
        count++;
        if (!prompt)
            break;
    }
    *ret_count = count;
    return 0;
}

/* Adds as one more word the row that is most like the mean of the others: this reads the whole embedding. */
static int nearest_add(struct rv_run *run, const struct rv_weight *embedding, float *x, uint32_t *count)
{
    uint32_t width = embedding->columns, i, row, best = 0;
    float *mean = calloc(width, sizeof(float)), *scores = malloc(embedding->rows * sizeof(float));
    const float *nearest;
    int r;

    if (!mean || !scores) {
        r = rv_run_no_memory(run, "the scores of words");
        goto out;
    }
    for (row = 0; row < *count; row++) {
        for (i = 0; i < width; i++)
            mean[i] += x[(size_t)row * width + i] / (float)*count;
    }
    if ((r = rv_weight_multiply(run, embedding, mean, 1, 1, 0, scores)) < 0)
        goto out;
    for (row = 1; row < embedding->rows; row++)
        best = scores[row] > scores[best] ? row : best;
    if (!(nearest = rv_weight_rows(run, embedding, best, 1))) {
        r = -ENOMEM;
        goto out;
    }
    memcpy(x + (size_t)*count * width, nearest, width * sizeof(float));
    ++*count;
out:
    free(mean);
    free(scores);
    return r;
}

int rv_text_encode(struct rv_run *run, const struct rv_text_encoder *encoder, const char *prompt, float *ret_vector)
{
    uint32_t width = encoder->embedding.columns, count = 0, row, i;
    size_t rows = WORDS_MAX + 1;
    float *x = malloc(rows * width * sizeof(float));
    float *scratch = malloc(rows * ((size_t)width + encoder->stack.hidden) * sizeof(float));
    int r;

    if (!x || !scratch) {
        r = rv_run_no_memory(run, "the text encoder");
        goto out;
    }
    rv_run_describe(run, "reading the prompt");
    if ((r = words_look_up(run, &encoder->embedding, prompt, x, &count)) < 0 ||
        (r = nearest_add(run, &encoder->embedding, x, &count)) < 0)
        goto out;
    rv_rows_normalise(x, x, count, width);
    if ((r = rv_stack_apply(run, &encoder->stack, x, count, scratch)) < 0)
        goto out;
    for (row = 1; row < count; row++) {
        for (i = 0; i < width; i++)
            x[i] += x[(size_t)row * width + i];
    }
    rv_rows_normalise(ret_vector, x, 1, width);
out:
    free(x);
    free(scratch);
    return r;
}
