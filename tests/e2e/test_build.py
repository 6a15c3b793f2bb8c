"""The programs as built and as installed: links, exported names, a moved prefix, the style rules."""

import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

from harness.service import BUILD, ROOT, SANITIZED, run_program

# Direct links of each program: soname patterns that are allowed beside libc.
LIBC = ("libc.so", "libm.so", "libpthread.so", "ld-linux", "libgcc_s", "linux-vdso")
SANITIZERS = ("libasan", "libubsan", "libtsan")
LINKS = {
    "bin/resvisor": ("libevent_core", "libprotobuf-c", "libyaml", "libjansson"),
    "libexec/resvisor/resvisor-router": ("libevent_core", "libprotobuf-c", "libnanomsg", "libxxhash", "libbsd",
                                         "libmicrohttpd", "libjansson", "libcurl", "libwslay", "libnettle"),
    "libexec/resvisor/resvisor-loader": ("libprotobuf-c", "libjansson", "libxxhash", "liburing"),
    "libexec/resvisor/resvisor-device": ("libprotobuf-c",),  # drivers are found when it runs
    "bin/resvisor-worker": ("libresvisor", "libprotobuf-c", "libxxhash"),
    "lib/libresvisor.so.1": ("libprotobuf-c", "libxxhash"),
}
FORBIDDEN_IN_SUPERVISOR = re.compile(r"nanomsg|cuda|curl|microhttpd|wslay|gnutls|openssl|libssl|http", re.IGNORECASE)
# Who finds the driver at run time, by dlopen. Nobody links it.
DRIVER = b"libcuda.so.1"
USE_DRIVER = ("libexec/resvisor/resvisor-loader", "libexec/resvisor/resvisor-device", "lib/libresvisor.so.1")


def cuda_headers():
    """The folder of the driver's headers that the build used, "" = it was built without CUDA."""
    text = (BUILD / "CMakeCache.txt").read_text()
    return re.search(r"^RV_CUDA_INCLUDE:INTERNAL=(.*)$", text, re.MULTILINE).group(1)


def needed(path):
    text = subprocess.run(["readelf", "-d", str(path)], check=True, capture_output=True, text=True).stdout
    return re.findall(r"\(NEEDED\).*\[(.+)\]", text)


@pytest.mark.parametrize("program", LINKS)
def test_a_program_links_what_it_may_and_no_more(program):
    extra = [
        name for name in needed(BUILD / program) if not name.startswith((*LIBC, *SANITIZERS, *LINKS[program]))
    ]  # fmt: skip
    assert extra == []


def test_the_supervisor_reaches_no_nanomsg_cuda_or_http_library_at_all():
    text = subprocess.run(["ldd", str(BUILD / "bin/resvisor")], check=True, capture_output=True, text=True).stdout
    names = [line.split()[0] for line in text.splitlines() if line.strip()]
    assert "not found" not in text
    assert [name for name in names if FORBIDDEN_IN_SUPERVISOR.search(name)] == []


def programs():
    folders = ("bin", "libexec/resvisor", "lib", "lib/resvisor/executors")
    files = [path for folder in folders for path in (BUILD / folder).iterdir() if path.is_file() and not path.is_symlink()]
    return [path for path in files if path.read_bytes()[:4] == b"\x7fELF"]


def test_nothing_links_the_driver_of_a_device():
    found = programs()
    assert len(found) > len(LINKS)
    for path in found:
        assert [name for name in needed(path) if re.search("cuda|nvidia", name)] == [], path


@pytest.mark.parametrize("program", LINKS)
def test_the_driver_is_known_to_those_who_use_it_and_to_nobody_else(program):
    found = DRIVER in (BUILD / program).read_bytes()
    assert found == (program in USE_DRIVER and cuda_headers() != "")


def configure(tmp_path, *options):
    """What CMake says of the driver's headers, without building anything."""
    (tmp_path / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.25)\nproject(detect NONE)\n"
        f'include("{ROOT}/common/cuda/detect.cmake")\nmessage(STATUS "RV_CUDA=${{RV_CUDA}}")\n'
    )
    command = ["cmake", "-G", "Ninja", "-S", str(tmp_path), "-B", str(tmp_path / "build"), *options]
    result = subprocess.run(command, capture_output=True, text=True)
    return result.returncode, " ".join((result.stdout + result.stderr).split())


def make_headers(folder, version):
    folder.mkdir()
    (folder / "cuda.h").write_text(f"#define CUDA_VERSION {version}\n")
    (folder / "cudaTypedefs.h").touch()
    return f"-DRESVISOR_CUDA_INCLUDE={folder}"


def test_the_headers_of_cuda_are_found_or_the_reason_is_said(tmp_path):
    new, old = make_headers(tmp_path / "new", 12000), make_headers(tmp_path / "old", 11080)
    assert configure(tmp_path, new)[1].count("RV_CUDA=ON") == 1
    rc, text = configure(tmp_path, old)
    assert rc != 0 and "CUDA_VERSION '11080', wanted is 12000 or newer" in text
    (tmp_path / "new" / "cudaTypedefs.h").unlink()
    rc, text = configure(tmp_path, new)
    assert rc != 0 and "cudaTypedefs.h not found" in text
    assert "RV_CUDA=OFF" in configure(tmp_path, "-DRESVISOR_CUDA=OFF")[1]
    rc, text = configure(tmp_path, "-DRESVISOR_CUDA=maybe")
    assert rc != 0 and "allowed are AUTO, ON and OFF" in text


