"""Nodes for the tests: an embedding without a text encoder, and nodes that misbehave."""

import os
import sys
import time

import comfy.model_management
import torch
from server import PromptServer


class TestConditioning:
    RETURN_TYPES, FUNCTION, CATEGORY = ("CONDITIONING",), "run", "test"

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"width": ("INT", {"default": 4096})}}

    def run(self, width):
        values = torch.linspace(-1.0, 1.0, 2 * width).reshape(1, 2, width)
        return ([[values, {}]],)


class TestFrames:
    """Frames of a video as a batch of pictures."""

    RETURN_TYPES, FUNCTION, CATEGORY = ("LATENT",), "run", "test"

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"samples": ("LATENT",)}}

    def run(self, samples):
        found = samples["samples"]
        return ({"samples": found.movedim(2, 1).reshape(-1, found.shape[1], *found.shape[3:])},)


class _Output:
    RETURN_TYPES, FUNCTION, CATEGORY, OUTPUT_NODE = (), "run", "test", True

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"mark": ("STRING", {"default": ""})}}

    @classmethod
    def IS_CHANGED(cls, **inputs):
        return float("nan")


class TestExit(_Output):
    def run(self, mark):
        sys.exit(3)


class TestKill(_Output):
    """Dies the first time, by a mark in a file, and works the second time."""

    def run(self, mark):
        try:
            os.close(os.open(mark, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return {"ui": {"text": ["alive"]}}
        os.kill(os.getpid(), 9)


class TestWait(_Output):
    """Waits until it is interrupted; a file shows that it has begun."""

    def run(self, mark):
        os.close(os.open(mark, os.O_CREAT))
        while True:
            comfy.model_management.throw_exception_if_processing_interrupted()
            time.sleep(0.01)


class TestTouch(_Output):
    """Makes a file."""

    def run(self, mark):
        os.close(os.open(mark, os.O_CREAT))
        return {"ui": {"text": ["there"]}}


class TestPause(_Output):
    """Takes 3 s if the file is there."""

    def run(self, mark):
        if os.path.exists(mark):
            time.sleep(3)
        return {"ui": {"text": ["done"]}}


class TestMany(_Output):
    """More texts than a job may have outputs."""

    def run(self, mark):
        return {"ui": {"text": [f"{mark}{i}" for i in range(12)]}}


class TestRaise(_Output):
    def run(self, mark):
        raise ValueError(f"this node says {mark}")


class TestSize(_Output):
    """How large ComfyUI thinks that a model is, and how large it is."""

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"model": ("MODEL",)}}

    def run(self, model):
        whole = sum(value.nelement() * value.element_size() for value in model.model.state_dict().values())
        return {"ui": {"text": [f"{model.model_size()} {whole}"]}}


class TestTwin(_Output):
    """Another pack defines it too."""


NODE_CLASS_MAPPINGS = {
    found.__name__: found
    for found in (
        TestConditioning, TestFrames, TestExit, TestKill, TestWait, TestTouch, TestPause, TestMany, TestRaise, TestSize, TestTwin
    )
}  # fmt: skip


def _rename(body):
    """What packs do with prompts that come."""
    for node in body.get("prompt", {}).values():
        if isinstance(node, dict) and node.get("class_type") == "TestOldName":
            node["class_type"] = "TestMany"
    return body


PromptServer.instance.add_on_prompt_handler(_rename)
