"""The documents are true: what they name exists, what they show is the file, and the programs in them build and run."""

import json
import os
import pathlib
import re
import subprocess
import sys

import pytest
from harness import models
from harness.protos import rpc_pb2
from harness.service import BUILD, ROOT, SANITIZED, run_program

DOCS = sorted([ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").glob("*.md")])
WRITTEN_BY_HAND = [path for path in DOCS if path.name not in ("configuration.md", "errors.md")]
FOLDERS = "supervisor|worker|proto|common|tests|deploy|docs"
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`([^`\n]+)`")
INCLUDED = re.compile(r"<!-- file: (\S+) -->\n```\w*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FORBIDDEN = re.compile(
    r"/wo" r"rk/|/root/|/home/\w|/tmp/d-|pypi\.|files\.pythonhosted|deb\.debian|proxy\.golang"
    r"|\bA" r"I\b|\bLL" r"M\b|artificial intelligence|language model|\bassistant\b"
)  # fmt: skip

each_document = pytest.mark.parametrize("path", DOCS, ids=lambda path: path.name)
each_written = pytest.mark.parametrize("path", WRITTEN_BY_HAND, ids=lambda path: path.name)
needs_plain_build = pytest.mark.skipif(SANITIZED, reason="a client would need the sanitizer's runtime first")


def prose(path):
    """The text without fenced blocks."""
    return FENCE.sub("", path.read_text())


def commands():
    """name -> help text of every command."""
    text = run_program("help").stdout.split("Commands:\n", 1)[1].split("\n\n", 1)[0]
    names = [line.split()[0] for line in text.splitlines()]
    return {name: run_program("help", name).stdout for name in names}


def shell_lines(path):
    """The lines of fenced blocks that are typed, not printed: all of a script, and those after `$ ` in a session."""
    for _, block in FENCE.findall(path.read_text()):
        lines = block.splitlines()
        typed = [line for line in lines if line.startswith("$ ")]
        yield from (line.removeprefix("$ ") for line in typed or lines)


def anchor(heading):
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


# ---- what is named exists ----


@each_document
def test_links_resolve(path):
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(path)):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, fragment = target.partition("#")
        linked = (path.parent / name).resolve() if name else path
        if not linked.exists():
            broken.append(target)
        elif fragment and fragment not in [anchor(h) for h in re.findall(r"^#+ (.*)$", linked.read_text(), re.MULTILINE)]:
            broken.append(target)
    assert broken == []


@each_document
def test_named_files_exist(path):
    named = re.findall(rf"(?<![\w/.-])((?:{FOLDERS})/[\w./*-]*[\w/*])", path.read_text())
    named += re.findall(rf"\b(?:sh|source) ((?:{FOLDERS})/[\w./-]+)", path.read_text())
    missing = [name for name in set(named) if not (ROOT / name).exists() and not list(ROOT.glob(name))]
    assert missing == []


@each_written
def test_named_commands_and_options_exist(path):
    known = commands()
    wrong = []
    for text in [*CODE.findall(prose(path)), *shell_lines(path)]:
        match = re.match(r"resvisor ([a-z][a-z-]*)\b(.*)", text)
        if not match:
            continue
        name, rest = match.groups()
        if name not in known:
            wrong.append(text)
            continue
        for option in re.findall(r"(?<=\s)(--?[a-z][a-z-]*)", rest.split(" # ")[0]):
            if not re.search(rf"(^|\s){re.escape(option)}\b", known[name]):
                wrong.append(f"{text}: {option}")
    assert wrong == []


@each_written
def test_named_keys_exist(path):
    reference = run_program("check", "--reference").stdout
    keys = {key.replace("*", "NAME") for key in re.findall(r"^### `(.+)`$", reference, re.MULTILINE)}
    sections = {key.split(".")[0] for key in keys if "." in key}
    named = set()
    for text in CODE.findall(prose(path)):
        match = re.match(r"([a-z_]+(?:\.[A-Za-z_]+)+)(?:[:=].*)?$", text)
        if match and match.group(1).split(".")[0] in sections and match.group(1).rsplit(".")[-1] not in ("h", "c", "proto"):
            named.add(re.sub(r"^(types|models)\.\w+\.", r"\1.NAME.", match.group(1)))
    assert {name for name in named if name not in keys and not any(key.startswith(name + ".") for key in keys)} == set()


@each_written
def test_named_errors_exist(path):
    named = set(re.findall(r"\bERROR_[A-Z_]+\b", path.read_text()))
    assert named - set(rpc_pb2.ErrorCode.keys()) == set()


@each_document
def test_nothing_speaks_of_one_machine_or_of_its_making(path):
    lines = [line for line in path.read_text().splitlines() if FORBIDDEN.search(line)]
    assert lines == []


