"""What /proc says of processes: descriptors, memory, families. Functions return empty answers for a process that is gone."""

import os
import signal
import time

POLL_S = 0.01


def wait_until(predicate, timeout=10.0, what="the condition", poll=POLL_S):
    """Waits until predicate() is true and returns its value; fails with `what` and the last value otherwise."""
    deadline = time.monotonic() + timeout
    while True:
        value = predicate()
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"{what}: not within {timeout} s; last value: {value!r}")
        time.sleep(poll)


def read(pid, name):
    try:
        with open(f"/proc/{pid}/{name}", "rb") as file:
            return file.read()
    except OSError:
        return b""


def stat(pid):
    """(state letter, parent pid, start time in ticks), or None."""
    text = read(pid, "stat")
    if not text:
        return None
    fields = text[text.rindex(b")") + 2 :].split()
    return fields[0].decode(), int(fields[1]), int(fields[19])


def alive(pid):
    """True for a process that runs; false for a zombie or none."""
    found = stat(pid)
    return found is not None and found[0] not in "ZX"


def command(pid):
    return read(pid, "cmdline").replace(b"\0", b" ").decode(errors="replace").strip() or read(pid, "comm").decode().strip()


def parents():
    """{pid: (parent, state letter)} of every process."""
    table = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            found = stat(int(name))
            if found:
                table[int(name)] = (found[1], found[0])
    return table


def descendants(pid, table=None):
    """All processes below pid, zombies included."""
    table = table or parents()
    below = {pid}
    grown = True
    while grown:
        grown = False
        for child, (parent, _) in table.items():
            if parent in below and child not in below:
                below.add(child)
                grown = True
    return below - {pid}


def zombies(pid):
    table = parents()
    return [child for child in descendants(pid, table) if table[child][1] == "Z"]


def descriptors(pid):
    """{number: what it is} of the open descriptors."""
    found = {}
    try:
        names = os.listdir(f"/proc/{pid}/fd")
    except OSError:
        return found
    for name in names:
        try:
            found[int(name)] = os.readlink(f"/proc/{pid}/fd/{name}")
        except OSError:
            pass
    return found


def descriptor_count(pid):
    return len(descriptors(pid))


def memfds(pid):
    return sorted(target for target in descriptors(pid).values() if target.startswith("/memfd:"))


def smaps(pid):
    """smaps_rollup as {field: bytes}."""
    found = {}
    for line in read(pid, "smaps_rollup").decode().splitlines()[1:]:
        name, value = line.split(":", 1)
        found[name] = int(value.split()[0]) * 1024
    return found


def pss(pid):
    return smaps(pid).get("Pss", 0)


def rss(pid):
    return smaps(pid).get("Rss", 0)


def kill(pid, number=signal.SIGKILL):
    """Sends a signal; a process that is gone already is fine."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass


def reap(pid):
    """Takes the status of an adopted child that has ended. True = nothing of it is left."""
    try:
        done, _ = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return stat(pid) is None
    return done == pid
