/*
 * `init comfyui DIR`: a commented configuration for a ComfyUI that is there already. It only looks, runs nothing of the
 * installation, and writes one new file that `resvisor check` would call good.
 */
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "cli.h"
#include "init.h"
#include "output.h"
#include "rpc.pb-c.h"

#define CODE(name) RESVISOR__V1__ERROR_CODE__ERROR_##name
#define DEFAULT_FILE "resvisor.yaml"
#define ADDRESS "127.0.0.1:8188" /* the one that ComfyUI has by itself, so that its clients need no change */

static const struct rv_option options[] = {
    {"out", 'o', "FILE", "Write this file, which must not exist; - for standard output. Default: resvisor.yaml."},
    {"python", 'p', "PYTHON", "The interpreter that ComfyUI is started with, if it is not found."},
    {0},
};
enum { INIT_OUT, INIT_PYTHON };

/* ---- writing ----------------------------------------------------------------------------------------------------- */

/* A text as YAML takes it: JSON's quotes and escapes are YAML's too. */
static void write_quoted(FILE *out, const char *text)
{
    json_t *value = json_string(text);
    char *quoted = json_dumps(value, JSON_ENCODE_ANY);

    (void)fputs(quoted ? quoted : "\"\"", out);
    free(quoted);
    json_decref(value);
}

static void write_type(FILE *out, const struct rv_comfyui *found, const char *name, const char *accepts)
{
    fprintf(out, "  %s:\n    kind: comfyui\n    directory: ", name);
    write_quoted(out, found->directory);
    fprintf(out, "\n    python: ");
    write_quoted(out, found->python);
    fprintf(out, "\n    args: [%s]\n    accepts: [%s]\n    start_timeout: 3m\n",
            found->gpu == RV_GPU_NONE ? "--cpu" : "", accepts);
}

static void write_folders(FILE *out, const struct rv_comfyui *found)
{
    fprintf(out, "# Where models lie: the installation's own folder%s. Others are refused.\nmodel_folders:\n",
            found->folder_count > 1 ? ", and those of extra_model_paths.yaml" : "");
    for (uint32_t i = 0; i < found->folder_count; i++) {
        fprintf(out, "  - ");
        write_quoted(out, found->folders[i]);
        fprintf(out, "\n");
    }
    for (uint32_t i = 0; i < found->note_count; i++) {
        char safe[2 * RV_COMFYUI_NOTE_MAX];

        fprintf(out, "  # not taken: %s\n", rv_escape(safe, sizeof(safe), found->notes[i], strlen(found->notes[i])));
    }
}

static const char *plural(uint32_t count)
{
    return count == 1 ? "" : "s";
}

static void write_config(FILE *out, const struct rv_comfyui *found)
{
    char safe[2 * NAME_MAX];

    fprintf(out,
            "# ComfyUI as workers of resvisor, written by `resvisor init comfyui`. `resvisor check` names mistakes.\n"
            "# Every key is explained by `resvisor check --reference`.\n\n");
    write_folders(out, found);
    fprintf(out, "\n# ComfyUI %s, %s.\n# Node packs in custom_nodes: %u%s\n", found->version,
            rv_comfyui_gpu_text(found->gpu), found->pack_count, found->pack_count > 0 ? ":" : ".");
    for (uint32_t i = 0; i < found->pack_count && i < RV_COMFYUI_PACKS_SHOWN; i++)
        fprintf(out, "#   %s\n", rv_escape(safe, sizeof(safe), found->packs[i], strlen(found->packs[i])));
    if (found->pack_count > RV_COMFYUI_PACKS_SHOWN)
        fprintf(out, "#   and %u more\n", found->pack_count - RV_COMFYUI_PACKS_SHOWN);
    fprintf(out,
            "# The interpreter is %s.\n"
            "# One process per type: what one type does, or how it dies, leaves the other one warm.\n"
            "# `resvisor route FILE.json` says which type a workflow belongs to.\ntypes:\n",
            found->python_reason);
    write_type(out, found, "image", "image, 3d, text, any");
    write_type(out, found, "video", "video, audio");
    fprintf(out, "\n# One address for all of them, with ComfyUI's own interface: for browsers, and for programs that "
                 "speak to ComfyUI.\n"
                 "# A ComfyUI that you started by hand has the same port: end it first, or write another number here.\n"
                 "http:\n  listen: \"" ADDRESS "\"\n");
}

