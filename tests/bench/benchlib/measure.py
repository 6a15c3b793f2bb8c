"""How to measure here: memory is backed lazily, disks come in bursts, so: prefault, interleave, take medians.

A host that uses free page reporting takes free blocks of a virtual machine back after 2 s, and giving one again costs
more than anything that is measured. So ways that need much fresh memory start right after that much was touched.
"""

import contextlib
import json
import mmap
import os
import pathlib
import statistics
import subprocess
import sys
import time

HERE = pathlib.Path(__file__).resolve().parents[1]
GIB = 1 << 30
MIB = 1 << 20
KIB = 1 << 10
MADV_HUGEPAGE, MADV_POPULATE_WRITE = 14, 23
REPORTING = pathlib.Path("/sys/module/page_reporting/parameters/page_reporting_order")
PREFAULT_SHARE = 0.5  # of the memory that is free
FRESH = 1.25  # of the model: what is touched right before a load
POLL_S = 0.005


class Row:
    """One line of the table. ours and alternatives are numbers of `unit`; met None = a figure without a goal."""

    def __init__(self, name, what, ours, unit, alternatives=(), goal="", met=None, ratio=None, note=""):
        self.name, self.what, self.ours, self.unit = name, what, ours, unit
        self.alternatives, self.goal, self.met, self.note = list(alternatives), goal, met, note
        self.ratio = ratio
        if ratio is None and self.alternatives and self.alternatives[0][1]:
            self.ratio = ours / self.alternatives[0][1]

    def as_dict(self):
        return {
            "name": self.name, "what": self.what, "ours": self.ours, "unit": self.unit, "ratio": self.ratio,
            "alternatives": [{"name": name, "value": value} for name, value in self.alternatives],
            "goal": self.goal, "met": self.met, "note": self.note,
        }  # fmt: skip


def say(text):
    print(f"bench: {text}", file=sys.stderr, flush=True)


def median(values):
    return statistics.median(values)


def mem_available():
    for line in pathlib.Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


def prefault(limit, share=PREFAULT_SHARE):
    """Makes a virtual machine back its memory, in whole blocks: a load then costs what it costs on a machine of one's own."""
    size = min(limit, int(mem_available() * share)) // MIB * MIB
    with contextlib.closing(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)) as area:
        with contextlib.suppress(OSError):  # a kernel without huge pages
            area.madvise(MADV_HUGEPAGE)
        area.madvise(MADV_POPULATE_WRITE)


def drop_cache(path):
    """Takes a file out of the page cache. Only clean pages go, so what was written goes to the disk first."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fdatasync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def warm_cache(path):
    with open(path, "rb", buffering=0) as file:
        buffer = bytearray(8 * MIB)
        while file.readinto(buffer):
            pass


def run(command, env=None):
    """(stdout, wall seconds, CPU seconds) of a program; an error ends the row."""
    start = time.perf_counter()
    process = subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env,
                               stdin=subprocess.DEVNULL)  # fmt: skip
    out, err = process.stdout.read(), process.stderr.read()
    _, status, usage = os.wait4(process.pid, 0)
    wall = time.perf_counter() - start
    process.returncode = os.waitstatus_to_exitcode(status)
    process.stdout.close()
    process.stderr.close()
    if process.returncode != 0:
        raise RuntimeError(f"{command[0]} ended with {process.returncode}: {err.decode(errors='replace').strip()[-500:]}")
    return out.decode(), wall, usage.ru_utime + usage.ru_stime


def run_json(command, env=None):
    out, wall, cpu = run(command, env)
    found = json.loads(out)
    return {"wall_s": wall, "cpu_s": cpu, **found}


class Helper:
    """A process that prints one JSON line when it is ready and one for each line that it gets."""

    def __init__(self, command, env=None):
        self.process = subprocess.Popen(list(map(str, command)), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                        stderr=subprocess.PIPE, text=True, env=env)  # fmt: skip
        self.first = self.read()

    @property
    def pid(self):
        return self.process.pid

    def read(self):
        line = self.process.stdout.readline()
        if not line:
            self.process.wait()
            raise RuntimeError(self.process.stderr.read().strip()[-500:] or "ended without a word")
        return json.loads(line)

    def ask(self, line="go"):
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return self.read()

    def close(self):
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()
        self.process.stderr.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


def interleave(ways, rounds, before=None, uncounted=1):
    """ways: {name: function that measures once and returns a dict}. {name: [dicts]}; the first, uncounted round is no part.

    before() runs before each. The order turns by one each round, so that no way always comes after the same other one.
    """
    names, found = list(ways), {name: [] for name in ways}
    for number in range(rounds + uncounted):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            if before:
                before()
            result = ways[name]()
            if number >= uncounted:
                found[name].append(result)
    return found


def medians(found, key):
    return {name: median([result[key] for result in results]) for name, results in found.items()}


def wait_until(predicate, timeout, what):
    deadline = time.monotonic() + timeout
    while not predicate():
        if time.monotonic() > deadline:
            raise RuntimeError(f"{what}: not within {timeout} s")
        time.sleep(POLL_S)
