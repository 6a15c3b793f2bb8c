#include "picture.h"

#include <math.h>

#define CONTRAST 1.0f /* of tanh: larger is harder */
#define COLOUR 0.5f   /* share of a channel itself; the rest is the mean of all three, which tames random colours */
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
    float value[3], grey;
    uint32_t channel;
    size_t i;

    for (i = 0; i < pixels; i++, rgb += stride) {
        for (channel = 0; channel < 3; channel++)
            value[channel] = (planes[channel * pixels + i] - exposure->mean[channel]) * exposure->scale[channel];
        grey = (value[0] + value[1] + value[2]) / 3;
        for (channel = 0; channel < 3; channel++) {
            float mixed = grey + COLOUR * (value[channel] - grey);

            rgb[channel] = (uint8_t)(127.5f + 127.5f * tanhf(CONTRAST * mixed) + 0.5f);
        }
        if (stride == 4)
            rgb[3] = 255;
    }
}
