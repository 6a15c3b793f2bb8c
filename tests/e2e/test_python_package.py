"""The Python package `resvisor` against a running resvisor: values, memory, lifetime, errors, threads, forks."""

import ast
import json
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import textwrap

import pytest
from harness import models, procfs
from harness.protos import rpc_pb2
from harness.python import environment, python_programs, run_python
from harness.service import BUILD, ROOT, SANITIZED

pytestmark = pytest.mark.skipif(SANITIZED, reason="python would need the sanitizer's runtime first")

NUMPY_DTYPES = ("BOOL", "U8", "I8", "U16", "I16", "F16", "U32", "I32", "F32", "U64", "I64", "F64")
SOURCES = ROOT / "worker" / "python"


def write_numpy(path):
    """Every dtype that numpy has, and odd shapes."""
    tensors = [(f"dtype.{name}", name, (3, 5)) for name in NUMPY_DTYPES]
    tensors += [("scalar", "F32", ()), ("empty", "F16", (0, 4)), ("rank8", "U8", (1, 2, 1, 3, 1, 2, 1, 5)), ("großer.名", "I8", (7,))]
    return models.write(path, tensors, metadata={"note": "zwölf"})


@pytest.fixture
def service(make_service):
    made = make_service()
    models.write_plain(made.models / "plain.safetensors", mib=8)
    write_numpy(made.models / "numpy.safetensors")
    models.write_every_dtype(made.models / "every.safetensors")
    made.config["models"] = {"plain": {"path": "plain.safetensors"}, "every": {"path": "every.safetensors"}}
    return made.start()


# ---- the package itself ----


def test_error_codes_are_those_of_the_contract():
    tree = ast.parse((SOURCES / "resvisor" / "_codes.py").read_text())
    found = {
        node.targets[0].id: node.value.value
        for class_ in tree.body if isinstance(class_, ast.ClassDef)
        for node in class_.body if isinstance(node, ast.Assign)
    }  # fmt: skip
    assert found == {name.removeprefix("ERROR_"): number for name, number in rpc_pb2.ErrorCode.items()}


def test_every_function_of_the_header_is_declared_with_as_many_arguments():
    header = re.sub(r"/\*.*?\*/", "", (ROOT / "worker" / "include" / "resvisor.h").read_text(), flags=re.DOTALL)
    wanted = {
        name: 0 if arguments.strip() == "void" else arguments.count(",") + 1
        for name, arguments in re.findall(r"RV_API [\w\s*]*?\b(rv_\w+)\(([^)]*)\);", header)
    }
    found = run_python(None, "import json; from resvisor import _library as l\nprint(json.dumps({k: len(v[1]) for k, v in l._FUNCTIONS.items()}))")
    unused = {"rv_job_param", "rv_dtype_bytes", "rv_disconnect"}
    own = {"rv_capsule_setup", "rv_capsule_drop", "rv_capsule_end"}  # of the package only, in no header
    assert {name: count for name, count in wanted.items() if name not in unused} == {name: found[name] for name in found.keys() - own}


def test_structs_have_the_layout_of_the_header(tmp_path):
    code = """
        import ctypes, json
        from resvisor import _library as l
        named = {"rv_failure": l.Failure, "rv_attach_options": l.AttachOptions, "rv_lease_info": l.LeaseInfo, "rv_tensor": l.RawTensor}
        print(json.dumps({name: [ctypes.sizeof(c), {f: [getattr(c, f).offset, getattr(c, f).size] for f, _ in c._fields_}] for name, c in named.items()}))
    """
    found = run_python(None, code)
    lines = []
    for struct, (_, fields) in found.items():
        lines.append(f'printf("%zu\\n", sizeof(struct {struct}));')
        lines += [f'printf("%zu %zu\\n", offsetof(struct {struct}, {f}), sizeof(((struct {struct} *)0)->{f}));' for f in fields]
    (tmp_path / "layout.c").write_text("#include <resvisor.h>\n#include <stdio.h>\nint main(void) {\n" + "\n".join(lines) + "\n}\n")
    subprocess.run(["cc", f"-I{ROOT}/worker/include", tmp_path / "layout.c", "-o", tmp_path / "layout"], check=True)
    wanted = []
    for size, fields in found.values():
        wanted += [str(size), *(f"{offset} {length}" for offset, length in fields.values())]
    assert subprocess.run([tmp_path / "layout"], check=True, capture_output=True, text=True).stdout.split("\n")[:-1] == wanted


