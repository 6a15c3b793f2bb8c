"""torch on pool memory, for tests/gpu/run.sh: bit-equal to torch's own load, and how fast others load the same file.

    compare.py FILE DEVICE        FILE: a model that the running resvisor may read; DEVICE: such as cuda:0, as torch counts

Prints lines NAME<TAB>RESULT<TAB>WHAT; RESULT is ok, failed or skipped.
"""

import json
import struct
import sys
import time

import torch

import resvisor
import resvisor.torch


def say(name, result, text):
    print(f"{name}\t{result}\t{text}", flush=True)


def own_load(path, device):
    """torch's own load, without the pool: by safetensors where it is, else from the file's bytes."""
    try:
        from safetensors.torch import load_file
    except ImportError:
        with open(path, "rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length))
            data = bytearray(file.read())
        names = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "U8": torch.uint8}
        found = {}
        for name, entry in header.items():
            if name != "__metadata__":
                begin, end = entry["data_offsets"]
                part = torch.frombuffer(data, dtype=torch.uint8, count=end - begin, offset=begin)
                found[name] = part.clone().view(names[entry["dtype"]]).reshape(entry["shape"]).to(device)
        return found, "torch.frombuffer"
    return load_file(path, device=str(device)), "safetensors"


def same(ours, theirs):
    return ours.dtype == theirs.dtype and ours.shape == theirs.shape and torch.equal(
        ours.reshape(-1).view(torch.uint8), theirs.reshape(-1).view(torch.uint8)
    )


def main():
    path, device = sys.argv[1], torch.device(sys.argv[2])
    torch.cuda.set_device(device)
    torch.zeros(1, device=device)  # the context is made before anything is timed
    begin = time.monotonic()
    ours = resvisor.torch.load_file(path, device=device)
    torch.cuda.synchronize()
    attach_s = time.monotonic() - begin
    begin = time.monotonic()
    theirs, how = own_load(path, device)
    torch.cuda.synchronize()
    load_s = time.monotonic() - begin
    count = sum(tensor.numel() * tensor.element_size() for tensor in theirs.values())
    say("attach of a resident model by torch", "ok", f"{attach_s * 1000:.1f} ms, {len(ours)} tensors in place")
    say(f"load by {how} to {device}", "ok", f"{count / load_s / 1e9:.2f} GB/s (page cache warm)")
    wrong = [name for name in theirs if name not in ours or not same(ours[name], theirs[name])]
    allocator = torch.cuda.get_allocator_backend()
    text = f"{len(theirs)} tensors, {count / 2**20:.0f} MiB, allocator {allocator}"
    say("torch on pool memory is bit-equal to its own load", "failed" if wrong or len(ours) != len(theirs) else "ok", f"{text} {wrong[:3] or ''}".strip())
    name = max((n for n in theirs if theirs[n].dim() == 2), key=lambda n: theirs[n].numel())
    x = torch.randn(64, theirs[name].shape[1], device=device, dtype=theirs[name].dtype)
    equal = torch.equal(x @ ours[name].T, x @ theirs[name].T)
    say("a matrix product of torch on pool memory is the same", "ok" if equal else "failed", f"{name}, {list(theirs[name].shape)}")
    del ours
    torch.cuda.synchronize()
    say("torch lets go of pool memory", "ok" if resvisor.fallbacks() == {} else "failed", "no fallback to files")


main()
