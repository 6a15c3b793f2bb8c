"""docs/openapi.yaml is true: its routes are the router's, and schemathesis finds no answer that it does not describe."""

import pathlib
import re
import subprocess
import sys

import pytest
import yaml
from harness import http as web
from harness.service import ROOT

SCHEMA = ROOT / "docs" / "openapi.yaml"
EXAMPLES = 25  # requests per operation and phase
LIMIT_S = 100


def test_every_route_is_described_and_no_other():
    source = (ROOT / "supervisor/router/http/v1.c").read_text()
    routes = {(m, p if p.startswith("/") else f"/resvisor/v1/{p}") for m, p in re.findall(r'\{"(\w+)", (?:V1 )?"([^"]+)"', source)}
    described = {
        (method.upper(), re.sub(r"\{\w+\}", "*", path))
        for path, item in yaml.safe_load(SCHEMA.read_text())["paths"].items() for method in item if method != "parameters"
    }  # fmt: skip
    assert routes == described and len(routes) > 15


@pytest.mark.slow
@pytest.mark.parametrize("token", [web.TOKEN, None], ids=["token", "none"])
def test_schemathesis_finds_nothing(tmp_path, token):
    """The stream of events is left out: it has no end. Restarts are too: each takes a worker's start."""
    service = web.start_small(tmp_path, token=token)
    try:
        command = [
            str(pathlib.Path(sys.executable).parent / "schemathesis"), "run", str(SCHEMA), "--url", f"http://127.0.0.1:{service.http_port}",
            "--exclude-path", "/resvisor/v1/events", "--exclude-path", "/resvisor/v1/types/{type}/restart",
            "--checks", "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance",
            "--phases", "examples,coverage,fuzzing", "-n", str(EXAMPLES), "--seed", "7", "--request-timeout", "20", "--no-color",
            "--generation-database", "none",
        ]  # fmt: skip
        if token:
            command += ["-H", f"Authorization: Bearer {token}"]
        result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_S)
        assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]
        service.assert_healthy()
    finally:
        service.end()