/* Writes a new file beside its place, checks it, and gives it its name: nothing half-written, nothing overwritten. */
static int write_file(const char *path, const struct rv_comfyui *found, struct rv_error *err)
{
    struct rv_config_sources sources = {0};
    struct rv_config *config = NULL;
    char temporary[PATH_MAX], *problems = NULL;
    size_t length = 0;
    bool incomplete;
    FILE *out, *report = open_memstream(&problems, &length);
    int n = snprintf(temporary, sizeof(temporary), "%s.%d.new", path, (int)getpid()), r, fd;

    if (!report || n < 0 || (size_t)n >= sizeof(temporary)) {
        r = rv_error_set(err, ENAMETOOLONG, CODE(USAGE), "the path of the file is too long");
        goto out;
    }
    fd = open(temporary, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
    out = fd >= 0 ? fdopen(fd, "w") : NULL;
    if (!out) {
        r = rv_error_set(err, errno, CODE(FILE), "%s cannot be made: %s", temporary, strerror(errno));
        goto out;
    }
    write_config(out, found);
    errno = 0;
    incomplete = fflush(out) != 0 || ferror(out);
    if (fclose(out) != 0 || incomplete) {
        r = rv_error_set(err, errno ? errno : EIO, CODE(FILE), "%s cannot be written: %s", temporary,
                         strerror(errno ? errno : EIO));
        goto remove;
    }
    sources.file = temporary;
    r = rv_config_load(&sources, report, &config);
    (void)fflush(report);
    rv_config_destroy(config);
    if (r < 0)
        r = rv_error_set(err, EINVAL, CODE(CONFIG), "what was found makes no good configuration: %.*s",
                         (int)strcspn(problems, "\n"), problems);
    else if (link(temporary, path) < 0)
        r = rv_error_set(err, errno, CODE(FILE), "%s cannot be made: %s%s", path, strerror(errno),
                         errno == EEXIST ? "; remove it, or give another name with --out" : "");
remove:
    (void)unlink(temporary);
out:
    if (report)
        (void)fclose(report);
    free(problems);
    return r;
}

/* ---- the command ------------------------------------------------------------------------------------------------- */

static void say(const char *path, const struct rv_comfyui *found, bool json)
{
    if (json) {
        json_t *root = json_object(), *folders = json_array();

        for (uint32_t i = 0; i < found->folder_count; i++)
            (void)json_array_append_new(folders, rv_json_text(found->folders[i]));
        (void)json_object_set_new(root, "file", rv_json_text(path));
        (void)json_object_set_new(root, "directory", rv_json_text(found->directory));
        (void)json_object_set_new(root, "version", rv_json_text(found->version));
        (void)json_object_set_new(root, "python", rv_json_text(found->python));
        (void)json_object_set_new(root, "gpu", json_string(rv_comfyui_gpu_name(found->gpu)));
        (void)json_object_set_new(root, "model_folders", folders);
        (void)json_object_set_new(root, "node_packs", json_integer(found->pack_count));
        rv_json_print(root);
        return;
    }
    printf("%s: written and good: ComfyUI %s, %u model folder%s, %u node pack%s, %s\n", path, found->version,
           found->folder_count, plural(found->folder_count), found->pack_count, plural(found->pack_count),
           rv_comfyui_gpu_text(found->gpu));
    printf("interpreter: %s, %s\n", found->python, found->python_reason);
    for (uint32_t i = 0; i < found->note_count; i++) {
        char safe[2 * RV_COMFYUI_NOTE_MAX];

        printf("not taken: %s\n", rv_escape(safe, sizeof(safe), found->notes[i], strlen(found->notes[i])));
    }
    printf("next: `resvisor start -c %s`, then give http://" ADDRESS " to your browser and your programs\n", path);
}

static int init(const struct rv_args *args, const char *path, const char *python)
{
    static struct rv_comfyui found; /* large */
    struct rv_error err = {0};
    int r;

    if (strcmp(args->arguments[0], "comfyui") != 0)
        return rv_args_wrong(args, "there is no configuration to write for \"%s\"; allowed: comfyui",
                             args->arguments[0]);
    r = rv_comfyui_find(args->arguments[1], python, &found, &err);
    if (r == 0 && strcmp(path, "-") == 0)
        write_config(stdout, &found);
    else if (r == 0)
        r = write_file(path, &found, &err);
    if (r < 0)
        r = rv_say_error(&err, args->json);
    else if (strcmp(path, "-") != 0)
        say(path, &found, args->json);
    rv_comfyui_fini(&found);
    return r;
}

static int run_init(int argc, char **argv)
{
    const char *value, *path = DEFAULT_FILE, *python = NULL;
    struct rv_args args;
    int i;

    rv_args_init(&args, &rv_command_init, argc, argv);
    while ((i = rv_args_next(&args, &value)) >= 0) {
        if (i == INIT_OUT)
            path = value;
        else if (i == INIT_PYTHON)
            python = value;
    }
    if (i != RV_ARGS_END)
        return rv_args_exit(&args, i);
    i = init(&args, path, python);
    rv_args_fini(&args);
    return i;
}

const struct rv_command rv_command_init = {
    .name = "init",
    .arguments = "comfyui DIR [-o FILE] [-p PYTHON] [--json]",
    .summary = "Write a configuration for a ComfyUI that is there already.",
    .text = "DIR is the folder of ComfyUI, with its main.py. The interpreter, the model folders, also those of\n"
            "extra_model_paths.yaml, the node packs and the kind of GPU are looked up; nothing of ComfyUI is run or "
            "changed.\n"
            "The file gets comments, and is checked before it gets its name; one that exists is not replaced.",
    .common = RV_COMMON_JSON,
    .min_arguments = 2,
    .max_arguments = 2,
    .options = options,
    .run = run_init,
};