def test_versions_are_equal():
    version = re.search(r"project\(resvisor VERSION ([\d.]+)", (ROOT / "CMakeLists.txt").read_text())[1]
    assert f'version = "{version}"' in (SOURCES / "pyproject.toml").read_text()
    assert run_python(None, "import json, resvisor; print(json.dumps(resvisor.__version__))") == version


def test_wheel_has_no_compiled_part_and_works_by_resvisor_library(tmp_path, service):
    source = tmp_path / "source"
    shutil.copytree(SOURCES, source, ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "-q", "--disable-pip-version-check", "--no-deps", "--no-build-isolation", "-w", tmp_path, source],
        check=True, capture_output=True, timeout=100,
    )  # fmt: skip
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")
    code = "import json, resvisor; print(json.dumps([resvisor.__file__, len(resvisor.connect().attach('plain'))]))"
    where, count = run_python(service, code, PYTHONPATH=str(wheel), RESVISOR_LIBRARY=str(BUILD / "lib" / "libresvisor.so.1"))
    assert str(wheel) in where and count == 8


def test_installation_has_the_package_beside_its_library(tmp_path, service):
    prefix = tmp_path / "prefix"
    subprocess.run(["cmake", "--install", BUILD, "--prefix", prefix], check=True, capture_output=True)
    package = prefix / "lib" / "resvisor" / "python"
    assert sorted(path.name for path in (package / "resvisor").iterdir()) == sorted(
        path.name for path in (SOURCES / "resvisor").iterdir() if path.name != "__pycache__"
    )
    code = """
        import json, resvisor
        lease = resvisor.connect().attach("plain")
        maps = open("/proc/self/maps").read()
        print(json.dumps([line.split()[-1] for line in maps.splitlines() if "libresvisor" in line][0]))
    """
    used = run_python(service, code, PYTHONPATH=str(package))
    assert used.startswith(str(prefix / "lib" / "libresvisor.so"))


def test_missing_library_is_an_import_error_that_says_where_it_was_sought():
    result = run_python(None, "import resvisor; resvisor.connect()", check=False, RESVISOR_LIBRARY="/nowhere/lib.so")
    assert "ImportError" in result.stderr and "/nowhere/lib.so: not there" in result.stderr
    libc = run_python(None, "import resvisor; resvisor.connect()", check=False, RESVISOR_LIBRARY="libc.so.6")
    assert "has no rv_connect" in libc.stderr


# ---- values ----


def test_numpy_load_file_equals_safetensors(service):
    code = """
        import json, sys, numpy, safetensors.numpy, resvisor.numpy
        ours, theirs = resvisor.numpy.load_file(sys.argv[1]), safetensors.numpy.load_file(sys.argv[1])
        assert list(ours) == list(theirs)
        for name in theirs:
            assert ours[name].dtype == theirs[name].dtype and ours[name].shape == theirs[name].shape, name
            assert ours[name].tobytes() == theirs[name].tobytes() and ours[name].flags.writeable, name
        print(json.dumps(len(ours)))
    """
    assert run_python(service, code, service.models / "numpy.safetensors") == 16


def test_numpy_refuses_what_it_has_no_dtype_for(service):
    code = """
        import json, sys, resvisor, resvisor.numpy
        try:
            resvisor.numpy.load_file(sys.argv[1])
        except resvisor.Unsupported as error:
            print(json.dumps([error.code.name, str(error)]))
    """
    code_name, text = run_python(service, code, service.models / "every.safetensors")
    assert code_name == "UNSUPPORTED" and "F8_E4M3" in text and "resvisor.torch" in text


def test_lease_is_a_mapping_with_facts(service):
    code = """
        import json, resvisor
        with resvisor.connect() as connection, connection.attach("every") as lease:
            names = list(lease)
            assert len(lease) == len(names) == len(lease.keys()) and names[0] in lease and "nix" not in lease and 3 not in lease
            assert "dtype.U8" + chr(0) not in lease
            lease.verify()
            scalar = lease["scalar"]
            print(json.dumps({
                "names": names, "generation": lease.generation, "read": lease.read_bytes, "waited": lease.waited,
                "metadata": lease.metadata, "mapping": lease.mapping, "model": lease.model, "load_us": lease.load_us > 0,
                "scalar": [scalar.dtype, scalar.shape, scalar.nbytes, scalar.address % 256, len(scalar.digest)],
                "bytes": {name: lease[name].tobytes().hex() for name in names if name != "large"},
                "shape": lease["rank8"].shape,
            }))
    """
    wanted = models.write_every_dtype(service.folder / "copy.safetensors")
    found = run_python(service, code)
    assert found["names"] == list(wanted)
    assert found["bytes"] == {name: data.hex() for name, data in wanted.items() if name != "large"}
    assert found["generation"] == 1 and found["waited"] and found["read"] > 0 and found["load_us"]
    assert found["mapping"] == "private" and found["model"] == "every"
    assert found["metadata"] == {"format": "pt", "note": "zwölf"}
    assert found["scalar"] == ["F32", [], 4, 0, 32] and found["shape"] == [1, 2, 1, 3, 1, 2, 1, 5]


