#include "picture.h"

#include <math.h>

#define CONTRAST 0.9f /* of tanh: larger is harder */
#define FLAT 1e-12    /* variance of a channel that holds one colour only */

void rv_exposure_measure(struct rv_exposure *exposure, const float *planes, size_t pixels)
{
    uint32_t channel;
    size_t i;

    for (channel = 0; channel < 3; channel++, planes += pixels) {
        double sum = 0, squares = 0, mean, variance;

        for (i = 0; i < pixels; i++) {
            sum += planes[i];
            squares += (double)planes[i] * planes[i];
        }
        mean = sum / (double)pixels;
        variance = squares / (double)pixels - mean * mean;
        exposure->mean[channel] = (float)mean;
        exposure->scale[channel] = variance > FLAT ? (float)(1 / sqrt(variance)) : 0;
    }
}

void rv_picture_develop(const struct rv_exposure *exposure, const float *planes, size_t pixels, uint32_t stride,
                        uint8_t *rgb)
{
    uint32_t channel;
    size_t i;

    for (channel = 0; channel < 3; channel++, planes += pixels) {
        for (i = 0; i < pixels; i++) {
            float value = (planes[i] - exposure->mean[channel]) * exposure->scale[channel];

            rgb[i * stride + channel] = (uint8_t)(127.5f + 127.5f * tanhf(CONTRAST * value) + 0.5f);
        }
    }
    for (i = 0; stride == 4 && i < pixels; i++)
        rgb[i * stride + 3] = 255;
}
