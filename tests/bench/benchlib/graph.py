"""Row 9: what it takes to decide which type a prompt goes to, on one core, beside reading it by jansson alone."""

import json
import tempfile

from .context import GRAPH_BENCH
from .measure import Row, run_json

BYTES = 7600  # a prompt of middle size among ComfyUI's own templates
GOAL_US = 60  # leaves two thirds of 5,000 requests per second for HTTP
NODES = (
    ("UNETLoader", {"unet_name": "wan2.2_t2v_high_noise_14B_fp8_scaled.safetensors", "weight_dtype": "default"}),
    ("CLIPLoader", {"clip_name": "umt5_xxl_fp8_e4m3fn_scaled.safetensors", "type": "wan", "device": "default"}),
    ("VAELoader", {"vae_name": "wan_2.1_vae.safetensors"}),
    ("CLIPTextEncode", {"text": 'a fox at dawn, soft light,\nétude, "fine" details, 4k, shallow focus, fog', "clip": ["2", 0]}),
    ("ModelSamplingSD3", {"shift": 8.000000000000002, "model": ["1", 0]}),
    ("EmptyHunyuanLatentVideo", {"width": 640, "height": 640, "length": 81, "batch_size": 1}),
    ("KSamplerAdvanced", {
        "add_noise": "enable", "noise_seed": 392459563371087, "steps": 20, "cfg": 3.5, "sampler_name": "euler",
        "scheduler": "simple", "start_at_step": 0, "end_at_step": 10, "return_with_leftover_noise": "enable",
        "model": ["5", 0], "positive": ["4", 0], "negative": ["4", 0], "latent_image": ["6", 0],
    }),
    ("VAEDecode", {"samples": ["7", 0], "vae": ["3", 0]}),
    ("CreateVideo", {"fps": 16, "images": ["8", 0]}),
    ("SaveVideo", {"filename_prefix": "video/ComfyUI", "format": "auto", "codec": "auto", "video": ["9", 0]}),
)  # fmt: skip


def prompt():
    graph, body = {}, ""
    while len(body) < BYTES:
        kind, inputs = NODES[len(graph) % len(NODES)]
        graph[str(len(graph) + 1)] = {"inputs": inputs, "class_type": kind, "_meta": {"title": f"{kind} {len(graph)}"}}
        body = json.dumps({"client_id": "1c0a8e2c6f3d4a3f9a51c0a8e2c6f3d4", "prompt": graph, "extra_data": {}})
    return body


def graph(context):
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        file.write(prompt())
        file.flush()
        found = run_json([GRAPH_BENCH, file.name, 1000 if context.quick else 20000])
    size = f"{found['bytes'] / 1000:.1f} kB"
    parts = f"reading the JSON {found['json']['p50']:.1f}, with nodes and links {found['parse']['p50']:.1f}, the decision {found['route']['p50']:.1f}"
    return [
        Row("graph", f"which type a prompt of {size} goes to, p50", found["all"]["p50"], "us",
            [("jansson, reading alone", found["jansson"]["p50"])], goal=f"<= {GOAL_US} us", met=found["all"]["p50"] <= GOAL_US,
            note=parts),
    ]  # fmt: skip
