"""Python programs that use the package `resvisor`, as processes of their own: what they leave behind is seen there."""

import json
import os
import re
import subprocess
import sys
import textwrap

from .service import BUILD, ROOT

PACKAGE = BUILD / "lib" / "resvisor" / "python"


def environment(service=None, **extra):
    env = {**(service.env if service else os.environ), "PYTHONPATH": str(PACKAGE), **extra}
    env.pop("RESVISOR_CONTROL_FD", None)
    return env


def run_python(service, code, *arguments, timeout=120, check=True, **extra):
    """Runs `code`; what it prints with print(json.dumps(…)) as its last line comes back, else the CompletedProcess."""
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)], env=environment(service, **extra),
        timeout=timeout, text=True, stdin=subprocess.DEVNULL, capture_output=True,
    )  # fmt: skip
    if not check:
        return result
    assert result.returncode == 0, f"ended with {result.returncode}\n{result.stdout}\n{result.stderr}{service.log() if service else ''}"
    lines = result.stdout.strip().splitlines()
    return json.loads(lines[-1]) if lines else None


def python_programs(module):
    """The short programs of docs/python.md that need torch, or only numpy; the ones that are files are tested as such."""
    text = re.sub(r"<!-- file: \S+ -->\n```\w*\n.*?^```$", "", (ROOT / "docs" / "python.md").read_text(), flags=re.MULTILINE | re.DOTALL)
    programs = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [program for program in programs if ("torch" if "resvisor.torch" in program else "numpy") == module]
