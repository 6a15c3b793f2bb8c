/*
 * Results of self-tests, kept over starts: a file of lines in the state folder. What it says counts only for the same
 * program version, driver version, uuid and attributes; anything else about it that is odd makes all of it nothing.
 *
 *   resvisor-devices 1 PROGRAM-VERSION
 *   driver 13.0
 *   device 32-HEXADECIMAL-DIGITS-OF-UUID 16-HEXADECIMAL-DIGITS-OF-ATTRIBUTES
 *   test cuda-vmm create ok BYTES-PER-SECOND MICROSECONDS DETAIL…
 *   end
 */
#ifndef RV_DEVICE_CACHE_H
#define RV_DEVICE_CACHE_H

#include <stdint.h>

#include "state.h"

#define RV_DEVICE_CACHE_BYTES_MAX (192u * 1024) /* of the file */

struct rv_cached_device {
    uint8_t uuid[RV_DEVICE_UUID_SIZE];
    uint64_t attributes; /* rv_device_attributes_digest */
    struct rv_device_test tests[RV_DEVICE_TESTS_MAX];
    uint32_t test_count;
};

struct rv_device_cache {
    char driver[16];
    uint32_t count;
    struct rv_cached_device devices[RV_DEVICES_MAX];
};

/* Of everything that the choice and the tests depend on. */
uint64_t rv_device_attributes_digest(const struct rv_device_record *device);

/* -EINVAL with `problem` (one line) when it is not exactly such a text. *ret_cache is then undefined. */
int rv_device_cache_parse(const char *text, size_t length, struct rv_device_cache *ret_cache, char *problem,
                          size_t problem_size);

/* -ENOENT = there is none; other negative errno with `problem`. */
int rv_device_cache_read(const char *path, struct rv_device_cache *ret_cache, char *problem, size_t problem_size);

/* The READY ones among the devices, in a new file that takes the place of the old one. Makes the folders. */
int rv_device_cache_write(const char *path, const char *driver, const struct rv_device_record *devices, uint32_t count);

const struct rv_cached_device *rv_device_cache_find(const struct rv_device_cache *cache, const uint8_t *uuid);

/* A test as a report or the cache may have it: known backend, a name of [a-z0-9-], a known result. */
bool rv_device_test_is_valid(const struct rv_device_test *test);

#endif
