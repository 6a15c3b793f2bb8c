"""Memory: one copy whatever the number of workers, and nothing left when they are gone."""

import json

import pytest

from harness import models, procfs
from harness.jobs import Jobs
from harness.protos import rpc_pb2
from harness.service import SANITIZED

MIB = 1024 * 1024
MODEL_MIB = 128
WORKERS = 4
OVERHEAD_PER_PROCESS = 24 * MIB

pytestmark = pytest.mark.skipif(SANITIZED, reason="shadow memory hides the figures")


@pytest.fixture
def sharing(make_faulty):
    service = make_faulty({"one": {"workers": WORKERS}, "two": {}}, mib=MODEL_MIB).start()
    service.wait_ready()
    return service


def total_pss(service):
    return sum(procfs.pss(pid) for pid in service.pids().values())


def test_workers_that_read_every_byte_share_one_copy(sharing):
    with Jobs(sharing) as jobs:
        for kind in ["one"] * WORKERS + ["two"]:
            report = json.loads(jobs.output(jobs.run_done(kind)))
            assert report["copied"] == 0
    held = sharing.model("small").bytes
    processes = len(sharing.pids())
    assert held < (MODEL_MIB + 1) * MIB
    assert total_pss(sharing) < held + processes * OVERHEAD_PER_PROCESS
    assert total_pss(sharing) < 2 * held, "two copies would not fit into this"


def test_a_writer_pays_for_its_copy_alone_and_gives_it_back(sharing):
    with Jobs(sharing) as jobs:
        report = json.loads(jobs.output(jobs.run_done("two", {"fault": "write"})))
        assert report["copied"] >= MODEL_MIB * MIB and report["verified"]
        clean = json.loads(jobs.output(jobs.run_done("one")))
        assert clean["verified"] and clean["copied"] == 0 and clean["fnv"] != report["fnv"]
        sharing.cli("restart", "two")
        sharing.wait_worker("two", starts=2)
        again = json.loads(jobs.output(jobs.run_done("two")))
        assert again["fnv"] == clean["fnv"] and again["copied"] == 0


def test_memory_of_the_pool_goes_when_a_model_is_unloaded(bare):
    path = bare.models / "m.safetensors"
    models.write_plain(path, mib=MODEL_MIB)
    before = shmem()
    bare.control.model(rpc_pb2.MODEL_LOAD, path)
    assert shmem() - before > (MODEL_MIB - 8) * MIB
    bare.control.model(rpc_pb2.MODEL_UNLOAD, path)
    procfs.wait_until(lambda: shmem() - before < (MODEL_MIB // 2) * MIB, 10, "the memory back")


def shmem():
    """Bytes of shared memory of the whole machine."""
    with open("/proc/meminfo") as file:
        line = next(line for line in file if line.startswith("Shmem:"))
    return int(line.split()[1]) * 1024
