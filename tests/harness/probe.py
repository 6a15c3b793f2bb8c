"""Jobs of the probe (tests/programs/probe.c): what a worker sees of its models, read where they lie."""

import json

import xxhash

from .service import BUILD

EXECUTOR = BUILD / "tests" / "probe.so"


def probe_type(**fields):
    return {"executor": str(EXECUTOR), **fields}


def look(jobs, type_name, **params):
    """The probe's report of a job that must be done."""
    return json.loads(jobs.output_named(jobs.run_done(type_name, params), "probe.json"))


def digests(tensors):
    """{name: digest} as the probe says them, of {name: bytes}."""
    return {name: xxhash.xxh3_128(data).hexdigest() for name, data in tensors.items()}
