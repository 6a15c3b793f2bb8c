"""Who may do what: other users are refused, members of a group are clients, paths stay inside the model folders."""

import grp
import os
import pwd

import pytest

from harness.control import ControlPeer, Dropped, Refused
from harness.protos import rpc_pb2

pytestmark = pytest.mark.root

REQUESTS = {
    "attach": lambda peer, model: peer.attach(model),
    "status": lambda peer, model: peer.status(),
    "load": lambda peer, model: peer.model(rpc_pb2.MODEL_LOAD, model),
    "unload": lambda peer, model: peer.model(rpc_pb2.MODEL_UNLOAD, model),
    "list": lambda peer, model: peer.rpc(rpc_pb2.Request(list=rpc_pb2.List())),
}


def answer_to(what, path, model):
    """What a peer of this process gets: "ok", the name of an error, or "refused" without a word."""
    try:
        with ControlPeer(path) as peer:
            REQUESTS[what](peer, model)
        return "ok"
    except Refused as error:
        return rpc_pb2.ErrorCode.Name(error.code)
    except (PermissionError, Dropped):
        return "refused"


def as_user(user, groups, what, service, model="small", socket="control/resvisor.sock"):
    """The answer that another user gets, asked in a child process that has become that user."""
    account = pwd.getpwnam(user)
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.setgroups(groups)
            os.setgid(account.pw_gid)
            os.setuid(account.pw_uid)
            os.write(write_end, answer_to(what, service.runtime / socket, model).encode())
        except BaseException as error:
            os.write(write_end, repr(error).encode())
        finally:
            os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end) as file:
        text = file.read()
    os.waitpid(pid, 0)
    return text


@pytest.fixture
def open_base():
    """Lets other users reach the runtime folder's parent."""
    return lambda service: os.chmod(service.base, 0o711)


def test_another_user_is_refused(faulty, open_base):
    open_base(faulty)
    for what in ("status", "attach", "load"):
        assert as_user("nobody", [], what, faulty) == "refused"
    assert as_user("nobody", [], "list", faulty, socket="control/router.sock") == "refused"
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
    assert as_user("nobody", [gid], "list", service, socket="control/router.sock") == "ok"
    assert as_user("nobody", [gid], "unload", service) == "ERROR_NOT_PERMITTED"
    assert as_user("nobody", [], "attach", service) == "refused"
    service.assert_healthy()
