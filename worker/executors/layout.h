/*
 * The tensors that the executors look for, and the sizes that are fixed by their code. Shared with resvisor-make-model.
 *
 *   text encoder (one file for all types; T = RV_TEXT_WIDTH in generated files, any number otherwise)
 *     text.embedding.weight           [rows, T]
 *     text.layers.N.up.weight         [H, T]       N = 0, 1, 2 … without a gap
 *     text.layers.N.down.weight       [T, H]
 *   model of a type (D, H: any)
 *     denoiser.input.weight           [D, P + RV_POSITION_FEATURES + RV_TIME_FEATURES]   P = numbers in one patch
 *     denoiser.condition.weight       [D, T]
 *     denoiser.layers.N.up.weight     [H, D]
 *     denoiser.layers.N.down.weight   [D, H]
 *     denoiser.output.weight          [P, D]
 *     decoder.input.weight, .bias     [C0, latent channels, kernel], [C0]
 *     decoder.stages.S.blocks.B.K.weight, .bias   [CS, CS, kernel], [CS]    K = 0, 1, 2
 *     decoder.stages.S.up.weight      [CS+1, CS, kernel]                    after enlarging
 *     decoder.output.weight, .bias    [output channels, Clast, kernel], [output channels]
 * kernel is 3, 3 for pictures and 7 for sound. Every tensor is F32, BF16 or F16.
 */
#ifndef RV_EXECUTOR_LAYOUT_H
#define RV_EXECUTOR_LAYOUT_H

#define RV_TEXT_WIDTH 512u
#define RV_TEXT_ROWS 1024u

#define RV_POSITION_FEATURES 24u
#define RV_TIME_FEATURES 16u

#define RV_PICTURE_LATENTS 4u /* channels of the latent */
#define RV_PICTURE_SCALE 8u   /* pixels per latent value, each way */
#define RV_PICTURE_PATCH 4u   /* latent values per token, each way */
#define RV_PICTURE_KERNEL 3u
#define RV_VIDEO_PATCH_FRAMES 2u

#define RV_SOUND_LATENTS 8u
#define RV_SOUND_SCALE 256u /* samples per latent value */
#define RV_SOUND_PATCH 4u
#define RV_SOUND_KERNEL 7u
#define RV_SOUND_RATE 16000u  /* samples per second */
#define RV_SOUND_PARTIALS 12u /* loudness curves that the decoder gives */

#define RV_DECODER_CONVS 3u /* convolutions of one residual block */
#define RV_DECODER_STAGES_MAX 5u
#define RV_DECODER_BLOCKS_MAX 8u

/* Blocks of each stage and how much each stage enlarges, in one dimension; the last stage does not. */
#define RV_PICTURE_STAGES 4u
#define RV_SOUND_STAGES 5u

#endif