# ---- memory ----


def test_arrays_lie_in_the_pool_and_writes_stay_private(service):
    code = """
        import json, numpy, resvisor
        connection = resvisor.connect()
        lease, other = connection.attach("plain"), connection.attach("plain", mapping="shared")
        arrays = lease.numpy()
        total = sum(float(a.view(numpy.uint8).sum()) for a in arrays.values())   # every byte is read
        before = lease.copied_bytes()
        inside = all(a.ctypes.data == lease[name].address for name, a in arrays.items())
        arrays["block.0.weight"].view(numpy.uint8)[:] ^= 255
        lease.verify()
        same = bytes(lease["block.0.weight"].memoryview()) != bytes(other["block.0.weight"].memoryview())
        shared = other["block.1.weight"].numpy()
        try:
            shared[0] = 1
            refused = False
        except ValueError:
            refused = True
        print(json.dumps([before, lease.copied_bytes(), inside, same, refused, other["block.1.weight"].memoryview().readonly]))
    """
    before, copied, inside, differs, refused, readonly = run_python(service, code)
    assert before == 0 and 1024 * 1024 <= copied <= 1024 * 1024 + 8192
    assert inside and differs and refused and readonly
    assert service.model("plain").loads == 1


def test_two_processes_share_the_pages(service, tmp_path):
    code = """
        import sys, numpy, resvisor
        arrays = resvisor.connect().attach("plain").numpy()
        sum(int(a.view(numpy.uint8).max()) for a in arrays.values())
        print("touched", flush=True)
        sys.stdin.read()
    """
    processes = [
        subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], env=environment(service), stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        for _ in range(2)
    ]  # fmt: skip
    try:
        for process in processes:
            assert process.stdout.readline() == b"touched\n"
        for process in processes:
            text = pathlib.Path(f"/proc/{process.pid}/smaps").read_text()
            pool = [block for block in re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", text) if "memfd:" in block and "Rss:" in block]
            rss = sum(int(re.search(r"^Rss: +(\d+)", block, re.MULTILINE)[1]) for block in pool)
            pss = sum(int(re.search(r"^Pss: +(\d+)", block, re.MULTILINE)[1]) for block in pool)
            anonymous = sum(int(re.search(r"^Anonymous: +(\d+)", block, re.MULTILINE)[1]) for block in pool)
            assert rss >= 8 * 1024 and pss < 0.6 * rss and anonymous == 0
    finally:
        for process in processes:
            process.communicate(b"")


# ---- lifetime ----


def test_lease_ends_with_the_last_view(service):
    code = """
        import json, sys, resvisor, resvisor.numpy
        def leases():
            return sum("memfd:" in line for line in open("/proc/self/maps")) / 2      # an arena and an index
        counts = []
        with resvisor.connect() as connection:
            with connection.attach("plain") as lease:
                arrays = lease.numpy()
                view = lease["block.0.weight"].memoryview()
        counts.append(leases())
        first = arrays.pop("block.0.weight")[10:20].reshape(2, 5)       # a view of a view
        wanted = first.tobytes()
        arrays.clear(); del arrays, view
        counts.append(leases())
        assert first.tobytes() == wanted
        print("held", flush=True); sys.stdin.readline()
        del first
        counts.append(leases())
        print("gone", flush=True); sys.stdin.readline()
        try:
            lease["block.0.weight"]
        except ValueError as error:
            print(json.dumps([counts, str(error), lease.generation]), flush=True)
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], env=environment(service), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "held\n"
    assert service.model("plain").leases == 1
    process.stdin.write("\n")
    process.stdin.flush()
    assert process.stdout.readline() == "gone\n"
    procfs.wait_until(lambda: service.model("plain").leases == 0, 5, "the lease to end")
    out, _ = process.communicate("\n")
    assert json.loads(out) == [[1, 1, 0], "the lease of plain is closed", 1]


def test_views_survive_the_supervisor_and_the_end_of_the_interpreter(service):
    code = """
        import json, sys, numpy, resvisor
        connection = resvisor.connect()
        lease = connection.attach("plain")
        arrays = lease.numpy()
        wanted = arrays["block.7.weight"].tobytes()
        print("ready", flush=True); sys.stdin.readline()
        assert arrays["block.7.weight"].tobytes() == wanted
        try:
            connection.attach("plain")
        except resvisor.NotRunning as error:
            print(json.dumps([isinstance(error, ConnectionError), error.code.name]), flush=True)
        sys.keep = [arrays, lease, connection]     # outlives the modules
    """
    process = subprocess.Popen(
        [sys.executable, "-X", "faulthandler", "-c", textwrap.dedent(code)], env=environment(service), stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout.readline() == "ready\n"
    service.stop()
    out, _ = process.communicate("\n")
    assert json.loads(out) == [True, "NOT_RUNNING"] and process.returncode == 0


def test_dlpack_capsules_are_numpys_own_and_keep_the_memory(service):
    code = """
        import gc, json, numpy, resvisor
        with resvisor.connect() as connection, connection.attach("plain") as lease:
            array = numpy.from_dlpack(lease["block.3.weight"])
            wanted = lease["block.3.weight"].tobytes()
            device = lease["block.3.weight"].__dlpack_device__()
        gc.collect()
        assert array.tobytes() == wanted
        capsule = array.__dlpack__()
        del array
        held = sum("memfd:" in line for line in open("/proc/self/maps"))
        del capsule
        print(json.dumps([device, held, sum("memfd:" in line for line in open("/proc/self/maps"))]))
    """
    assert run_python(service, code) == [[1, 0], 2, 0]


# ---- errors, progress, time limits ----


def test_errors_are_exceptions_with_codes(service):
    (service.models / "bad.safetensors").write_bytes(models.BAD_FILES["json_list"])
    code = """
        import json, pickle, sys, resvisor
        found = {}
        connection = resvisor.connect()
        def attempt(name, function):
            try:
                function()
            except Exception as error:
                code = error.code.name if isinstance(error, resvisor.Error) else ""
                found[name] = [type(error).__name__, code, [base.__name__ for base in type(error).__mro__], str(error)]
                if code:
                    again = pickle.loads(pickle.dumps(error))
                    assert (type(again), str(again), again.code) == (type(error), str(error), error.code)
        attempt("name", lambda: connection.attach("nix"))
        attempt("path", lambda: connection.attach("/etc/passwd"))
        attempt("bad", lambda: connection.attach(sys.argv[1]))
        attempt("socket", lambda: resvisor.connect("/nowhere/s.sock"))
        attempt("mapping", lambda: connection.attach("plain", mapping="x"))
        attempt("timeout", lambda: connection.attach("plain", timeout=-1))
        attempt("nul", lambda: connection.attach("a" + chr(0)))
        connection.close()
        attempt("closed", lambda: connection.attach("plain"))
        print(json.dumps(found))
    """
    found = run_python(service, code, service.models / "bad.safetensors")
    assert found["name"][:2] == ["NoSuchModel", "NO_SUCH_MODEL"] and "FileNotFoundError" in found["name"][2]
    assert found["path"][:2] == ["NotPermitted", "NOT_PERMITTED"] and "PermissionError" in found["path"][2]
    assert found["bad"][:2] == ["ModelInvalid", "MODEL_INVALID"] and "ValueError" in found["bad"][2]
    assert found["socket"][:2] == ["NotRunning", "NOT_RUNNING"]
    for name in ("mapping", "timeout", "nul", "closed"):
        assert found[name][0] == "ValueError", name


def test_progress_is_called_and_can_give_up(make_service):
    service = make_service()
    models.write_plain(service.models / "large.safetensors", mib=256)
    service.start()
    code = """
        import json, sys, threading, signal, os, resvisor
        path, seen = sys.argv[1], []
        connection = resvisor.connect()
        def give_up(done, total):
            seen.append((done, total))
            return False
        def wrong(done, total):
            raise KeyError("mine")
        ends = []
        for function in (give_up, wrong):
            try:
                connection.attach(path, progress=function)
                ends.append("attached")
            except (resvisor.Cancelled, KeyError) as error:
                ends.append(type(error).__name__)
        print(json.dumps([ends, len(seen), len(connection.attach(path))]))
    """
    ends, calls, tensors = run_python(service, code, service.models / "large.safetensors")
    assert ends[0] == "Cancelled" and ends[1] in ("KeyError", "attached") and calls == 1 and tensors == 8
    service.wait_quiet()


def test_ctrl_c_ends_a_waiting_attach(service):
    code = """
        import sys, resvisor
        connection = resvisor.connect()
        print("ready", flush=True)
        sys.stdin.readline()
        try:
            connection.attach("plain", progress=lambda done, total: print("waiting", flush=True))
        except KeyboardInterrupt:
            print("interrupted", flush=True)
        try:
            connection.attach("plain", timeout=0.2)
        except resvisor.Deadline as error:
            print(isinstance(error, TimeoutError), flush=True)
    """
    supervisor = service.pids()["supervisor"]
    service.close_control()
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], env=environment(service), stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stdout.readline() == "ready\n"
        procfs.kill(supervisor, signal.SIGSTOP)
        procfs.wait_until(lambda: procfs.stat(supervisor)[0] == "T", 5, "the supervisor to stand")
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == "waiting\n"
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=30)[0].replace("waiting\n", "") == "interrupted\nTrue\n"
    finally:
        procfs.kill(supervisor, signal.SIGCONT)
        process.kill()


def test_attach_by_descriptor_needs_no_folder(service, tmp_path):
    elsewhere = tmp_path / "elsewhere.safetensors"
    wanted = models.write_plain(elsewhere, mib=1, tensors=2)
    code = """
        import json, os, sys, resvisor
        fd = os.open(sys.argv[1], os.O_RDONLY)
        with resvisor.connect() as connection, connection.attach("mine", fd=fd, timeout=30) as lease:
            os.close(fd)
            print(json.dumps({name: lease[name].tobytes().hex() for name in lease}))
    """
    assert run_python(service, code, elsewhere) == {name: data.hex() for name, data in wanted.items()}


def test_a_changed_file_is_a_new_generation_and_the_old_arrays_stay(service):
    code = """
        import json, os, sys, resvisor, resvisor.numpy
        path = sys.argv[1]
        old = resvisor.numpy.load_file(path)
        wanted = {name: a.tobytes() for name, a in old.items()}
        os.replace(sys.argv[2], path)
        new = resvisor.numpy.load_file(path)
        assert {name: a.tobytes() for name, a in old.items()} == wanted
        print(json.dumps([name for name in new if new[name].tobytes() != wanted[name]]))
    """
    models.write_plain(service.folder / "next.safetensors", mib=8, seed=9)
    found = run_python(service, code, service.models / "plain.safetensors", service.folder / "next.safetensors")
    assert len(found) == 8


# ---- threads and forks ----


def test_threads_share_a_connection(service):
    code = """
        import json, threading, resvisor
        connection, sums, errors = resvisor.connect(), [], []
        def work():
            try:
                for _ in range(20):
                    with connection.attach("plain") as lease:
                        array = lease["block.5.weight"].numpy()
                    sums.append(array.tobytes()[:64])
            except BaseException as error:
                errors.append(repr(error))
        threads = [threading.Thread(target=work) for _ in range(8)]
        [t.start() for t in threads]; [t.join() for t in threads]
        print(json.dumps([len(sums), len(set(sums)), errors]))
    """
    assert run_python(service, code) == [160, 1, []]
    procfs.wait_until(lambda: service.model("plain").leases == 0, 5, "no lease")


def test_a_forked_child_reads_and_makes_its_own_connection(service):
    code = """
        import json, os, sys, resvisor, resvisor.numpy
        connection = resvisor.connect()
        lease = connection.attach("plain")
        array, path = lease["block.1.weight"].numpy(), sys.argv[1]
        first = resvisor.numpy.load_file(path)              # makes the shared connection of this process
        wanted = array.tobytes()
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                assert array.tobytes() == wanted            # the mapping is inherited
                array[:] = 0                                # and private
                try:
                    connection.attach("plain")
                except resvisor.NotPermitted:
                    try:
                        lease["block.1.weight"]
                    except resvisor.NotPermitted:
                        pass
                    mine = resvisor.numpy.load_file(path)   # by a connection of its own
                    assert mine["block.1.weight"].tobytes() == wanted
                    del lease, connection, array, mine
                    code = 0
            finally:
                os._exit(code)
        _, status = os.waitpid(pid, 0)
        assert array.tobytes() == wanted
        print(json.dumps([status, len(connection.attach("plain"))]))
    """
    assert run_python(service, code, service.models / "plain.safetensors") == [0, 8]


# ---- files instead of the pool ----


def test_fallback_is_explicit_and_visible(make_service):
    service = make_service()     # not started: nothing listens
    models.write_plain(service.models / "plain.safetensors", mib=1)
    code = """
        import json, logging, sys, resvisor, resvisor.numpy
        lines = []
        handler = logging.Handler(); handler.emit = lambda record: lines.append([record.levelname, record.getMessage()])
        logging.getLogger("resvisor").addHandler(handler)
        try:
            resvisor.numpy.load_file(sys.argv[1])
        except resvisor.NotRunning:
            refused = dict(resvisor.fallbacks())
        arrays = resvisor.numpy.load_file(sys.argv[1], fallback="file")
        try:
            resvisor.numpy.load_file(sys.argv[1], fallback="maybe")
        except ValueError as error:
            wrong = str(error)
        try:
            resvisor.numpy.load_file("/nowhere/x.safetensors", fallback="file")
        except FileNotFoundError:
            print(json.dumps([refused, len(arrays), lines, resvisor.fallbacks(), wrong]))
    """
    refused, count, lines, counter, wrong = run_python(service, code, service.models / "plain.safetensors")
    assert refused == {} and count == 8 and counter == {"NOT_RUNNING": 1}
    assert len(lines) == 1 and lines[0][0] == "WARNING" and "read from the file, not from the pool" in lines[0][1]
    assert "allowed" in wrong


def test_a_damaged_file_is_refused_here_and_by_safetensors(service):
    path = service.models / "bad.safetensors"
    path.write_bytes(models.BAD_FILES["truncated"])
    code = """
        import json, sys, resvisor, resvisor.numpy
        ends = []
        for fallback in ("error", "file"):
            try:
                resvisor.numpy.load_file(sys.argv[1], fallback=fallback)
            except Exception as error:
                ends.append(type(error).__name__)
        print(json.dumps([ends, resvisor.fallbacks()]))
    """
    assert run_python(service, code, path) == [["ModelInvalid", "SafetensorError"], {"MODEL_INVALID": 1}]


def test_load_file_finds_a_restarted_supervisor(service):
    code = """
        import json, sys, resvisor.numpy
        first = resvisor.numpy.load_file(sys.argv[1])
        print("ready", flush=True); sys.stdin.readline()
        second = resvisor.numpy.load_file(sys.argv[1])
        print(json.dumps(all(first[n].tobytes() == second[n].tobytes() for n in first)))
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), str(service.models / "plain.safetensors")], env=environment(service),
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout.readline() == "ready\n"
    service.stop()
    service.start()
    out, _ = process.communicate("\n")
    assert json.loads(out) is True


