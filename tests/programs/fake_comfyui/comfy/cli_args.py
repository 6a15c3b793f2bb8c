"""The arguments of ComfyUI that the launcher gives, and those that a test may."""

import argparse
import pathlib

parser = argparse.ArgumentParser()
parser.add_argument("--listen", default="127.0.0.1")
parser.add_argument("--port", type=int, default=8188)
parser.add_argument("--base-directory")
parser.add_argument("--output-directory")
parser.add_argument("--temp-directory")
parser.add_argument("--input-directory")
parser.add_argument("--user-directory")
parser.add_argument("--database-url")
args, _ = parser.parse_known_args()

base = pathlib.Path(args.base_directory or pathlib.Path(__file__).resolve().parents[1])
