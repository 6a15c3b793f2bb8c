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


def set_output_directory(folder):
    _FOLDERS["output"] = pathlib.Path(folder)


def get_save_image_path(filename_prefix, output_dir, image_width=0, image_height=0):
    """As ComfyUI numbers them: one more than what is there. The launcher replaces it."""
    subfolder, _, stem = filename_prefix.rpartition("/")
    folder = os.path.join(output_dir, subfolder)
    os.makedirs(folder, exist_ok=True)
    numbers = [name.removeprefix(f"{stem}_")[:5] for name in os.listdir(folder) if name.startswith(f"{stem}_")]
    return folder, stem, max([int(n) for n in numbers if n.isdigit()], default=0) + 1, subfolder, filename_prefix


def new_file(kind, prefix, suffix):
    """(path, name, subfolder) of a file that is not there yet."""
    folder, stem, number, subfolder, _ = get_save_image_path(prefix, get_directory_by_type(kind))
    name = f"{stem}_{number:05}_{suffix}"
    return os.path.join(folder, name), name, subfolder
