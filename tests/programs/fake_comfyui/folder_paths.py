"""Where the fake has its files."""

import os
import pathlib

from comfy.cli_args import args, base

_FOLDERS = {
    "output": pathlib.Path(args.output_directory or base / "output"),
    "input": pathlib.Path(args.input_directory or base / "input"),
    "temp": pathlib.Path(args.temp_directory) / "temp" if args.temp_directory else base / "temp",
    "user": pathlib.Path(args.user_directory or base / "user"),
}
for folder in _FOLDERS.values():
    folder.mkdir(parents=True, exist_ok=True)


def get_directory_by_type(kind):
    return str(_FOLDERS[kind]) if kind in ("output", "input", "temp") else None


def get_output_directory():
    return str(_FOLDERS["output"])


def get_input_directory():
    return str(_FOLDERS["input"])


def get_temp_directory():
    return str(_FOLDERS["temp"])


def get_user_directory():
    return str(_FOLDERS["user"])


def new_file(kind, prefix, suffix):
    """(path, name, subfolder) of a file that is not there yet, as ComfyUI numbers them."""
    subfolder, _, stem = prefix.rpartition("/")
    folder = os.path.join(get_directory_by_type(kind), subfolder)
    os.makedirs(folder, exist_ok=True)
    number = 1
    while os.path.exists(os.path.join(folder, f"{stem}_{number:05}_{suffix}")):
        number += 1
    name = f"{stem}_{number:05}_{suffix}"
    return os.path.join(folder, name), name, subfolder
