"""Rows 1 and 2: attaching a resident model, and reading every byte of it."""

import contextlib
from functools import partial

from .context import CLIENT
from .measure import FRESH, GIB, MIB, Row, drop_cache, interleave, median, medians, prefault, run_json, say, warm_cache

ATTACH_GOAL_US = 1000
RPC_P50_GOAL_US, RPC_P99_GOAL_US = 60, 150
FLAT_GOAL = 1.5  # slowest size against fastest; the times are some 100 us, and so is the noise
NOT_SLOWER = 1.05  # 5 % is what two runs of the same thing differ by
SIZES = {"10 MB": 10**7, "100 MB": 10**8, "1 GiB": GIB, "8 GiB": 8 * GIB}
QUICK_SIZES = {"10 MB": 10**7, "100 MB": 10**8}


def resident(context, sizes):
    """{label: path} of the models that memory and disk have room for, and rows for those that they have not."""
    paths, rows, wanted = {}, [], 0
    for label, size in sizes.items():
        if context.fits(wanted + size):
            wanted += size
            paths[label] = context.model(size)
        else:
            say(f"attach of {label} is left out: not enough memory or disk")
            rows.append(Row("attach", f"attach, {label}", None, "us", note="left out: not enough memory or disk"))
    return paths, rows


def attach(context):
    """All sizes resident at once and taken in turn; many short runs, since where the kernel places two processes stays."""
    rounds, repeats = (100, 3) if context.quick else (500, 11)
    paths, rows = resident(context, QUICK_SIZES if context.quick else SIZES)
    with context.service() as service:
        for path in paths.values():
            context.load(service, path)
        found = interleave(
            {label: partial(run_json, [CLIENT, "lease", context.socket(service), path, rounds]) for label, path in paths.items()},
            repeats,
        )
    for path in paths.values():
        if path.stat().st_size > GIB * FRESH:
            path.unlink()

    def figure(label, kind, percentile):
        return median([run[kind][percentile] for run in found[label]])

    wholes = {label: figure(label, "whole", "p50") for label in found}
    for label, runs in found.items():
        rows.append(
            Row("attach", f"connect + attach of {runs[0]['tensors']} tensors + first tensor, {label}, p50", wholes[label], "us",
                goal="<= 1000 us", met=wholes[label] <= ATTACH_GOAL_US,
                note=f"p99 {figure(label, 'whole', 'p99'):.0f} us; attach alone {figure(label, 'attach', 'p50'):.0f}, detach "
                f"{figure(label, 'detach', 'p50'):.0f} (p99 {figure(label, 'detach', 'p99'):.0f})")
        )  # fmt: skip
        for percentile, goal in (("p50", RPC_P50_GOAL_US), ("p99", RPC_P99_GOAL_US)):
            value = figure(label, "rpc_attach", percentile)
            rows.append(Row("attach", f"lease RPC, {label}, {percentile}", value, "us",
                            [("echo", figure(label, "echo", percentile))], goal=f"<= {goal} us", met=value <= goal,
                            note=f"give back: {figure(label, 'rpc_detach', percentile):.0f} us"))  # fmt: skip
    if len(wholes) > 1:
        low, high = min(wholes, key=wholes.get), max(wholes, key=wholes.get)
        rows.append(
            Row("attach", f"flat: {high} against {low}", wholes[high], "us", [(low, wholes[low])], goal=f"<= {FLAT_GOAL} x",
                met=wholes[high] <= FLAT_GOAL * wholes[low])
        )  # fmt: skip
    return rows


def touch(context):
    """Warm: the model resident, the file in the page cache."""
    size, rounds = (100 * MIB, 3) if context.quick else (2 * GIB, 9)
    path = context.model(size)
    warm_cache(path)
    with context.service() as service, contextlib.ExitStack() as stack:
        prefault(int(size * FRESH))
        context.load(service, path)
        ways = {
            "ours": lambda: run_json([CLIENT, "touch", context.socket(service), path]),
            "mmap": lambda: run_json([CLIENT, "mmap", path]),
        }
        helper = context.alternative("load_file", path)
        if helper:
            stack.enter_context(helper)
            ways["load_file"] = helper.ask
        found = interleave(ways, rounds)
    drop_cache(path)
    sums = {result["sum"] for name in found if name != "mmap" for result in found[name]}
    if len(sums) != 1:
        raise RuntimeError(f"the ways did not read the same bytes: sums {sums}")
    ms = {name: value / 1000 for name, value in medians(found, "us").items()}
    return [
        Row("touch", f"attach and read every byte, {size / GIB:.1f} GiB, warm", ms["ours"], "ms", [(name, ms[name])],
            goal="not slower (<= 1.05 x)", met=ms["ours"] <= NOT_SLOWER * ms[name],
            note="" if name == "load_file" else "no tensors, only bytes")
        for name in ("load_file", "mmap") if name in ms
    ]  # fmt: skip
