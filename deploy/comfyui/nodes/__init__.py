"""Nodes of the quick start: an embedding without a text encoder, frames as pictures, a word to edit, and a prompt that waits."""

import os
import time

import comfy.model_management
import torch

WORD = "first"  # the quick start edits its copy of this line


class TinyConditioning:
    RETURN_TYPES, FUNCTION, CATEGORY = ("CONDITIONING",), "run", "resvisor"

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"width": ("INT", {"default": 4096})}}

    def run(self, width):
        values = torch.linspace(-1.0, 1.0, 2 * width).reshape(1, 2, width)
        return ([[values, {}]],)


class TinyFrames:
    """Frames of a video as a batch of pictures."""

    RETURN_TYPES, FUNCTION, CATEGORY = ("LATENT",), "run", "resvisor"

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"samples": ("LATENT",)}}

    def run(self, samples):
        found = samples["samples"]
        return ({"samples": found.movedim(2, 1).reshape(-1, found.shape[1], *found.shape[3:])},)


class TinyWord:
    """Gives WORD as a text of the prompt."""

    RETURN_TYPES, FUNCTION, CATEGORY, OUTPUT_NODE = (), "run", "resvisor", True

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {}}

    @classmethod
    def IS_CHANGED(cls):
        return float("nan")

    def run(self):
        return {"ui": {"text": [WORD]}}


class TinyWait:
    """Makes a file, and waits until it is interrupted."""

    RETURN_TYPES, FUNCTION, CATEGORY, OUTPUT_NODE = (), "run", "resvisor", True

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"mark": ("STRING", {"default": ""})}}

    def run(self, mark):
        os.close(os.open(mark, os.O_CREAT | os.O_WRONLY, 0o644))
        while True:
            comfy.model_management.throw_exception_if_processing_interrupted()
            time.sleep(0.01)


NODE_CLASS_MAPPINGS = {found.__name__: found for found in (TinyConditioning, TinyFrames, TinyWord, TinyWait)}
