/*
 * The decoder: a small latent becomes a picture or a sound by convolutions and nearest-neighbour enlarging, in the
 * shape of TAESD: convolution, ReLU, stages of residual blocks, each stage but the last enlarged, and a last
 * convolution.
 */
#ifndef RV_EXECUTOR_DECODER_H
#define RV_EXECUTOR_DECODER_H

#include "layout.h"
#include "weights.h"

struct rv_convolution {
    struct rv_weight weight, bias; /* bias.data NULL = none */
    uint32_t inputs, outputs, kernel_height, kernel_width;
};

struct rv_block {
    struct rv_convolution convolutions[RV_DECODER_CONVS];
};

struct rv_stage {
    struct rv_block blocks[RV_DECODER_BLOCKS_MAX];
    uint32_t block_count;
    uint32_t channels;
    struct rv_convolution up; /* unused in the last stage */
};

struct rv_decoder_shape {
    uint32_t inputs, outputs;
    uint32_t stages; /* enlarged stages - 1 times */
    uint32_t enlarge_height, enlarge_width;
    uint32_t kernel_height, kernel_width;
};

struct rv_decoder {
    struct rv_decoder_shape shape;
    struct rv_convolution input, output;
    struct rv_stage stages[RV_DECODER_STAGES_MAX];
    uint32_t convolutions; /* steps of progress of one decoding */
};

extern const struct rv_decoder_shape rv_picture_decoder, rv_sound_decoder;

int rv_decoder_init(struct rv_decoder *decoder, const struct rv_model *model, const struct rv_decoder_shape *shape,
                    struct rv_failure *err);

/*
 * latent[inputs][height][width] -> *ret_planes (free()), [outputs][height'][width'], enlarged as the shape says.
 * Checked to be finite. One step of progress per convolution.
 */
int rv_decode(struct rv_run *run, const struct rv_decoder *decoder, const float *latent, uint32_t height,
              uint32_t width, float **ret_planes);

#endif
