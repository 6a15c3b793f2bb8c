/* Texts inside JSON: what the readers of safetensors headers and of requests share. Pure functions, any thread. */
#ifndef RV_JSON_TEXT_H
#define RV_JSON_TEXT_H

#include <stddef.h>
#include <stdint.h>

/* Length of the UTF-8 sequence of 2 to 4 bytes at p, of which `left` bytes are there; 0 = not UTF-8, or one byte. */
unsigned rv_utf8_sequence(const uint8_t *p, size_t left);

/*
 * Decodes one escape. in: what stands behind the backslash, `left` bytes. Up to 4 bytes are written to `out`, which may
 * be `in` - 1: no escape grows. NULL, or what is wrong with it, and then nothing is written.
 */
const char *rv_json_escape(const uint8_t *in, size_t left, char *out, unsigned *ret_read, unsigned *ret_written);

#endif
