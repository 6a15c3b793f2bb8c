"""Runs a job: its payload is a prompt graph, ComfyUI's own queue runs it, its history says what came out."""

import json
import threading
import time
import traceback
import uuid
from typing import Any

from .. import Error, ErrorCode
from ..worker import Job, JobCancelled
from . import files, history
from .report import Report, log
from .server import Server, ServerError
from .trace import Trace

TURN_S = 0.1  # how often a cancel and the prompt thread are looked at
LOOK_S = 2.0  # how often the history is asked, should an event not have come
NODES_MAX = 10_000
STEPS = 1000  # of one node, in the job's progress
MESSAGE_MAX = 400  # characters of one error of ComfyUI
MINTED = ("number", "front", "prompt_id")  # of a body for POST /prompt: the router's to decide


class JobError(Exception):
    def __init__(self, text: str, code: ErrorCode = ErrorCode.JOB_FAILED) -> None:
        super().__init__(text)
        self.code = code


class PromptThreadDied(Exception):
    """ComfyUI's thread that runs prompts has ended: nothing will ever run again in this process."""


def _bad(text: str) -> JobError:
    return JobError(text, ErrorCode.BAD_REQUEST)


def parse(payload: bytes) -> dict[str, Any]:
    """The body for POST /prompt. JobError."""
    if not payload:
        raise _bad("the job has no payload; it must be a prompt in ComfyUI's API format (`--payload workflow.json`)")
    try:
        given = json.loads(payload.decode("utf-8"), parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise _bad(f"the payload is no JSON: {error}") from None
    if isinstance(given, dict) and isinstance(given.get("nodes"), list):
        raise _bad("the payload is a workflow of the editor; save it in API format (Workflow > Export (API)) and use that")
    body = {"prompt": given}
    if isinstance(given, dict) and isinstance(given.get("prompt"), dict) and "class_type" not in given["prompt"]:
        body = {key: value for key, value in given.items() if key not in MINTED}
        _check_fields(body)
    graph = body["prompt"]
    if not isinstance(graph, dict) or not graph:
        raise _bad("the payload is no prompt: it must be a JSON object with one entry per node")
    if len(graph) > NODES_MAX:
        raise _bad(f"the prompt has {len(graph)} nodes; at most {NODES_MAX} are allowed")
    for node, value in graph.items():
        if not isinstance(value, dict) or not isinstance(value.get("class_type"), str):
            raise _bad(f"node {node!r} of the prompt has no class_type")
        if not isinstance(value.get("inputs", {}), dict):
            raise _bad(f"the inputs of node {node!r} are no JSON object")
    return body


def _check_fields(body: dict[str, Any]) -> None:
    """What is not ours passes through: packs read fields of their own."""
    if not isinstance(body.setdefault("extra_data", {}), dict):
        raise _bad("extra_data is no JSON object")
    if body.get("client_id") is None:
        body.pop("client_id", None)
    elif not isinstance(body["client_id"], str):
        raise _bad("client_id is no text")
    targets = body.get("partial_execution_targets")
    if targets is not None and not (isinstance(targets, list) and all(isinstance(target, str) for target in targets)):
        raise _bad("partial_execution_targets is no list of node ids")


def prompt_id(job_id: str) -> str:
    """The job's id, if ComfyUI takes it as the id of a prompt: a UUID as Python writes it. Else a new one."""
    try:
        if str(uuid.UUID(job_id)) == job_id:
            return job_id
    except ValueError:
        pass
    return str(uuid.uuid4())


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")


def validation_text(body: bytes) -> str:
    """ComfyUI's own words of a refused prompt."""
    try:
        answer = json.loads(body)
        error = answer["error"]
        parts = [_line(error)]
        for node, found in (answer.get("node_errors") or {}).items():
            for one in found.get("errors", []):
                parts.append(f"node {node} ({found.get('class_type')}): {_line(one)}")
        return "; ".join(parts)
    except (ValueError, KeyError, TypeError, AttributeError):
        return body[:MESSAGE_MAX].decode(errors="replace")


def _line(error: Any) -> str:
    if isinstance(error, str):
        return error
    details = error.get("details") or ""
    text = f"{error.get('type', '')}: {error.get('message', '')}".strip(": ")
    return " ".join((f"{text}: {details}" if details else text).split())[:MESSAGE_MAX]


def _only_history(params: dict[str, str]) -> bool:
    """The parameter `outputs`: `files`, `report` (trace.py), or nothing but the history, which is there in any case."""
    wanted = params.get("outputs", "files")
    if wanted not in ("files", "history", "report"):
        raise _bad(f"the parameter outputs is {wanted!r}; it may be files, history or report")
    return wanted == "history"


class Run:
    """One prompt: what its events say, seen from ComfyUI's threads."""

    def __init__(self, graph: dict[str, Any], id: str) -> None:
        self.id = id
        self.graph = graph
        self.changed = threading.Condition()
        self.ended = False
        self.error: dict[str, Any] | None = None
        self.node: str | None = None
        self.node_since = time.monotonic()
        self.visited: set[str] = set()
        self.executed: list[str] = []  # nodes, in order; what the cache answered is not among them
        self.value, self.total = 0.0, 0.0

    def on_event(self, event: str, data: Any) -> None:
        if not isinstance(data, dict) or data.get("prompt_id") != self.id:
            return
        with self.changed:
            if event in ("execution_error", "execution_interrupted"):
                self.error = data
            elif event == "execution_cached":
                self.visited.update(map(str, data.get("nodes") or []))
            elif event == "executing" and data.get("node") is None:
                self.ended = True
            elif event == "executing":
                if self.node is not None:
                    self.visited.add(self.node)
                self.node, self.node_since = str(data["node"]), time.monotonic()
                self.value, self.total = 0.0, 0.0
                self.executed.append(self.node)
            elif event == "progress":
                self.value, self.total = float(data.get("value") or 0), float(data.get("max") or 0)
            self.changed.notify_all()

    def title(self, node: str | None) -> str:
        found = self.graph.get(node or "")
        return f"node {node} ({found['class_type']})" if found else f"node {node}"

    def progress(self) -> tuple[int, int, str]:
        with self.changed:
            done = len(self.visited & set(self.graph)) * STEPS
            text = ""
            if self.node is not None:
                text = self.title(self.node)
                if self.total > 0:
                    done += int(STEPS * min(1.0, self.value / self.total))
                    text += f", step {self.value:.0f} of {self.total:.0f}"
            return min(done, len(self.graph) * STEPS), len(self.graph) * STEPS, text

    def where(self) -> str:
        with self.changed:
            return f"in {self.title(self.node)}" if self.node is not None else "before its first node"


class Jobs:
    def __init__(self, server: Server, prompt_thread: threading.Thread | None, report: Report) -> None:
        self.server = server
        self.prompt_thread = prompt_thread
        self.entry: dict[str, Any] | None = None  # of the history, for the job that runs
        self.keep_client = False
        self.report = report
        self.executed: list[str] = []  # the nodes that the last prompt ran

    def run(self, job: Job) -> None:
        """Runs a job to its end. PromptThreadDied = this process can run nothing any more, and the job ends with it."""
        began = time.monotonic()
        self.entry = None
        try:
            only_history = _only_history(job.params)
            body = parse(job.payload)
            observed = Trace(job.params, body["prompt"], self.report)
            entry = self._execute(job, body)
            if observed.wanted:
                observed.attach(job, self.executed)
            elif not only_history:
                files.attach(job, files.find_outputs(entry.get("outputs")))
            self._add_history(job)
            job.finish()
            log(f"job {job.id} done in {time.monotonic() - began:.2f} s")
        except JobCancelled:
            self._add_history_if_possible(job)
            job.fail("cancelled")
        except JobError as error:
            log(f"job {job.id} failed: {error}")
            self._add_history_if_possible(job)
            job.fail(str(error), error.code)
        except PromptThreadDied:
            raise  # were the job failed first, this process would get the next one, and take that along
        except files.Missing as error:
            job.fail(f"an output is missing: {error}")
        except Error as error:
            log(f"job {job.id} failed: {error}")
            job.fail(str(error), error.code)
        except (ServerError, OSError) as error:
            log(f"job {job.id} failed: {error}")
            job.fail(str(error))
        except Exception as error:  # a fault here, or an answer of ComfyUI that nobody foresaw: the next job may do better
            traceback.print_exc()
            job.fail(f"{type(error).__name__}: {error}")

    def _add_history(self, job: Job) -> None:
        if self.entry is not None:
            job.add_output(history.NAME, history.dump(job.id, self.entry, self.keep_client), "application/json")

    def _add_history_if_possible(self, job: Job) -> None:
        """The job fails anyway, and with its own reason."""
        try:
            self._add_history(job)
        except Error as error:
            log(f"job {job.id}: its history is lost: {error}")

    def _execute(self, job: Job, body: dict[str, Any]) -> dict[str, Any]:
        """The prompt's entry of the history."""
        run = Run(body["prompt"], prompt_id(job.id))
        self.executed = run.executed
        self.server.observer = run.on_event
        try:
            self._post(job, run, body)
            return self._wait(job, run)
        except JobCancelled:
            self._interrupt(job, run)
            raise
        finally:
            self.server.observer = lambda event, data: None

    def _post(self, job: Job, run: Run, body: dict[str, Any]) -> None:
        # With a client id ComfyUI makes all its events, and shows them to nobody else.
        request = {"client_id": f"resvisor-{job.id}", **body, "prompt_id": run.id}
        self.keep_client = "client_id" in body
        source = job.params.get("usage_source")
        try:
            # An id may come again after a long time, and its old entry would be taken for the new one.
            self.server.request("POST", "/history", {"delete": [run.id]})
            answer = self.server.request("POST", "/prompt", request, {"Comfy-Usage-Source": source} if source else {})
        except ServerError as error:
            if error.status == 400:
                raise _bad(f"ComfyUI refuses the prompt: {validation_text(error.body)}") from None
            raise
        run.id = answer.get("prompt_id", run.id)
        if answer.get("node_errors"):
            # ComfyUI runs the outputs that are valid, and so do we.
            log(f"job {job.id}: parts of the prompt are left out: {json.dumps(answer['node_errors'])[:2000]}")

    def _wait(self, job: Job, run: Run) -> dict[str, Any]:
        look_at = time.monotonic() + LOOK_S
        shown: tuple[int, int, str] | None = None
        while True:
            with run.changed:
                if not run.ended:
                    run.changed.wait(TURN_S)
                ended = run.ended
            now = run.progress()
            if now != shown:
                shown = now
                job.progress(*now)
            elif job.cancelled:
                raise JobCancelled("cancelled")
            if ended or time.monotonic() >= look_at:
                look_at = time.monotonic() + LOOK_S
                entry = self._history(run)
                if entry is not None:
                    self.entry = entry
                    return self._judge(run, entry)
            if self.prompt_thread is not None and not self.prompt_thread.is_alive():
                raise PromptThreadDied(
                    f"ComfyUI's prompt thread ended {run.where()}, as sys.exit() in a node does it; the worker restarts"
                )

    def _history(self, run: Run) -> dict[str, Any] | None:
        answer = self.server.request("GET", f"/history/{run.id}")
        entry = answer.get(run.id) if isinstance(answer, dict) else None
        return entry if isinstance(entry, dict) else None

    def _judge(self, run: Run, entry: dict[str, Any]) -> dict[str, Any]:
        status = entry.get("status") or {}
        if status.get("status_str") != "error":
            return entry
        error = run.error
        for message in status.get("messages") or []:
            if message[0] in ("execution_error", "execution_interrupted"):
                error = message[1]
        if error is None:
            raise JobError("ComfyUI says that the prompt failed, and not why; `resvisor logs TYPE` may")
        node = f"node {error.get('node_id')} ({error.get('node_type')})"
        if "exception_type" not in error:
            raise JobError(f"interrupted in {node}", ErrorCode.CANCELLED)
        text = " ".join(str(error.get("exception_message", "")).split())
        raise JobError(f"{node}: {error['exception_type']}: {text}")

    def _interrupt(self, job: Job, run: Run) -> None:
        """Takes a cancelled prompt out of the queue, or stops it, and waits: the next job must not meet it."""
        log(f"job {job.id} was cancelled {run.where()}")
        try:
            self.server.request("POST", "/queue", {"delete": [run.id]})
            self.server.request("POST", "/interrupt", {"prompt_id": run.id})
            while self._is_queued(run):
                with run.changed:
                    if not run.ended:
                        run.changed.wait(TURN_S)
                if self.prompt_thread is not None and not self.prompt_thread.is_alive():
                    return
            self.entry = self._history(run)
        except ServerError as error:
            log(f"job {job.id}: {error}")

    def _is_queued(self, run: Run) -> bool:
        queue = self.server.request("GET", "/queue")
        return any(item[1] == run.id for name in ("queue_running", "queue_pending") for item in queue.get(name, []))
