"""Row 7: what resvisor takes when nothing happens."""

import os
import pathlib
import time

from harness import procfs

from .context import EXECUTOR
from .measure import KIB, MIB, Row, say

RSS_GOAL = 8 * MIB
SETTLE_S = 6


def switches(pid):
    """{thread: times it went to sleep of its own will}: each is a wake-up."""
    found = {}
    for name in os.listdir(f"/proc/{pid}/task"):
        for line in pathlib.Path(f"/proc/{pid}/task/{name}/status").read_text().splitlines():
            if line.startswith("voluntary_ctxt_switches:"):
                found[int(name)] = int(line.split()[1])
    return found


def idle(context):
    seconds = 3 if context.quick else 10
    path = context.model(32 * MIB)
    types = {"bench": {"executor": str(EXECUTOR), "models": ["m"], "workers": 2}}
    with context.service(models={"m": str(path)}, types=types) as service:
        pids = service.pids()
        service.close_control()
        time.sleep(SETTLE_S)  # a start leaves one-shot timers of up to 5 s behind: that is not idleness
        before = {role: switches(pid) for role, pid in pids.items()}
        time.sleep(seconds)  # the time that is measured
        after = {role: switches(pid) for role, pid in pids.items()}
        memory = {role: procfs.smaps(pid) for role, pid in pids.items()}
    ours, library, detail = 0, 0, []
    for role, pid in pids.items():
        counts = {thread: after[role][thread] - before[role].get(thread, 0) for thread in after[role]}
        main = counts.pop(pid)
        rest = sum(counts.values())
        # The router has no thread of its own: what is not its main thread is nanomsg's.
        ours, library = ours + main + (0 if role == "router" else rest), library + (rest if role == "router" else 0)
        detail.append(f"{role} {main + (0 if role == 'router' else rest)}")
    say("wake-ups: " + ", ".join(detail) + f"; nanomsg's threads {library}")
    rss, pss = memory["supervisor"]["Rss"], memory["supervisor"]["Pss"]
    parts = ", ".join(f"{role} {found['Pss'] / MIB:.1f}" for role, found in memory.items() if role in ("keeper", "router"))
    return [
        Row("idle", "supervisor RSS", rss / MIB, "MiB", goal="<= 8 MiB", met=rss <= RSS_GOAL,
            note=f"PSS {pss / KIB:.0f} KiB; PSS of others, MiB: {parts}"),
        Row("idle", f"wake-ups in {seconds} s: keeper, supervisor, router, two workers", ours, "", goal="0", met=ours == 0,
            note=f"{', '.join(detail)}; nanomsg's own threads: {library}"),
    ]  # fmt: skip
