/*
 * How to fill an arena of 4 KiB pages: write(2) into the memfd against fallocate ahead + a shared mapping. The loader
 * uses what wins here (docs/design.md has the figures). Usage: bench_fill [MiB] [rounds]; one line per way: the median
 * of the rounds, which run interleaved because fresh memory of a virtual machine differs from moment to moment.
 */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include "clock.h"
#include "memory.h"

#define SOURCE_BYTES (32u << 20) /* as large as the loader's ring: not in the cache when it is copied */
#define ROUNDS_MAX 64

struct way {
    const char *name;
    uint64_t chunk; /* bytes per copy */
    bool mapped, ahead;
};

static const struct way ways[] = {
    {"write(2), 64 KiB", 64u << 10, false, false},
    {"write(2), 1 MiB", 1u << 20, false, false},
    {"fallocate 16 MiB + write(2), 64 KiB", 64u << 10, false, true},
    {"fallocate 16 MiB + mapping, 64 KiB", 64u << 10, true, true},
    {"mapping, 64 KiB", 64u << 10, true, false},
};
#define WAYS (sizeof(ways) / sizeof(ways[0]))
#define AHEAD (16u << 20)

static double cpu_seconds(void)
{
    struct rusage u;

    (void)getrusage(RUSAGE_SELF, &u);
    return (double)(u.ru_utime.tv_sec + u.ru_stime.tv_sec) + (double)(u.ru_utime.tv_usec + u.ru_stime.tv_usec) / 1e6;
}

static int fill(const struct way *way, const uint8_t *source, uint64_t size, double *ret_s, double *ret_cpu)
{
    int fd = rv_memfd_create("bench", 0);
    uint8_t *map = NULL;
    uint64_t start = rv_now_us();
    double cpu = cpu_seconds();

    if (fd < 0 || ftruncate(fd, (off_t)size) < 0)
        return -1;
    if (way->mapped) {
        map = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        if (map == MAP_FAILED)
            return -1;
    }
    for (uint64_t at = 0; at < size; at += way->chunk) {
        const uint8_t *from = source + at % SOURCE_BYTES;

        if (way->ahead && at % AHEAD == 0 && fallocate(fd, 0, (off_t)at, AHEAD) < 0)
            return -1;
        if (map)
            memcpy(map + at, from, way->chunk);
        else if (pwrite(fd, from, way->chunk, (off_t)at) != (ssize_t)way->chunk)
            return -1;
    }
    if (map)
        (void)munmap(map, size);
    *ret_s = (double)(rv_now_us() - start) / 1e6;
    *ret_cpu = cpu_seconds() - cpu;
    (void)close(fd);
    return 0;
}

static int compare(const void *a, const void *b)
{
    const double *x = a, *y = b;

    return *x < *y ? -1 : *x > *y;
}

int main(int argc, char **argv)
{
    uint64_t size = (argc > 1 ? strtoull(argv[1], NULL, 10) : 1024) << 20;
    int rounds = argc > 2 ? atoi(argv[2]) : 5;
    static double s[WAYS][ROUNDS_MAX], cpu[WAYS][ROUNDS_MAX];
    uint8_t *source = malloc(SOURCE_BYTES);

    if (!source || size % AHEAD || rounds < 1 || rounds > ROUNDS_MAX) {
        (void)fprintf(stderr, "usage: bench_fill [MiB, a multiple of 16] [rounds, 1 to %d]\n", ROUNDS_MAX);
        return 2;
    }
    for (uint32_t i = 0; i < SOURCE_BYTES; i++)
        source[i] = (uint8_t)(i * 2654435761u >> 24);
    for (int round = 0; round < rounds; round++)
        for (unsigned w = 0; w < WAYS; w++)
            if (fill(&ways[w], source, size, &s[w][round], &cpu[w][round]) < 0) {
                perror(ways[w].name);
                return 1;
            }
    for (unsigned w = 0; w < WAYS; w++) {
        qsort(s[w], (size_t)rounds, sizeof(double), compare);
        qsort(cpu[w], (size_t)rounds, sizeof(double), compare);
        (void)printf("%-38s %6.2f GiB/s  %5.2f CPU s per GiB  (%.3f to %.3f s)\n", ways[w].name,
                     (double)size / (1u << 30) / s[w][rounds / 2], cpu[w][rounds / 2] / ((double)size / (1u << 30)),
                     s[w][0], s[w][rounds - 1]);
    }
    free(source);
    return 0;
}
