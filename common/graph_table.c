/*
 * What node classes and model files say about a graph. This table is the only place for it: a wrong decision is mended
 * by a row here. The first row that matches wins, so exceptions stand above what they are exceptions from.
 *
 * The names are those of ComfyUI's own nodes and of well-known node packs; tests/e2e/test_route.py runs the table over
 * the workflow templates that ComfyUI ships.
 */
#include <pthread.h>
#include <string.h>

#include "graph_route.h"

#define CLASS_LENGTH_MAX 128u /* longer classes are unknown: matching stays cheap, whatever a request brings */

struct class_row {
    const char *pattern; /* "*" stands for any number of characters */
    enum rv_role role;
    enum rv_medium medium;
};

#define SAVE(pattern, medium)                     \
    {                                             \
        pattern, RV_ROLE_SAVE, RV_MEDIUM_##medium \
    }
#define SHOW(pattern, medium)                     \
    {                                             \
        pattern, RV_ROLE_SHOW, RV_MEDIUM_##medium \
    }
#define MODEL(pattern, medium)                     \
    {                                              \
        pattern, RV_ROLE_MODEL, RV_MEDIUM_##medium \
    }
#define NONE(pattern)                         \
    {                                         \
        pattern, RV_ROLE_NONE, RV_MEDIUM_TEXT \
    }
#define MAKE(pattern, medium)                     \
    {                                             \
        pattern, RV_ROLE_MAKE, RV_MEDIUM_##medium \
    }

static const struct class_row classes[] = {
    /* Output nodes that store. */
    SAVE("SaveVideo*", VIDEO),
    SAVE("SaveWEBM*", VIDEO),
    SAVE("SaveAnimated*", VIDEO),
    SAVE("*VideoCombine*", VIDEO), /* VHS_VideoCombine */
    SAVE("*Save*Video*", VIDEO),
    SAVE("*Save*Audio*", AUDIO),
    SAVE("SaveGLB*", 3D),
    SAVE("Save3D*", 3D),
    SAVE("SaveGaussianSplat*", 3D),
    SAVE("SavePointCloud*", 3D),
    SAVE("*SaveImage*", IMAGE),
    SAVE("*Image*Save*", IMAGE), /* "Image Save" */
    SAVE("SaveSVG*", IMAGE),
    SAVE("SaveLatent", IMAGE),
    SAVE("SaveText*", TEXT),

    /* Output nodes that show. */
    SHOW("Preview*Video*", VIDEO),
    SHOW("Preview*Audio*", AUDIO),
    SHOW("Preview*3D*", 3D),
    SHOW("PreviewGaussianSplat*", 3D),
    SHOW("PreviewPointCloud*", 3D),
    SHOW("PreviewImage*", IMAGE),
    SHOW("ImageCompare*", IMAGE),
    SHOW("MaskPreview*", IMAGE),
    SHOW("PreviewAny", TEXT),
    SHOW("PreviewText*", TEXT),
    SHOW("ShowText*", TEXT),

    /* Nodes of one family of models: its weights are resident when they run. */
    MODEL("Wan*ToVideo", VIDEO),
    MODEL("Wan22ImageToVideoLatent", VIDEO),
    MODEL("*LTXV*", VIDEO),
    MODEL("HunyuanVideo*", VIDEO),
    MODEL("HunyuanImageToVideo", VIDEO),
    MODEL("Empty*LatentVideo", VIDEO),
    MODEL("EmptyHunyuanVideo*", VIDEO),
    MODEL("*MiniMaxH3*", VIDEO),
    MODEL("Cosmos*Latent*", VIDEO),
    MODEL("CogVideo*", VIDEO),
    MODEL("SVD_img2vid*", VIDEO),
    MODEL("ADE_*", VIDEO), /* AnimateDiff */
    MODEL("EmptyLatentAudio", AUDIO),
    MODEL("EmptyAceStep*", AUDIO),
    MODEL("TextEncodeAceStep*", AUDIO),
    MODEL("*MiniMaxMusic*", AUDIO),
    MODEL("*YuE2*", AUDIO),
    MODEL("EmptyLatentHunyuan3D*", 3D),
    MODEL("Hunyuan3D*", 3D),
    MODEL("*Trellis2*", 3D),
    MODEL("Pixal3D*", 3D),
    MODEL("TripoSplat*", 3D),

    /* Nodes that make a medium. Some of those that call a service on the network are output nodes themselves. */
    MAKE("CreateVideo", VIDEO),
    MAKE("*ToVideo*", VIDEO),
    MAKE("VAEDecodeAudio*", AUDIO),
    MAKE("*TextToSpeech*", AUDIO),
    MAKE("*TextToMusic*", AUDIO),
    MAKE("VAEDecodeHunyuan3D", 3D),
    MAKE("VAEDecodeTripoSplat", 3D),
    MAKE("*ToMesh*", 3D),
    MAKE("MeshToFile3D", 3D),
    MAKE("Tripo*Node*", 3D),
    MAKE("Meshy*Node*", 3D),
    MAKE("Rodin3D*", 3D),
    MAKE("*ToModelNode*", 3D),
    MAKE("VAEDecode*", IMAGE),
    MAKE("*ToImage*", IMAGE),
    NONE("Load*"), /* what goes in says nothing about what comes out */
    NONE("Record*"),
    NONE("GetVideoComponents"),
    NONE("Video Slice"),
    NONE("VAEEncode*"),
    NONE("Trim*"),
    NONE("*Voice*Clone*"),
    NONE("*VideoAsset*"),
    NONE("*Loader*"),
    NONE("*ReferenceNode"), /* of Luma: an image for another node */
    MAKE("*SpeechToText*", TEXT),
    MAKE("*Video*", VIDEO),
    MAKE("*LipSync*", VIDEO),
    MAKE("*Lipsync*", VIDEO),
    MAKE("*FirstLastFrame*", VIDEO),
    MAKE("*MotionTransfer*", VIDEO),
    MAKE("*MotionControl*", VIDEO),
    MAKE("*TalkingImage*", VIDEO),
    MAKE("*TalkingPhoto*", VIDEO),
    MAKE("*Audio*", AUDIO),
    MAKE("*Speech*", AUDIO),
    MAKE("*ToSFX*", AUDIO),
    MAKE("*ToSoundEffects*", AUDIO),
    MAKE("*ToDialogue*", AUDIO),
    MAKE("*3D*Node*", 3D),
    MAKE("*SmartTopology*", 3D),
    MAKE("*Image*Node*", IMAGE),
    MAKE("*ChatNode*", TEXT),
    MAKE("*LLMNode*", TEXT),
    MAKE("TextGenerate*", TEXT),
    MAKE("GeminiNode*", TEXT),
    MAKE("ClaudeNode*", TEXT),
};

