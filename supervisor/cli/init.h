/* What `init comfyui` finds in an existing installation of ComfyUI. It reads files and folders only. */
#ifndef RV_CLI_INIT_H
#define RV_CLI_INIT_H

#include <limits.h>
#include <stdint.h>

#include "error.h"
#include "rv_limits.h"

#define RV_COMFYUI_NOTES_MAX 16u
#define RV_COMFYUI_NOTE_MAX 512u
#define RV_COMFYUI_PACKS_MAX 1024u
#define RV_COMFYUI_PACKS_SHOWN 40u
#define RV_COMFYUI_YAML_MAX (1024u * 1024) /* bytes of extra_model_paths.yaml */

enum rv_gpu { RV_GPU_NONE, RV_GPU_NVIDIA, RV_GPU_AMD, RV_GPU_INTEL, RV_GPUS };

struct rv_comfyui {
    char directory[PATH_MAX];
    char version[64]; /* printable */
    char python[PATH_MAX];
    const char *python_reason;
    enum rv_gpu gpu;
    char *folders[RV_FOLDERS_MAX]; /* real paths, none inside another */
    uint32_t folder_count;
    char *packs[RV_COMFYUI_PACKS_MAX];
    uint32_t pack_count;
    char *notes[RV_COMFYUI_NOTES_MAX]; /* what was left out, and why */
    uint32_t note_count;
};

/* python NULL = look for it. On failure nothing is left to free, but rv_comfyui_fini is allowed. */
int rv_comfyui_find(const char *directory, const char *python, struct rv_comfyui *ret_found, struct rv_error *err);
void rv_comfyui_fini(struct rv_comfyui *found);

const char *rv_comfyui_gpu_name(enum rv_gpu gpu); /* "none", "nvidia" … */
const char *rv_comfyui_gpu_text(enum rv_gpu gpu); /* in words */

#endif
