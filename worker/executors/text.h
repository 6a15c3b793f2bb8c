/* The text encoder: a prompt becomes one vector. Every weight of the encoder file is read once. */
#ifndef RV_EXECUTOR_TEXT_H
#define RV_EXECUTOR_TEXT_H

#include "stack.h"

struct rv_text_encoder {
    struct rv_weight embedding;
    struct rv_stack stack;
};

#define RV_TEXT_MARK "text.embedding.weight" /* the tensor that makes a model a text encoder */

int rv_text_encoder_init(struct rv_text_encoder *encoder, const struct rv_model *model, struct rv_failure *err);
void rv_text_encoder_fini(struct rv_text_encoder *encoder);

/* Writes encoder->embedding.columns numbers with a mean square of 1. One step of progress per layer. */
int rv_text_encode(struct rv_run *run, const struct rv_text_encoder *encoder, const char *prompt, float *ret_vector);

#endif