def test_every_document_is_in_the_index():
    linked = set(re.findall(r"\]\(([\w-]+\.md)\)", (ROOT / "docs" / "index.md").read_text()))
    assert {path.name for path in (ROOT / "docs").glob("*.md")} - {"index.md"} <= linked


# ---- nothing is left out ----


def test_the_guide_shows_every_command():
    guide = (ROOT / "docs" / "guide.md").read_text()
    missing = [name for name in commands() if not re.search(rf"\bresvisor {name}\b", guide)]
    assert missing == []


def test_rpc_has_every_message_and_field_and_no_other():
    text = (ROOT / "docs" / "rpc.md").read_text().split("\n## Messages\n", 1)[1]
    documented = {}
    for section in re.split(r"^### ", text, flags=re.MULTILINE)[1:]:
        name, _, body = section.partition("\n")
        documented[name.strip()] = re.findall(r"^\| `(\w+)` \|", body, re.MULTILINE)
    real = {
        name: [field.name for field in message.fields] for name, message in rpc_pb2.DESCRIPTOR.message_types_by_name.items()
    }
    assert documented == real


def test_operations_has_every_key_of_the_status(faulty):
    status = faulty.cli_json("status")
    text = (ROOT / "docs" / "operations.md").read_text().split("\n## Watching it\n", 1)[1].split("\n## ", 1)[0]
    rows = {name: set(CODE.findall(keys)) for name, keys in re.findall(r"^\| `?([\w()\[\]]+)`? \| (.*) \|$", text, re.MULTILINE)}
    assert rows["(top)"] == set(status)
    for name in ("supervisor", "router", "pool"):
        assert rows[name] == set(status[name])
    assert rows["types[]"] == set(status["types"][0])
    assert rows["workers[]"] == set(status["types"][0]["workers"][0])
    assert rows["models[]"] == set(status["models"][0])


@pytest.mark.parametrize("enum", ["JobState", "ModelAction"])
def test_rpc_names_every_value(enum):
    text = (ROOT / "docs" / "rpc.md").read_text()
    assert [value for value in getattr(rpc_pb2, enum).keys() if f"`{value}`" not in text] == []


def test_executors_lists_every_fault_and_parameter():
    text = (ROOT / "docs" / "executors.md").read_text()
    folder = ROOT / "worker" / "executors"
    faults = re.findall(r'\[RV_FAULT_\w+\] = \{"([\w-]+)"', (folder / "fault.c").read_text())
    parameters = {name for file in folder.glob("*.[ch]") for name in re.findall(r'RV_PARAM_\w+, "(\w+)"', file.read_text())}
    assert len(faults) > 5 and len(parameters) > 5
    assert [name for name in [*faults, *parameters] if not re.search(rf"`{name}[`:]", text)] == []


# ---- guarantees ----


def test_every_guarantee_names_tests_that_exist():
    text = (ROOT / "docs" / "guarantees.md").read_text().split("## Not promised")[0]
    promises = re.split(r"^\*\*(?=[A-Z]\d+\. )", text, flags=re.MULTILINE)[1:]
    numbers = [re.match(r"([A-Z])(\d+)\.", promise).groups() for promise in promises]
    for letter in {letter for letter, _ in numbers}:
        mine = [int(number) for other, number in numbers if other == letter]
        assert mine == list(range(1, len(mine) + 1)), f"numbers of {letter}"
    for promise in promises:
        proofs = re.findall(r"^- `(tests/\S+)`: (.+)$", promise, re.MULTILINE)
        assert proofs, promise[:60]
        for name, functions in proofs:
            source = (ROOT / name).read_text()
            for function in CODE.findall(functions):
                definition = rf"^def {function}\(" if name.endswith(".py") else rf"\b{function}\(void \*\*|^CASE\({function}\)"
                assert re.search(definition, source, re.MULTILINE), f"{name} has no test {function}"


# ---- programs in the documents ----


@each_written
def test_shown_files_are_the_files(path):
    for name, shown in INCLUDED.findall(path.read_text()):
        assert shown == (ROOT / name).read_text(), f"{name} differs from what {path.name} shows"


def test_every_example_program_is_shown():
    shown = {name for path in DOCS for name, _ in INCLUDED.findall(path.read_text())}
    programs = {str(path.relative_to(ROOT)) for path in (ROOT / "deploy" / "examples").rglob("*.[cp]*") if path.suffix in (".c", ".py")}
    assert programs == shown


def test_the_configuration_of_the_guide_is_good(tmp_path):
    blocks = [block for kind, block in FENCE.findall((ROOT / "docs" / "guide.md").read_text()) if kind == "yaml"]
    assert len(blocks) == 1
    (tmp_path / "models").mkdir()
    for name in ("text-encoder", "image", "video", "spare"):
        models.write_plain(tmp_path / "models" / f"{name}.safetensors", mib=1)
    (tmp_path / "resvisor.yaml").write_text(blocks[0])
    assert "good" in run_program("check", "-c", tmp_path / "resvisor.yaml").stdout


