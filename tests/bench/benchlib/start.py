"""How the programs of tests/bench start: a build with the benchmark programs, and the rows in a Python that has what they need."""

import argparse
import os
import pathlib
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parents[1]
ROOT = HERE.parents[1]


def quiet(*command):
    """Runs a command whose output matters only when it fails."""
    result = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    if result.returncode != 0:
        sys.exit(f"bench: {' '.join(map(str, command))} ended with {result.returncode}\n{result.stdout[-4000:]}{result.stderr[-4000:]}")


def build():
    """The release build with the benchmark programs; its folder."""
    if "RESVISOR_BUILD" in os.environ:
        return pathlib.Path(os.environ["RESVISOR_BUILD"]).resolve()
    folder = ROOT / "build" / "bench"
    quiet("cmake", "-G", "Ninja", "-S", ROOT, "-B", folder, "-DCMAKE_BUILD_TYPE=Release", "-DRESVISOR_BENCH=ON")
    quiet("cmake", "--build", folder, "--target", "bench")
    return folder


def parser(text, rows):
    """The options that the rows know, for --help and for mistakes."""
    made = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--quick", action="store_true", help="small models, few rounds")
    made.add_argument("--only", action="append", choices=rows, metavar="NAME", help=f"one of {', '.join(rows)}")
    made.add_argument("--json", metavar="FILE", help="also write conditions and rows there")
    made.add_argument("--markdown", action="store_true", help="also write the table into docs/performance.md")
    made.add_argument("--work", metavar="DIR", default=str(ROOT / "build" / "bench-work"),
                      help="where models are made, on a real disk (default build/bench-work; emptied at the end)")  # fmt: skip
    return made


def run_rows(program, python):
    """Goes on as the rows of this program, in that Python."""
    environment = {**os.environ, "RESVISOR_BUILD": str(build()), "PYTHONPATH": f"{HERE}:{ROOT / 'tests'}", "PYTHONDONTWRITEBYTECODE": "1"}
    environment.pop("RESVISOR_CONTROL_FD", None)
    os.execve(python, [str(python), "-m", "benchlib.main", program, *sys.argv[1:]], environment)
