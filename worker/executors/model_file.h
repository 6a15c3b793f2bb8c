/* Writes a plan as a safetensors file (https://github.com/huggingface/safetensors, "Format"): an 8-byte length, a JSON
 * header, the tensors' bytes. Streaming; a file appears under its name only when it is complete. */
#ifndef RV_MODEL_FILE_H
#define RV_MODEL_FILE_H

#include <signal.h>

#include "model_plan.h"

/*
 * Writes to a name beside `path`, then renames. *stop (may be NULL): set by a signal handler to give up. On failure
 * nothing is left behind. -ECANCELED; -E2BIG = more header than readers take; else what the system said.
 */
int rv_model_write(const struct rv_plan *plan, const char *path, const volatile sig_atomic_t *stop,
                   uint64_t *ret_file_bytes);

#endif