@pytest.fixture(scope="module")
def prefix(tmp_path_factory):
    folder = tmp_path_factory.mktemp("docs") / "prefix"
    subprocess.run(["cmake", "--install", str(BUILD), "--prefix", str(folder)], check=True, stdout=subprocess.DEVNULL)
    return folder


def compile_by_pkg_config(prefix, source, out, *options):
    """The command that the documents give, with all warnings as errors."""
    env = {**os.environ, "PKG_CONFIG_PATH": str(prefix / "lib/pkgconfig")}
    flags = subprocess.run(
        ["pkg-config", "--cflags", "--libs", "resvisor"], env=env, check=True, capture_output=True, text=True
    ).stdout.split()
    subprocess.run(
        ["cc", "-std=c17", "-Wall", "-Wextra", "-Werror", *options, str(source), "-o", str(out), *flags,
         f"-Wl,-rpath,{prefix}/lib"],
        check=True,
    )  # fmt: skip
    return out


@needs_plain_build
@pytest.mark.parametrize("how", ["pkg-config", "cmake"])
def test_the_example_executor_runs(prefix, make_service, tmp_path, how):
    folder = ROOT / "deploy" / "examples" / "executor"
    if how == "cmake":
        env = {**os.environ, "PKG_CONFIG_PATH": str(prefix / "lib/pkgconfig")}
        build = tmp_path / "build"
        subprocess.run(["cmake", "-G", "Ninja", "-S", str(folder), "-B", str(build)], env=env, check=True, stdout=subprocess.DEVNULL)
        subprocess.run(["cmake", "--build", str(build)], check=True, stdout=subprocess.DEVNULL)
        executor = build / "count.so"
    else:
        executor = compile_by_pkg_config(prefix, folder / "count.c", tmp_path / "count.so", "-shared", "-fPIC")
    service = make_service()
    models.write_plain(service.models / "small.safetensors", mib=1)
    service.config["models"] = {"small": "small.safetensors"}
    service.config["types"] = {"count": {"executor": str(executor), "models": ["small"]}}
    service.start()
    out = tmp_path / "count.txt"
    service.cli("submit", "count", "--out", out)
    count = len(json_header(service.models / "small.safetensors"))
    assert out.read_text().startswith(f"small: {count} tensors, ")
    service.cli("submit", "count", "--param", f"to={count - 1}", "--out", out)
    assert out.read_text().startswith(f"small: {count - 1} tensors, ")
    refused = service.cli("submit", "count", "--param", "from=x", "--wait", check=False)
    assert refused.returncode == 5 and "from: a whole number is expected" in refused.stdout + refused.stderr


def json_header(path):
    data = pathlib.Path(path).read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return [name for name in header if name != "__metadata__"]


@needs_plain_build
def test_the_example_client_runs(prefix, bare, tmp_path):
    program = compile_by_pkg_config(prefix, ROOT / "deploy/examples/client/attach.c", tmp_path / "attach")
    path = bare.models / "m.safetensors"
    models.write_plain(path, mib=1)
    first = run_program(path, program=program, env=bare.env).stdout
    assert f"{len(json_header(path))} tensors" in first and " 0 bytes read" not in first
    second = run_program(path, program=program, env=bare.env).stdout
    assert " 0 bytes read" in second
    assert "copied by this process: 4096 bytes" in second and "the pool's own bytes: unchanged" in second
    refused = run_program("nothing", program=program, env=bare.env, check=False)
    assert refused.returncode == 1 and "no model is named" in refused.stderr


def test_the_example_gateway_runs(faulty, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    generate = [sys.executable, "-m", "grpc_tools.protoc", f"-I{ROOT}/proto", f"--python_out={out}", "rpc.proto"]
    subprocess.run(generate, check=True)
    gateway = ROOT / "deploy" / "examples" / "client" / "gateway.py"
    address = f"ipc://{faulty.runtime}/rpc/rpc.ipc"
    env = {**os.environ, "PYTHONPATH": str(out)}

    def run(*arguments):
        return subprocess.run(
            [sys.executable, str(gateway), address, *arguments], env=env, cwd=out, capture_output=True, text=True, timeout=60
        )

    done = run("test", "output_bytes=1000000")
    assert done.returncode == 0, done.stderr
    assert (out / "bytes.bin").stat().st_size == 1_000_000
    failed = run("test", "fault=fail")
    assert failed.returncode == 1 and "ERROR_" in failed.stderr
    unknown = run("nothing")
    assert unknown.returncode == 1 and "ERROR_NO_SUCH_TYPE" in unknown.stderr
