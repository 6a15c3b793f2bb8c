"""Every fault test ends with the same questions: are others served, and is anything left open?"""

import contextlib
import os

import pytest

from harness import models
from harness.device_standin import wait_state
from harness.loader_standin import LoaderStandIn


@pytest.fixture
def watched():
    """watched(service): a block after which the service must hold what it held before and must serve others."""

    @contextlib.contextmanager
    def watch(service):
        good = service.models / "bystander.safetensors"
        if not good.exists():
            models.write_plain(good, mib=1)
        attach_and_close(service, good)  # what the first attach opens for good is not a leak
        service.wait_quiet()
        before = service.holdings()
        yield
        attach_and_close(service, good)
        service.assert_holdings(before)
        service.assert_healthy()

    return watch


def attach_and_close(service, path):
    with service.peer() as peer:
        _, index_fd, arena_fds = peer.attach(path)
        for fd in [index_fd, *arena_fds]:
            os.close(fd)


@pytest.fixture
def make_scripted(make_service, tmp_path):
    """make_scripted(backend, **config): a running service whose loader and device are stand-ins (service.standin), with a model m."""

    def make_one(backend="cuda-vmm", **config):
        standin = LoaderStandIn(tmp_path, backend)
        service = make_service(config, program=standin.program)
        models.write_plain(service.models / "m.safetensors", mib=1)
        service.config["models"] = {"m": {"path": "m.safetensors"}}
        service.standin = standin
        service.start()
        wait_state(service, "READY")
        return service

    return make_one
