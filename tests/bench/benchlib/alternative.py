"""Other ways to load a safetensors file, each in a process of its own: `alternative.py NAME FILE TOUCH_LIBRARY`.

Prints {"ready", "version"}; then, for each line on stdin, loads the file, reads every byte of every tensor, frees all,
and prints {"us", "cpu_s", "bytes", "sum"}. Imports are not part of the figures.
"""

import ctypes
import gc
import importlib.metadata
import json
import os
import pathlib
import resource
import sys
import time


def tensors_load_file(path):
    from safetensors.torch import load_file

    yield from load_file(path).values()


def tensors_fastsafetensors(path):
    from fastsafetensors import SafeTensorsFileLoader, SingleGroup

    loader = SafeTensorsFileLoader(SingleGroup(), "cpu", nogds=True)
    try:
        loader.add_filenames({0: [path]})
        buffer = loader.copy_files_to_device()
        try:
            for name in list(buffer.key_to_rank_lidx):
                yield buffer.get_tensor(name)
        finally:
            buffer.close()
    finally:
        loader.close()


def tensors_tensorizer(path):
    from tensorizer import TensorDeserializer

    with TensorDeserializer(path, device="cpu") as loaded:
        for name in loaded.keys():
            yield loaded[name]


def convert_for_tensorizer(path):
    """tensorizer has a format of its own: the same tensors, written once beside the file."""
    from safetensors.torch import load_file
    from tensorizer import TensorSerializer

    converted = path + ".tensors"
    if not os.path.exists(converted):
        serializer = TensorSerializer(converted)
        serializer.write_state_dict(load_file(path))
        serializer.close()
    return converted


WAYS = {
    "load_file": ("safetensors", tensors_load_file, None),
    "fastsafetensors": ("fastsafetensors", tensors_fastsafetensors, None),
    "tensorizer": ("tensorizer", tensors_tensorizer, convert_for_tensorizer),
}


def cpu_seconds():
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def measure(tensors, path, touch):
    start, cpu = time.perf_counter(), cpu_seconds()
    total = count = 0
    for tensor in tensors(path):
        total += touch(tensor.data_ptr(), tensor.nbytes)
        count += tensor.nbytes
    result = {"us": (time.perf_counter() - start) * 1e6, "cpu_s": cpu_seconds() - cpu, "bytes": count, "sum": total % 2**64}
    del tensor
    gc.collect()
    return result


def main():
    name, path, library = sys.argv[1:4]
    sys.path.remove(str(pathlib.Path(__file__).resolve().parent))  # the programs' names must not hide a package
    touch = ctypes.CDLL(library).bench_touch
    touch.restype, touch.argtypes = ctypes.c_uint64, [ctypes.c_void_p, ctypes.c_uint64]
    import torch  # noqa: F401 - the import is not to be measured

    package, tensors, prepare = WAYS[name]
    __import__(package)
    if prepare:
        path = prepare(path)
    print(json.dumps({"ready": True, "version": importlib.metadata.version(package), "path": path}), flush=True)
    for _ in sys.stdin:
        print(json.dumps(measure(tensors, path, touch)), flush=True)


if __name__ == "__main__":
    main()
