"""Tiny models that the real ComfyUI takes for real ones, and the graphs that use them. Nothing is downloaded.

Keys and shapes are those that ComfyUI's detection looks for: a Wan of one head and a small autoencoder. Weights are seeded noise, so what comes out is noise too, but always the same.
"""

import json

import numpy
from safetensors.numpy import save_file

CONTEXT = 4096  # width of a Wan's text embedding


class _Weights:
    def __init__(self, seed, scale=0.02):
        self.random = numpy.random.Generator(numpy.random.PCG64(seed))
        self.scale = scale
        self.found = {}

    def add(self, name, *shape):
        self.found[name] = (self.random.standard_normal(shape, dtype=numpy.float32) * self.scale).astype(numpy.float32)

    def ones(self, name, *shape):
        self.found[name] = numpy.ones(shape, dtype=numpy.float32)

    def linear(self, name, wide, narrow):
        self.add(f"{name}.weight", wide, narrow)
        self.add(f"{name}.bias", wide)

    def conv(self, name, out, into, *kernel, bias=True):
        self.add(f"{name}.weight", out, into, *kernel)
        if bias:
            self.add(f"{name}.bias", out)


def wan(width=128, layers=1, ffn=256, seed=9):
    """A Wan of width 128 * heads."""
    w = _Weights(seed)
    w.conv("patch_embedding", width, 16, 1, 2, 2)
    w.linear("text_embedding.0", width, CONTEXT)
    w.linear("text_embedding.2", width, width)
    w.linear("time_embedding.0", width, 256)
    w.linear("time_embedding.2", width, width)
    w.linear("time_projection.1", 6 * width, width)
    for i in range(layers):
        base = f"blocks.{i}"
        for kind in ("self_attn", "cross_attn"):
            for part in ("q", "k", "v", "o"):
                w.linear(f"{base}.{kind}.{part}", width, width)
            w.ones(f"{base}.{kind}.norm_q.weight", width)
            w.ones(f"{base}.{kind}.norm_k.weight", width)
        w.ones(f"{base}.norm3.weight", width)
        w.add(f"{base}.norm3.bias", width)
        w.linear(f"{base}.ffn.0", ffn, width)
        w.linear(f"{base}.ffn.2", width, ffn)
        w.add(f"{base}.modulation", 1, 6, width)
    w.linear("head.head", 64, width)
    w.add("head.modulation", 1, 2, width)
    return w.found


def lora(width=128, rank=4, seed=5):
    """A LoRA of one matrix of that Wan."""
    w = _Weights(seed, scale=0.5)
    w.add("diffusion_model.blocks.0.self_attn.q.lora_up.weight", width, rank)
    w.add("diffusion_model.blocks.0.self_attn.q.lora_down.weight", rank, width)
    return w.found


def taesd(channels, decoder, seed):
    w = _Weights(seed, scale=0.05)
    first, last, plain = ("1", "19", ("7", "12", "17")) if decoder else ("0", "14", ("2", "6", "10"))
    blocks = (3, 4, 5, 8, 9, 10, 13, 14, 15, 18) if decoder else (1, 3, 4, 5, 7, 8, 9, 11, 12, 13)
    w.conv(first, 64, channels if decoder else 3, 3, 3)
    for block in blocks:
        for part in (0, 2, 4):
            w.conv(f"{block}.conv.{part}", 64, 64, 3, 3)
    for number in plain:
        w.conv(number, 64, 64, 3, 3, bias=False)
    w.conv(last, 3 if decoder else channels, 64, 3, 3)
    return w.found


def write(folder, width=128, layers=1):
    """A models folder of ComfyUI: image.safetensors, video.safetensors, lora.safetensors, and taef1."""
    for sub in ("diffusion_models", "vae_approx", "loras", "vae", "checkpoints"):
        (folder / sub).mkdir(parents=True, exist_ok=True)
    save_file(wan(width, layers, seed=1), folder / "diffusion_models" / "image.safetensors")
    save_file(wan(width, layers, seed=2), folder / "diffusion_models" / "video.safetensors")
    save_file(lora(width), folder / "loras" / "lora.safetensors")
    for decoder in (False, True):
        name = f"taef1_{'decoder' if decoder else 'encoder'}.safetensors"
        save_file(taesd(16, decoder, seed=20 + decoder), folder / "vae_approx" / name)


# ---- graphs ----


def image(seed=1, steps=1, model="image.safetensors", prefix="image", frames=1):
    return {
        "1": {"class_type": "UNETLoader", "inputs": {"unet_name": model, "weight_dtype": "default"}},
        "2": {"class_type": "TestConditioning", "inputs": {"width": CONTEXT}},
        "3": {
            "class_type": "EmptyHunyuanLatentVideo",
            "inputs": {"width": 64, "height": 64, "length": frames, "batch_size": 1},
        },
        "4": {
            "class_type": "KSampler",
            "inputs": {
                "model": ["1", 0], "positive": ["2", 0], "negative": ["2", 0], "latent_image": ["3", 0], "seed": seed,
                "steps": steps, "cfg": 1.0, "sampler_name": "euler", "scheduler": "simple", "denoise": 1.0,
            },
        },
        "5": {"class_type": "VAELoader", "inputs": {"vae_name": "taef1"}},
        "6": {"class_type": "TestFrames", "inputs": {"samples": ["4", 0]}},
        "7": {"class_type": "VAEDecode", "inputs": {"samples": ["6", 0], "vae": ["5", 0]}},
        "8": {"class_type": "SaveImage", "inputs": {"images": ["7", 0], "filename_prefix": prefix}},
        "9": {"class_type": "SaveLatent", "inputs": {"samples": ["4", 0], "filename_prefix": f"{prefix}-latent"}},
    }  # fmt: skip


def video(seed=1, prefix="video"):
    """An animation, by a model of its own."""
    graph = image(seed, model="video.safetensors", prefix=prefix, frames=5)
    del graph["9"]
    graph["8"] = {
        "class_type": "SaveAnimatedWEBP",
        "inputs": {
            "images": ["7", 0], "filename_prefix": prefix, "fps": 6.0, "lossless": True, "quality": 80,
            "method": "default",
        },
    }  # fmt: skip
    return graph


def node(kind, **inputs):
    """A prompt of one output node of the test pack."""
    return {"1": {"class_type": kind, "inputs": inputs}}


def with_lora(graph, strength=1.0):
    graph = json.loads(json.dumps(graph))
    graph["10"] = {
        "class_type": "LoraLoaderModelOnly",
        "inputs": {"model": ["1", 0], "lora_name": "lora.safetensors", "strength_model": strength},
    }
    graph["4"]["inputs"]["model"] = ["10", 0]
    return graph


def with_hook_lora(graph):
    """The LoRA as a hook of the conditioning: ComfyUI writes weights in place for it."""
    graph = json.loads(json.dumps(graph))
    graph["10"] = {
        "class_type": "CreateHookLoraModelOnly", "inputs": {"lora_name": "lora.safetensors", "strength_model": 1.0}
    }  # fmt: skip
    graph["11"] = {
        "class_type": "ConditioningSetProperties",
        "inputs": {"cond_NEW": ["2", 0], "strength": 1.0, "set_cond_area": "default", "hooks": ["10", 0]},
    }
    graph["4"]["inputs"]["positive"] = ["11", 0]
    return graph
