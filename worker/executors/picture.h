/* From the decoder's three planes to pixels. Shared by image and video. */
#ifndef RV_EXECUTOR_PICTURE_H
#define RV_EXECUTOR_PICTURE_H

#include <stddef.h>
#include <stdint.h>

/* Mean and scale of each channel: taken from one picture, so that all frames of a video get the same colours. */
struct rv_exposure {
    float mean[3], scale[3];
};

void rv_exposure_measure(struct rv_exposure *exposure, const float *planes, size_t pixels);

/* planes[3][pixels] -> rgb[pixels][stride], red first; a fourth byte, where stride is 4, becomes 255. */
void rv_picture_develop(const struct rv_exposure *exposure, const float *planes, size_t pixels, uint32_t stride,
                        uint8_t *rgb);

#endif
