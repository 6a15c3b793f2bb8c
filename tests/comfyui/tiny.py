"""The tiny models and graphs of deploy/comfyui, and what only the tests need beside them: LoRAs, and prompts of one node."""

import functools
import json

import tiny_models
from safetensors.numpy import save_file

__all__ = ["image", "node", "video", "with_hook_lora", "with_lora", "write"]

image = functools.partial(tiny_models.image, nodes="Test")
video = functools.partial(tiny_models.video, nodes="Test")


def lora(width=128, rank=4, seed=5):
    """A LoRA of one matrix of that Wan."""
    w = tiny_models.Weights(seed, scale=0.5)
    w.add("diffusion_model.blocks.0.self_attn.q.lora_up.weight", width, rank)
    w.add("diffusion_model.blocks.0.self_attn.q.lora_down.weight", rank, width)
    return w.found


def write(folder):
    """A models folder of ComfyUI: image.safetensors, video.safetensors, lora.safetensors, and taef1."""
    tiny_models.write(folder)
    (folder / "loras").mkdir(exist_ok=True)
    save_file(lora(), folder / "loras" / "lora.safetensors")


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
