"""Who may do what: other users are refused, members of a group are clients, paths stay inside the model folders."""

import grp
import os
import pwd
import subprocess
import sys

import pytest

from harness.service import ROOT

pytestmark = pytest.mark.root

PROBE = """
import sys
sys.path.insert(0, {tests!r})
from harness.control import ControlPeer, Dropped, Refused
from harness.protos import rpc_pb2
what, path, model = sys.argv[1:]
try:
    with ControlPeer(path) as peer:
        if what == "attach":
            peer.attach(model)
        elif what == "status":
            peer.status()
        elif what == "load":
            peer.model(rpc_pb2.MODEL_LOAD, model)
        elif what == "unload":
            peer.model(rpc_pb2.MODEL_UNLOAD, model)
        elif what == "operator":
            assert peer.hello_reply.operator
    print("ok")
except Refused as error:
    print(rpc_pb2.ErrorCode.Name(error.code))
except (PermissionError, Dropped) as error:
    print("refused")
"""


def as_user(user, groups, what, service, model="small", socket="control/resvisor.sock"):
    """Runs the probe as another user; its one word of answer."""
    account = pwd.getpwnam(user)
    result = subprocess.run(
        [sys.executable, "-c", PROBE.format(tests=str(ROOT / "tests")), what, str(service.runtime / socket), model],
        user=account.pw_uid, group=account.pw_gid, extra_groups=groups, text=True, capture_output=True,
        env={"PATH": os.environ["PATH"], "HOME": "/tmp", "PYTHONDONTWRITEBYTECODE": "1"}, cwd="/",
    )  # fmt: skip
    if result.returncode != 0 and "ermission" in result.stderr:
        pytest.skip(f"user {user} cannot run this Python: {result.stderr.splitlines()[-1]}")
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


@pytest.fixture
def open_base():
    """Lets other users reach the runtime folder's parent."""
    return lambda service: os.chmod(service.base, 0o711)


def test_another_user_is_refused(faulty, open_base):
    open_base(faulty)
    for what in ("status", "attach", "load"):
        assert as_user("nobody", [], what, faulty) == "refused"
    assert as_user("nobody", [], "status", faulty, socket="control/router.sock") == "refused"
    faulty.assert_healthy()


def test_root_is_an_operator(faulty):
    assert faulty.control.hello_reply.operator


def test_a_member_of_the_group_is_a_client_and_no_operator(make_faulty, open_base):
    group = "games"
    gid = grp.getgrnam(group).gr_gid
    service = make_faulty(clients={"group": group}).start()
    open_base(service)
    service.wait_ready()
    assert as_user("nobody", [gid], "attach", service) == "ok"
    assert as_user("nobody", [gid], "status", service) == "ok"
    assert as_user("nobody", [gid], "unload", service) == "ERROR_NOT_PERMITTED"
    assert as_user("nobody", [], "attach", service) == "refused"
    service.assert_healthy()
