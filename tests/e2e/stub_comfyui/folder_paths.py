"""The one function of ComfyUI's that gets a prefix, and what it needs."""

import os


def get_output_directory():
    return os.environ.get("STUB_OUTPUT", "/nonexistent")


def get_save_image_path(filename_prefix, output_dir, image_width=0, image_height=0):
    return os.path.join(output_dir, os.path.dirname(filename_prefix)), os.path.basename(filename_prefix), 1, "", filename_prefix
