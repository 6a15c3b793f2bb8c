"""A folder that the launcher takes for ComfyUI: its modules, its server, its command line, and nothing behind them.

`torch` is one of its modules, so that neither torch nor ComfyUI is needed. Custom nodes are plain files. Gates stop a fork at a
named moment: a file GATES/NAME makes whoever comes by write its pid into GATES/NAME.pid, and wait until the file is gone.
"""

import json
import sys

from . import procfs

FILES = {
    "main.py": """
        import comfy.options
        comfy.options.enable_args_parsing()
        from comfy.cli_args import args
        import logging
        import sys
        logging.basicConfig()
        if "torch" in sys.modules:
            logging.warning("WARNING: Potential Error in code: Torch already imported, it should never be.")
        import comfy.utils
        import server
        import nodes
        import threading

        def prompt_worker():
            threading.Event().wait()

        if __name__ == "__main__":
            nodes.custom(args)
            threading.Thread(target=prompt_worker, daemon=True).start()
            try:
                server.run(args.listen, args.port)
            except KeyboardInterrupt:
                print("Stopped server")
        """,
    "requirements.txt": "torch\nstand-in-package>=1\nPillow-that-is-not-there\n",
    "stand_in_package.py": "",
    "comfyui_version.py": '__version__ = "0.0.1"\n',
    "comfy/__init__.py": "",
    "comfy/options.py": """
        args_parsing = False
        def enable_args_parsing(enable=True):
            global args_parsing
            args_parsing = enable
        """,
    "comfy/cli_args.py": """
        import argparse
        import comfy.options
        parser = argparse.ArgumentParser()
        parser.add_argument("--cpu", action="store_true")
        parser.add_argument("--gpu-only", action="store_true")
        for flag in ("--listen", "--temp-directory", "--user-directory", "--output-directory", "--database-url"):
            parser.add_argument(flag)
        parser.add_argument("--port", type=int, default=8188)
        parser.add_argument("--fast", nargs="*")
        args = parser.parse_args() if comfy.options.args_parsing else parser.parse_args([])
        args.fast = set(args.fast or ())
        """,
    "comfy/utils.py": """
        import torch
        def load_torch_file(ckpt, safe_load=False, device=None, return_metadata=False):
            raise OSError(ckpt)
        def copy_to_param(obj, attr, value):
            pass
        """,
    "cuda_malloc.py": "",
    "nodes.py": """
        import pathlib
        async def init_builtin_extra_nodes():
            print("extra nodes", flush=True)
            return ["broken.py"]
        def custom(args):
            import asyncio
            print("failed", asyncio.run(init_builtin_extra_nodes()), flush=True)
            for path in sorted((pathlib.Path(__file__).parent / "custom_nodes").glob("*.py")):
                exec(compile(path.read_text(), str(path), "exec"), {"args": args, "__name__": path.stem})
        """,
    "server.py": """
        import asyncio, types
        ANSWER = b"HTTP/1.1 200 OK\\r\\nContent-Type: application/json\\r\\nContent-Length: 2\\r\\nConnection: close\\r\\n\\r\\n{}"
        async def answer(reader, writer):
            await reader.readuntil(b"\\r\\n\\r\\n")
            writer.write(ANSWER)
            await writer.drain()
            writer.close()
        class SockSite:
            def __init__(self, runner, socket, ssl_context=None):
                self.socket = socket
            async def start(self):
                await asyncio.start_server(answer, sock=self.socket)
        def no_site(runner, host=None, port=None, **options):
            raise OSError(f"nobody gave us a socket for {host}:{port}")
        web = types.SimpleNamespace(SockSite=SockSite, TCPSite=no_site)
        class PromptServer:
            def send_sync(self, event, data, sid=None):
                pass
        def run(address, port):
            async def forever():
                await web.TCPSite(None, address, port).start()
                await asyncio.Event().wait()
            asyncio.run(forever())
        """,
    "torch/__init__.py": """
        import os, pathlib, threading, time, types
        __version__ = "0"
        _threads = len(os.sched_getaffinity(0))
        def get_num_threads():
            return _threads
        def set_num_threads(count):
            global _threads
            _threads = count
            _gate("born")
            if _depth and (_folder / "says").exists():  # before the worker says who it is
                exec((_folder / "says").read_text())
        _seed = [67280421310721]
        def initial_seed():
            return _seed[-1]
        default_generator = types.SimpleNamespace(manual_seed=_seed.append)
        class Module:
            def load_state_dict(self, state_dict, strict=True, assign=False):
                pass
        nn = types.SimpleNamespace(Module=Module, Parameter=type("Parameter", (), {}))
        _folder = pathlib.Path(__file__).parents[1] / "gates"
        cuda = types.SimpleNamespace(is_initialized=lambda: (_folder / "cuda").exists())
        if (_folder / "thread").exists():
            threading.Thread(target=threading.Event().wait, daemon=True).start()
        if (_folder / "dies").exists() and "RESVISOR_WORKER" not in os.environ:  # a template
            os.kill(os.getpid(), 9)
        _depth = 0
        def _gate(name):
            if _depth and (_folder / name).exists():
                (_folder / "new").write_text(str(os.getpid()))
                os.rename(_folder / "new", _folder / (name + ".pid"))
                while (_folder / name).exists():
                    time.sleep(0.01)
        def _forked():
            global _depth
            _depth += 1
            _gate(("middle", "worker")[_depth - 1])
        os.register_at_fork(after_in_child=lambda: _depth < 2 and _forked())
        """,
}


