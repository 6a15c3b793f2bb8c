"""Every fault test ends with the same questions: are others served, and is anything left open?"""

import contextlib
import os

import pytest

from harness import models


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
