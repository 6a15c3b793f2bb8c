"""Tiny models that the real ComfyUI takes for real ones, and the graphs that use them. Nothing is downloaded.

Keys and shapes are those that ComfyUI's detection looks for: a Wan of few heads and a small autoencoder. Weights are seeded
noise, so what comes out is noise too, but always the same. The graphs need a pack with the nodes NODESConditioning and
NODESFrames: the one of deploy/comfyui/nodes, or that of the tests.

    tiny_models.py FOLDER GIB    writes a models folder whose two models together have about so many GiB
"""

import pathlib
import sys

import numpy
from safetensors.numpy import save_file

CONTEXT = 4096  # width of a Wan's text embedding


class Weights:
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
    w = Weights(seed)
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


def taesd(channels, decoder, seed):
    w = Weights(seed, scale=0.05)
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
    """A models folder of ComfyUI: image.safetensors, video.safetensors, and taef1."""
    for sub in ("diffusion_models", "vae_approx", "vae", "checkpoints"):
        (folder / sub).mkdir(parents=True, exist_ok=True)
    save_file(wan(width, layers, seed=1), folder / "diffusion_models" / "image.safetensors")
    save_file(wan(width, layers, seed=2), folder / "diffusion_models" / "video.safetensors")
    for decoder in (False, True):
        name = f"taef1_{'decoder' if decoder else 'encoder'}.safetensors"
        save_file(taesd(16, decoder, seed=20 + decoder), folder / "vae_approx" / name)


def write_large(folder, gib):
    """The same with models of about gib / 2 GiB each."""
    share = int(gib * 2**30 / 2)
    width = 1024 if share > 200 * 2**20 else 256
    tensors = [sum(value.nbytes for value in wan(width, layers).values()) for layers in (1, 2)]
    write(folder, width, max(1, 1 + round((share - tensors[0]) / (tensors[1] - tensors[0]))))


# ---- graphs ----


def image(seed=1, steps=1, model="image.safetensors", prefix="image", frames=1, nodes="Tiny"):
    """frames > 1: made like a video, and resvisor's routing takes it for one."""
    latent = {"class_type": "EmptySD3LatentImage", "inputs": {"width": 64, "height": 64, "batch_size": 1}}
    if frames > 1:
        latent = {
            "class_type": "EmptyHunyuanLatentVideo",
            "inputs": {"width": 64, "height": 64, "length": frames, "batch_size": 1},
        }
    return {
        "1": {"class_type": "UNETLoader", "inputs": {"unet_name": model, "weight_dtype": "default"}},
        "2": {"class_type": f"{nodes}Conditioning", "inputs": {"width": CONTEXT}},
        "3": latent,
        "4": {
            "class_type": "KSampler",
            "inputs": {
                "model": ["1", 0], "positive": ["2", 0], "negative": ["2", 0], "latent_image": ["3", 0], "seed": seed,
                "steps": steps, "cfg": 1.0, "sampler_name": "euler", "scheduler": "simple", "denoise": 1.0,
            },
        },
        "5": {"class_type": "VAELoader", "inputs": {"vae_name": "taef1"}},
        "6": {"class_type": f"{nodes}Frames", "inputs": {"samples": ["4", 0]}},
        "7": {"class_type": "VAEDecode", "inputs": {"samples": ["6", 0], "vae": ["5", 0]}},
        "8": {"class_type": "SaveImage", "inputs": {"images": ["7", 0], "filename_prefix": prefix}},
        "9": {"class_type": "SaveLatent", "inputs": {"samples": ["4", 0], "filename_prefix": f"{prefix}-latent"}},
    }  # fmt: skip


def video(seed=1, prefix="video", nodes="Tiny"):
    """An animation, by a model of its own."""
    graph = image(seed, model="video.safetensors", prefix=prefix, frames=5, nodes=nodes)
    del graph["9"]
    graph["8"] = {
        "class_type": "SaveAnimatedWEBP",
        "inputs": {
            "images": ["7", 0], "filename_prefix": prefix, "fps": 6.0, "lossless": True, "quality": 80,
            "method": "default",
        },
    }  # fmt: skip
    return graph


if __name__ == "__main__":
    write_large(pathlib.Path(sys.argv[1]), float(sys.argv[2]))
