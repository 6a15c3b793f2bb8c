#!/usr/bin/env python3
"""The headers of CUDA Toolkits, so that the CUDA code is built and checked on machines that have none.

    tests/cuda_headers.py get FOLDER           puts cuda.h and cudaTypedefs.h of each version below into FOLDER/VERSION/, from
                                               PyPI's wheels of the runtime; what is there is kept. FOLDER/build is a link
                                               to those that tests/run.sh builds with
    tests/cuda_headers.py check FOLDER TREE    compiles every source of the build tree TREE that uses these headers anew with
                                               each version, by each compiler that is there; nothing is written
"""

import importlib.util
import json
import os
import pathlib
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile

# Of each Toolkit: its CUDA_VERSION, package and version. The oldest that is supported, some between, the newest.
WHEELS = {
    "12.0": (12000, "nvidia-cuda-runtime-cu12", "12.0.146"),
    "12.4": (12040, "nvidia-cuda-runtime-cu12", "12.4.127"),
    "12.8": (12080, "nvidia-cuda-runtime-cu12", "12.8.90"),
    "12.9": (12090, "nvidia-cuda-runtime-cu12", "12.9.79"),
    "13.0": (13000, "nvidia-cuda-runtime", "13.0.96"),
    "13.5": (13050, "nvidia-cuda-runtime", "13.5.37"),
}
BUILD_WITH = "13.0"
HEADERS = ("cuda.h", "cudaTypedefs.h")
PLATFORM = "manylinux2014_x86_64"  # the headers are the same for every machine
TRIES = 3
COMPILERS = ("gcc", "clang")


def stamp(package, version):
    return f"{package}=={version}\n"


def is_there(folder, package, version):
    done = folder / "version.txt"
    return done.is_file() and done.read_text() == stamp(package, version)


def download(package, version, folder):
    command = [
        sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--no-deps", "--only-binary", ":all:",
        "--platform", PLATFORM, "-d", str(folder), f"{package}=={version}",
    ]  # fmt: skip
    for left in reversed(range(TRIES)):
        result = subprocess.run(command)
        if result.returncode == 0:
            return next(folder.glob("*.whl"))
        if left == 0:
            raise SystemExit(f"cuda_headers: cannot download {package}=={version}")
    return None


def get_one(folder, number, package, version):
    """Made in a folder beside and renamed, so that a broken download leaves nothing that looks finished."""
    with tempfile.TemporaryDirectory(dir=folder.parent) as place:
        work = pathlib.Path(place)
        wheel = download(package, version, work)
        new = work / "new"
        new.mkdir()
        with zipfile.ZipFile(wheel) as archive:
            for header in HEADERS:
                (name,) = [name for name in archive.namelist() if name.endswith(f"/include/{header}")]
                (new / header).write_bytes(archive.read(name))
        if f"#define CUDA_VERSION {number}\n" not in (new / "cuda.h").read_text():
            raise SystemExit(f"cuda_headers: cuda.h of {package}=={version} is not of version {number}")
        (new / "version.txt").write_text(stamp(package, version))
        shutil.rmtree(folder, ignore_errors=True)
        new.rename(folder)


def get(folder):
    if not importlib.util.find_spec("pip"):
        raise SystemExit(
            f"cuda_headers: {sys.executable} has no pip, which downloads them. Use the Python of a virtual environment:\n"
            "python3 -m venv FOLDER && FOLDER/bin/python tests/cuda_headers.py get …"
        )
    folder.mkdir(parents=True, exist_ok=True)
    for toolkit, (number, package, version) in WHEELS.items():
        if not is_there(folder / toolkit, package, version):
            get_one(folder / toolkit, number, package, version)
        print(f"{toolkit}: {package}=={version}")
    link = folder / "build"
    if not link.is_symlink() or os.readlink(link) != BUILD_WITH:
        link.unlink(missing_ok=True)
        link.symlink_to(BUILD_WITH)


def cuda_sources(tree):
    """(source, its command with the headers' folder left out) of each source that is compiled with the headers.

    What uses the runtime's headers is left out: they are part of whole Toolkits only, and nvcc's own stand beside them.
    """
    folder = None
    for line in (tree / "CMakeCache.txt").read_text().splitlines():
        if line.startswith("RV_CUDA_INCLUDE:"):
            folder = line.partition("=")[2]
    if not folder:
        raise SystemExit(f"cuda_headers: {tree} was built without CUDA")
    for entry in json.loads((tree / "compile_commands.json").read_text()):
        words = shlex.split(entry["command"])
        places = [i for i in range(1, len(words)) if words[i - 1] == "-isystem" and words[i] == folder]
        if places and "#include <cuda_runtime" not in pathlib.Path(entry["file"]).read_text():
            without = [word for i, word in enumerate(words) if i not in places and i + 1 not in places]
            yield entry["file"], entry["directory"], without


def compile_one(compiler, headers, directory, words):
    """Warnings are errors, as in the build. The object goes nowhere."""
    kept, skip = [], False
    for word in words[1:]:
        if skip or word == "-c":
            skip = False
        elif word == "-o":
            skip = True
        else:
            kept.append(word)
    command = [compiler, "-fsyntax-only", "-isystem", str(headers), *kept]
    return subprocess.run(command, cwd=directory, capture_output=True, text=True)


def check(folder, tree):
    sources = list(cuda_sources(tree))
    if not sources:
        raise SystemExit(f"cuda_headers: no source of {tree} is compiled with CUDA's headers")
    compilers = [compiler for compiler in COMPILERS if shutil.which(compiler)]
    failed = 0
    for toolkit in WHEELS:
        headers = (folder / toolkit).resolve()
        begin = time.monotonic()
        for compiler in compilers:
            for source, directory, words in sources:
                result = compile_one(compiler, headers, directory, words)
                if result.returncode != 0:
                    failed += 1
                    print(f"{compiler}, Toolkit {toolkit}, {source}:\n{result.stderr}")
        print(f"Toolkit {toolkit}: {len(sources)} sources with {' and '.join(compilers)}, {time.monotonic() - begin:.1f} s")
    print(f"cuda headers: {failed} failures")
    return 1 if failed else 0


def main():
    arguments = sys.argv[1:]
    if len(arguments) == 2 and arguments[0] == "get":
        return get(pathlib.Path(arguments[1]))
    if len(arguments) == 3 and arguments[0] == "check":
        return check(pathlib.Path(arguments[1]), pathlib.Path(arguments[2]))
    print(__doc__, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
