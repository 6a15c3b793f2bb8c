#!/usr/bin/env python3
"""The style rules that a program can check: sizes of files and functions, marks of unfinished work, headers that stand alone.

    tests/style.py [ROOT] [--include DIR …]    prints each breach as FILE:LINE: what; exit code 1 if there is any
"""

import argparse
import pathlib
import re
import subprocess
import sys

FILE_LINES_MAX = 900
FUNCTION_LINES_MAX = 120
SHORT_FUNCTION_LINES = 45
SHORT_SHARE_WANTED = 0.9
TEXT_SUFFIXES = {".c", ".h", ".py", ".sh", ".proto", ".txt", ".yaml", ".md", ".cmake", ".json"}
UNFINISHED = re.compile(r"\b(TO" r"DO|FIX" r"ME|X" r"XX)\b|\bnot implemented\b", re.IGNORECASE)
WITHOUT_CUDA = re.compile(r"fatal error: '?cuda(Typedefs)?\.h'?[ :]")  # the driver's headers are not on this machine
PLACES = re.compile(r"/wo" r"rk/(main|shared|brief)|\bpip\.conf\b")


def tracked(root):
    """Files of the project: what git knows, or all outside build/ where there is no git."""
    try:
        names = subprocess.run(
            ["git", "-C", str(root), "ls-files", "-z"], check=True, capture_output=True, text=True
        ).stdout.split("\0")
        files = [root / name for name in names if name]
    except (OSError, subprocess.CalledProcessError):
        files = [path for path in root.rglob("*") if path.is_file() and "build" not in path.relative_to(root).parts]
    return sorted(path for path in files if path.is_file() and not path.is_symlink())


def functions(lines):
    """(first line, length) of each C function: from a line that starts in column 0 and opens a body to its `}`."""
    start = None
    for number, line in enumerate(lines, 1):
        if line.startswith("{") and start is None:
            start = number
        elif line.startswith("}") and start is not None:
            yield start, number - start + 1
            start = None


def check_file(path, name, breaches, lengths):
    text = path.read_text(errors="replace")
    lines = text.splitlines()
    if len(lines) > FILE_LINES_MAX:
        breaches.append(f"{name}:1: {len(lines)} lines; at most {FILE_LINES_MAX}")
    for number, line in enumerate(lines, 1):
        if UNFINISHED.search(line) and path.suffix != ".md":
            breaches.append(f"{name}:{number}: mark of unfinished work: {line.strip()}")
        if PLACES.search(line):
            breaches.append(f"{name}:{number}: names a place of one machine: {line.strip()}")
        if path.suffix in (".c", ".h", ".py", ".sh") and line != line.rstrip():
            breaches.append(f"{name}:{number}: blanks at the end of the line")
    if text and not text.endswith("\n"):
        breaches.append(f"{name}:{len(lines)}: no newline at the end")
    if path.suffix == ".c":
        for number, length in functions(lines):
            lengths.append(length)
            if length > FUNCTION_LINES_MAX:
                breaches.append(f"{name}:{number}: function of {length} lines; at most {FUNCTION_LINES_MAX}")


def first_error(text):
    return next((line for line in text.splitlines() if "error:" in line), text[:200])


def check_headers(root, headers, includes, breaches):
    """Each header compiles alone, twice included."""
    flags = ["-std=c17", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Werror", "-fsyntax-only", "-x", "c", "-"]
    for header in headers:
        folders = [header.parent, *includes]
        result = subprocess.run(
            ["gcc", *(f"-I{folder}" for folder in folders), *flags],
            input=f'#include "{header}"\n#include "{header}"\n', capture_output=True, text=True,
        )  # fmt: skip
        if result.returncode != 0 and not WITHOUT_CUDA.search(result.stderr):
            breaches.append(f"{header.relative_to(root)}:1: does not compile alone: {first_error(result.stderr)}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", nargs="?", default=pathlib.Path(__file__).resolve().parents[1], type=pathlib.Path)
    parser.add_argument("--include", action="append", default=[], help="a folder of generated headers")
    options = parser.parse_args()
    root = options.root.resolve()
    breaches, lengths = [], []
    files = tracked(root)
    for path in files:
        name = path.relative_to(root)
        if path.suffix in TEXT_SUFFIXES or path.name in ("CMakeLists.txt", "run"):
            check_file(path, name, breaches, lengths)
    includes = [root / "common", root / "common" / "cuda", root / "supervisor", root / "worker" / "include", *options.include]
    headers = [path for path in files if path.suffix == ".h"]
    if options.include:
        check_headers(root, headers, includes, breaches)
    short = sum(length <= SHORT_FUNCTION_LINES for length in lengths)
    if lengths and short / len(lengths) < SHORT_SHARE_WANTED:
        breaches.append(f".:1: {short} of {len(lengths)} functions are at most {SHORT_FUNCTION_LINES} lines; nine of ten are wanted")
    for breach in breaches:
        print(breach)
    print(f"style: {len(files)} files, {len(lengths)} functions, {len(headers)} headers, {len(breaches)} breaches")
    return 1 if breaches else 0


if __name__ == "__main__":
    sys.exit(main())