/* Loaders whose files say nothing about the medium: encoders and decoders are shared between families. */
static const char *const side_loaders[] = {
    "*VAE*",     "*CLIP*",        "*Lora*",         "*LoRA*",       "*ControlNet*",
    "*Upscale*", "*TextEncoder*", "*AudioEncoder*", "*ModelPatch*",
};

struct file_row {
    const char *piece; /* of the name in lower case, where all but letters and digits became "_", with "_" around */
    enum rv_medium medium;
};

static const struct file_row files[] = {
    {"_wan_", RV_MEDIUM_VIDEO},         {"_wan2", RV_MEDIUM_VIDEO},          {"_hunyuan_video", RV_MEDIUM_VIDEO},
    {"_hunyuanvideo", RV_MEDIUM_VIDEO}, {"_ltx", RV_MEDIUM_VIDEO},           {"_cogvideo", RV_MEDIUM_VIDEO},
    {"_mochi", RV_MEDIUM_VIDEO},        {"_svd_", RV_MEDIUM_VIDEO}, /* "svdq" is a way to quantise image models */
    {"_stable_video", RV_MEDIUM_VIDEO}, {"_animatediff", RV_MEDIUM_VIDEO},   {"_minimax_h3", RV_MEDIUM_VIDEO},
    {"_t2v_", RV_MEDIUM_VIDEO},         {"_i2v_", RV_MEDIUM_VIDEO},          {"_ti2v_", RV_MEDIUM_VIDEO},
    {"_s2v_", RV_MEDIUM_VIDEO},         {"_v2v_", RV_MEDIUM_VIDEO},          {"_video2world", RV_MEDIUM_VIDEO},
    {"_stable_audio", RV_MEDIUM_AUDIO}, {"_ace_step", RV_MEDIUM_AUDIO},      {"_acestep", RV_MEDIUM_AUDIO},
    {"_mmaudio", RV_MEDIUM_AUDIO},      {"_minimax_music", RV_MEDIUM_AUDIO}, {"_yue2", RV_MEDIUM_AUDIO},
    {"_hunyuan3d", RV_MEDIUM_3D},       {"_hunyuan_3d", RV_MEDIUM_3D},       {"_trellis", RV_MEDIUM_3D},
    {"_pixal3d", RV_MEDIUM_3D},         {"_triposplat", RV_MEDIUM_3D},
};

