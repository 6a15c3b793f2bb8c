/* gpu-picture A.png B.png: how much two pictures differ, of 255: "most=N mean=X". Exit status 1 = not comparable. */
#include <png.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

static uint8_t *pixels_of(const char *path, png_image *image)
{
    uint8_t *pixels = NULL;

    image->version = PNG_IMAGE_VERSION;
    if (!png_image_begin_read_from_file(image, path))
        return NULL;
    image->format = PNG_FORMAT_RGB;
    pixels = malloc(PNG_IMAGE_SIZE(*image));
    if (pixels && png_image_finish_read(image, NULL, pixels, 0, NULL))
        return pixels;
    free(pixels);
    return NULL;
}

int main(int argc, char **argv)
{
    png_image one = {0}, other = {0};
    uint8_t *a = NULL, *b = NULL;
    int most = 0, code = 1;
    double sum = 0;
    size_t i, size;

    if (argc != 3)
        return 2;
    a = pixels_of(argv[1], &one);
    b = pixels_of(argv[2], &other);
    if (!a || !b || one.width != other.width || one.height != other.height) {
        (void)fprintf(stderr, "not two pictures of one size\n");
        goto out;
    }
    size = PNG_IMAGE_SIZE(one);
    for (i = 0; i < size; i++) {
        int difference = abs(a[i] - b[i]);

        most = difference > most ? difference : most;
        sum += difference;
    }
    (void)printf("most=%d mean=%.4f\n", most, sum / (double)size);
    code = 0;
out:
    free(a);
    free(b);
    return code;
}
