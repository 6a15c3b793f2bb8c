"""Generates the Python side of proto/*.proto and imports it: rpc_pb2 and control_pb2."""

import atexit
import importlib
import pathlib
import shutil
import sys
import tempfile

from grpc_tools import protoc

ROOT = pathlib.Path(__file__).resolve().parents[2]


def _generate():
    out = tempfile.mkdtemp(prefix="rv-protos-")
    atexit.register(shutil.rmtree, out, ignore_errors=True)
    include = ROOT / "proto"
    arguments = ["protoc", f"-I{include}", f"--python_out={out}", str(include / "rpc.proto"), str(include / "control.proto")]
    if protoc.main(arguments) != 0:
        raise RuntimeError("protoc refused proto/*.proto")
    sys.path.insert(0, out)


_generate()
rpc_pb2 = importlib.import_module("rpc_pb2")
control_pb2 = importlib.import_module("control_pb2")

PROTOCOL_VERSION = 1
FRAME_MAX = 64 * 1024