@pytest.mark.parametrize("library", ["nanomsg", "microhttpd", "curl", "wslay"])
def test_what_reads_strangers_bytes_is_in_the_router_only(library):
    programs = [path for path in (BUILD / "bin").iterdir()] + [path for path in (BUILD / "libexec/resvisor").iterdir()]
    assert [path.name for path in programs if any(library in name for name in needed(path))] == ["resvisor-router"]


# Of worker/lib/capsule.c, for the Python package of the same version; in no header.
FOR_PYTHON = {"rv_capsule_setup", "rv_capsule_drop", "rv_capsule_end"}


def test_libresvisor_exports_its_header_and_nothing_else():
    text = subprocess.run(
        ["nm", "-D", "--defined-only", str(BUILD / "lib/libresvisor.so.1")], check=True, capture_output=True, text=True
    ).stdout
    exported = {line.split()[-1].split("@")[0] for line in text.splitlines() if line.split()[1] in "TDBR"}
    header = (ROOT / "worker/include/resvisor.h").read_text()
    declared = set(re.findall(r"\b(rv_[a-z0-9_]+)\(", "".join(re.findall(r"RV_API[^;]*;", header)))) | FOR_PYTHON
    assert declared <= exported
    assert {name for name in exported - declared if not name.startswith(("__asan", "__odr_asan", "__ubsan"))} == set()


def test_style():
    result = subprocess.run(
        [sys.executable, str(ROOT / "tests/style.py"), str(ROOT), "--include", str(BUILD / "proto"),
         *(["--include", cuda_headers()] if cuda_headers() else [])],
        capture_output=True, text=True,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout


def test_scripts_are_executable_and_parse():
    for name in ("deploy/install-dependencies.sh", "deploy/quickstart.sh", "tests/run.sh", "tests/fuzz/run.sh", ".ci/run"):
        path = ROOT / name
        assert os.access(path, os.X_OK), name
        shell = "bash" if path.read_text().startswith("#!/usr/bin/env bash") else "sh"
        assert subprocess.run([shell, "-n", str(path)]).returncode == 0, name


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """An installation that was moved after it was made, into a folder with a blank in its name."""
    folder = tmp_path_factory.mktemp("installed")
    subprocess.run(
        ["cmake", "--install", str(BUILD), "--prefix", str(folder / "first")], check=True, stdout=subprocess.DEVNULL
    )
    moved = folder / "second place"
    shutil.move(folder / "first", moved)
    return moved


def test_an_installation_has_its_parts(installed):
    for name in (
        "bin/resvisor", "libexec/resvisor/resvisor-router", "libexec/resvisor/resvisor-loader",
        "libexec/resvisor/resvisor-device",
        "bin/resvisor-worker", "lib/libresvisor.so.1", "include/resvisor.h", "include/resvisor-executor.h",
        "lib/pkgconfig/resvisor.pc", "share/resvisor/rpc.proto", "share/resvisor/openapi.yaml",
    ):  # fmt: skip
        assert (installed / name).exists(), name
    for kind in ("image", "video", "audio"):
        assert list((installed / "lib/resvisor/executors").glob(f"*{kind}*.so")), kind


def test_a_moved_installation_runs(installed, make_three):
    service = make_three()
    service.program = installed / "bin" / "resvisor"
    service.start()
    service.wait_ready()
    text = pathlib.Path(f"/proc/{service.worker('image').pid}/maps").read_text()
    assert str(installed) in text
    assert str(BUILD) not in text
    service.cli("submit", "image", "--wait", "--out", service.folder / "image.png")
    assert (service.folder / "image.png").stat().st_size > 0


@pytest.mark.skipif(SANITIZED, reason="a client would need the sanitizer's runtime first")
def test_a_client_builds_against_the_installed_header(installed, bare, tmp_path):
    source = tmp_path / "client.c"
    source.write_text(
        '#include <resvisor.h>\n#include <stdio.h>\nint main(void)\n{\n'
        "    struct rv_connection *connection;\n    struct rv_failure err = {0};\n"
        "    if (rv_connect(NULL, 5000, &connection, &err) < 0) {\n        puts(err.message);\n        return 1;\n    }\n"
        '    rv_disconnect(connection);\n    puts("connected");\n    return 0;\n}\n'
    )
    env = {**os.environ, "PKG_CONFIG_PATH": str(installed / "lib/pkgconfig")}
    flags = subprocess.run(
        ["pkg-config", "--define-prefix", "--cflags", "--libs", "resvisor"], env=env, check=True, capture_output=True, text=True
    ).stdout  # fmt: skip
    lib, include = installed / "lib", installed / "include"
    assert "-lresvisor" in flags
    program = tmp_path / "client"
    subprocess.run(
        ["gcc", "-std=c17", "-Wall", "-Werror", f"-I{include}", str(source), "-o", str(program), f"-L{lib}", "-lresvisor",
         f"-Wl,-rpath,{lib}"],
        check=True,
    )  # fmt: skip
    result = run_program(program=program, env=bare.env)
    assert result.stdout == "connected\n"


def test_version_is_the_one_of_the_build():
    text = (ROOT / "CMakeLists.txt").read_text()
    version = re.search(r"project\(resvisor VERSION ([0-9.]+)", text).group(1)
    assert version in run_program("version").stdout
