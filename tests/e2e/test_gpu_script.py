"""tests/gpu/run.sh on the double of the driver: everything that needs no kernel is done, and the rest is skipped with its reason."""

import os
import subprocess

import pytest
from harness.service import BUILD, ROOT

pytestmark = [pytest.mark.devices, pytest.mark.slow]
LIMIT_S = 300


@pytest.fixture
def folder(tmp_path):
    """As tests/gpu/build.sh makes it, of this build's programs."""
    made = tmp_path / "gpu"
    (made / "bin").mkdir(parents=True)
    helpers = ("gpu-memory", "gpu-client", "gpu-picture", "probe.so")
    for path in [*(BUILD / "bin").iterdir(), *(BUILD / "tests" / name for name in helpers)]:
        (made / "bin" / path.name).symlink_to(path)
    for name in ("libexec", "lib"):
        (made / name).symlink_to(BUILD / name)
    for name in ("run.sh", "compare.py"):
        (made / name).symlink_to(ROOT / "tests" / "gpu" / name)
    return made


def run(folder, env, *arguments):
    env = {**os.environ, **env, "TMPDIR": str(folder)}
    for name in ("RESVISOR_RUNTIME_DIR", "RESVISOR_CONFIG"):
        env.pop(name, None)
    command = ["sh", folder / "run.sh", "--model", "64MiB", "--workers", "3", *arguments]
    return subprocess.run(command, env=env, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=LIMIT_S)


def table(result):
    lines = result.stdout[result.stdout.index("\nROW ") :].strip().splitlines()[1:]
    rows = [[cell.strip() for cell in line.split(" | ")] for line in lines if " | " in line]
    return {row[0]: (row[2], row[3]) for row in rows}


def test_all_that_needs_no_kernel_passes(folder, make_devices):
    result = run(folder, make_devices(memory="1GiB", keys={"context": "32MiB"}).env)
    assert result.returncode == 0, result.stdout + result.stderr
    rows = table(result)
    for name in (
        "VMM memory after kill -9 of its maker", "the driver's memset through a read-only mapping", "load of 64MiB to the device from the disk",
        "a client's memory after kill -9 of loader and supervisor", "kill -9 of the holder of a device with cuda-ipc",
        "3 workers on one model: the device's memory", "kill -9 of a worker",
    ):  # fmt: skip
        assert rows[name][1] == "ok", (name, rows[name])
    assert rows["a picture by kernels on pool memory"][1] == "skipped: the double of the driver runs no kernels"
    assert not list(folder.glob("resvisor-gpu.*"))


def test_a_device_without_vmm_skips_what_it_cannot(folder, make_devices):
    result = run(folder, make_devices(kind="no-vmm", memory="512MiB").env)
    assert result.returncode == 0, result.stdout + result.stderr
    rows = table(result)
    assert rows["VMM memory after kill -9 of its maker"][1].startswith("skipped: ") and rows["kill -9 of a worker"][1] == "ok"


def test_one_failing_row_does_not_end_the_others(folder, make_devices):
    devices = make_devices(memory="1GiB")
    devices.fault("cuMemsetD8Async", nth="1+", error=700, program="gpu-memory")
    result = run(folder, devices.env)
    assert result.returncode == 1, result.stdout + result.stderr
    rows = table(result)
    assert rows["VMM memory after kill -9 of its maker"][1] == "failed" and rows["kill -9 of a worker"][1] == "ok"


def test_without_a_device_it_says_so(folder, make_devices):
    result = run(folder, make_devices(only=["devices none"]).env)
    assert result.returncode == 77 and "no device 0" in result.stderr