# ---- the document ----


def test_the_example_client_runs(service):
    client = ROOT / "deploy" / "examples" / "python" / "client.py"

    def run(*arguments):
        return subprocess.run(
            [sys.executable, client, *arguments], env=environment(service), capture_output=True, text=True, timeout=60
        )

    first, second, refused = run("plain"), run("plain"), run("nothing")
    assert first.returncode == 0 and "loading: " in first.stderr and "plain: generation 1, 8 tensors" in first.stdout
    assert ", 0 bytes read" not in first.stdout and ", 0 bytes read" in second.stdout
    assert "copied by this process: 4096 bytes\nthe pool's own bytes: unchanged\n" in second.stdout
    assert refused.returncode == 1 and refused.stderr.startswith("NO_SUCH_MODEL: no model is named")


def test_programs_of_the_document_run(service):
    programs = python_programs("numpy")
    assert len(programs) == 2
    service.stop()
    service.config["models"]["flux"] = {"path": "plain.safetensors"}
    service.start()
    for program in programs:
        run_python(service, program + "\nprint('null')")


def test_the_table_of_errors_is_the_table_of_classes():
    text = (ROOT / "docs" / "python.md").read_text().split("\n## Errors\n")[1].split("\n## ")[0]
    named = {}
    for row in re.findall(r"^\| (`.*) \|$", text, re.MULTILINE):
        classes, codes, base = (cell.strip() for cell in row.split("|")[:3])
        for class_, code in zip(classes.split(","), codes.split(","), strict=True):
            named[class_.strip(" `")] = [code.strip(), base.strip("`")]
    named.pop("Error` itself")
    code = """
        import json, resvisor._errors as e
        print(json.dumps({c.__name__: [k.name, "" if len(c.__bases__) == 1 else c.__bases__[1].__name__] for k, c in e._CLASSES.items()}))
    """
    assert run_python(None, code) == named