#define COUNT(table) (sizeof(table) / sizeof((table)[0]))

/*
 * Which pairs of neighbouring characters a text has, as bits: a text without a pattern's pairs cannot match it. That
 * leaves one pattern of a hundred to look at. `star` ends a piece of a pattern.
 */
static uint64_t pairs_of(const char *text, char star)
{
    uint64_t pairs = 0;

    for (; text[0] && text[1]; text++)
        if (text[0] != star && text[1] != star)
            pairs |= UINT64_C(1) << (((unsigned char)text[0] * 31u + (unsigned char)text[1] * 7u) & 63);
    return pairs;
}

static struct {
    uint64_t classes[COUNT(classes)], side_loaders[COUNT(side_loaders)], files[COUNT(files)];
} pairs;

static void fill_pairs(void)
{
    for (size_t i = 0; i < COUNT(classes); i++)
        pairs.classes[i] = pairs_of(classes[i].pattern, '*');
    for (size_t i = 0; i < COUNT(side_loaders); i++)
        pairs.side_loaders[i] = pairs_of(side_loaders[i], '*');
    for (size_t i = 0; i < COUNT(files); i++)
        pairs.files[i] = pairs_of(files[i].piece, '\0');
}

/* Made from the tables at the first use, and never changed. */
static void prepare(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;

    (void)pthread_once(&once, fill_pairs);
}

/* Goes back to the last star only, which is enough for stars, and never more than length times length. */
static bool matches(const char *pattern, const char *text)
{
    const char *star = NULL, *again = NULL;

    while (*text) {
        if (*pattern == '*') {
            star = pattern++;
            again = text;
        } else if (*pattern == *text) {
            pattern++;
            text++;
        } else if (star) {
            pattern = star + 1;
            text = ++again;
        } else {
            return false;
        }
    }
    while (*pattern == '*')
        pattern++;
    return *pattern == '\0';
}

enum rv_role rv_table_class(const char *class_type, enum rv_medium *ret_medium)
{
    uint64_t has;

    if (strnlen(class_type, CLASS_LENGTH_MAX + 1) > CLASS_LENGTH_MAX)
        return RV_ROLE_NONE;
    prepare();
    has = pairs_of(class_type, '\0');
    for (size_t i = 0; i < COUNT(classes); i++) {
        if ((pairs.classes[i] & ~has) == 0 && matches(classes[i].pattern, class_type)) {
            *ret_medium = classes[i].medium;
            return classes[i].role;
        }
    }
    return RV_ROLE_NONE;
}

bool rv_table_loads_main_model(const char *class_type)
{
    uint64_t has;

    if (strnlen(class_type, CLASS_LENGTH_MAX + 1) > CLASS_LENGTH_MAX)
        return false;
    prepare();
    has = pairs_of(class_type, '\0');
    for (size_t i = 0; i < COUNT(side_loaders); i++)
        if ((pairs.side_loaders[i] & ~has) == 0 && matches(side_loaders[i], class_type))
            return false;
    return true;
}

bool rv_table_file(const char *name, enum rv_medium *ret_medium)
{
    char plain[RV_GRAPH_NAME_MAX + 3];
    size_t n = strnlen(name, RV_GRAPH_NAME_MAX);
    uint64_t has;

    plain[0] = plain[n + 1] = '_';
    plain[n + 2] = '\0';
    for (size_t i = 0; i < n; i++) {
        char c = name[i];

        if (c >= 'A' && c <= 'Z')
            c = (char)(c - 'A' + 'a');
        plain[i + 1] = (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') ? c : '_';
    }
    prepare();
    has = pairs_of(plain, '\0');
    for (size_t i = 0; i < COUNT(files); i++) {
        if ((pairs.files[i] & ~has) == 0 && strstr(plain, files[i].piece)) {
            *ret_medium = files[i].medium;
            return true;
        }
    }
    return false;
}