class StandIn:
    def __init__(self, folder):
        import textwrap

        self.folder = folder
        self.gates = folder / "gates"
        for name, text in FILES.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(textwrap.dedent(text).lstrip())
        for name in ("gates", "custom_nodes"):
            (folder / name).mkdir()

    def type(self, state, **keys):
        """The configuration of a type."""
        return {
            "kind": "comfyui", "directory": str(self.folder), "python": sys.executable, "args": ["--cpu"], "start_timeout": "60s",
            "stop_timeout": "10s", "state_folder": str(state), **keys,
        }  # fmt: skip

    def node(self, name, code):
        (self.folder / "custom_nodes" / f"{name}.py").write_text(code)

    def close(self, gate):
        (self.gates / f"{gate}.pid").unlink(missing_ok=True)
        (self.gates / gate).touch()

    def open(self, gate):
        (self.gates / gate).unlink(missing_ok=True)

    def wait_gate(self, gate, timeout=60):
        """Who stands there."""
        path = self.gates / f"{gate}.pid"
        return int(procfs.wait_until(lambda: path.exists() and path.read_text(), timeout, f"a process at the gate {gate}"))


FACTS = """
import json, logging, os, random, resource, signal, sys, tempfile, threading
import torch
try:
    import numpy
    drawn = float(numpy.random.random())
except ImportError:
    drawn = 0.0
found = {
    "environ": {key: value for key, value in os.environ.items() if key != "RESVISOR_INCARNATION"},
    "incarnation": os.environ["RESVISOR_INCARNATION"], "cwd": os.getcwd(), "argv": sys.argv[:1], "path": sys.path,
    "limits": {name: resource.getrlimit(getattr(resource, name)) for name in dir(resource) if name.startswith("RLIMIT_")},
    "signals": {int(n): str(signal.getsignal(n)) for n in signal.valid_signals()}, "blocked": list(signal.pthread_sigmask(0, ())),
    "handlers": len(logging.root.handlers), "threads": torch.get_num_threads(), "seed": torch.initial_seed(),
    "group": os.getpgid(0) == os.getpid(), "fds": sorted(os.listdir("/proc/self/fd")), "stdin": os.readlink("/proc/self/fd/0"),
    "status": {line.split(":")[0]: line.split(":")[1].strip() for line in open("/proc/self/status") if line.startswith(("Umask", "SigIgn", "NoNewPrivs", "Seccomp:", "Uid", "Gid", "Groups", "CapEff", "Name"))},
    "oom": open("/proc/self/oom_score_adj").read().strip(), "fast": sorted(args.fast), "cpu": args.cpu,
    "drawn": [random.random(), drawn], "name": next(tempfile._get_candidate_names()),
}
path = os.path.join(os.path.dirname(os.getcwd()), "facts-" + os.environ["RESVISOR_WORKER"].replace("/", "-"))
with open(path + ".new", "w") as file:
    json.dump(found, file)
os.rename(path + ".new", path)
"""


def facts(standin, worker):
    """What FACTS, as a custom node, found in that worker."""
    return json.loads((standin.folder.parent / f"facts-{worker.replace('/', '-')}").read_text())
