"""Parts of the ComfyUI worker that need no ComfyUI: what a payload may be, what becomes of the history, how a prompt is judged."""

import pytest
from harness.python import run_python
from harness.service import SANITIZED

pytestmark = pytest.mark.skipif(SANITIZED, reason="python would need the sanitizer's runtime first")


def test_payloads():
    found = run_python(
        None,
        """
        import json
        from resvisor.comfyui import jobs

        graph = {"1": {"class_type": "A", "inputs": {}}}

        def parse(**fields):
            try:
                return jobs.parse(json.dumps({"prompt": graph, **fields}).encode())
            except jobs.JobError as error:
                return str(error)

        print(json.dumps([
            jobs.parse(json.dumps(graph).encode()), parse(), parse(number=1, front=True, prompt_id="x", client_id="c", other=[1]),
            parse(client_id=None, partial_execution_targets=None), parse(client_id=5), parse(extra_data=[]),
            parse(partial_execution_targets="1"), parse(partial_execution_targets=[1]),
            jobs.prompt_id("01234567-89ab-cdef-0123-456789abcdef"), jobs.prompt_id("01234567-89AB-cdef-0123-456789abcdef"),
            jobs.prompt_id("job-1"),
        ]))
        """,
    )
    graph = {"1": {"class_type": "A", "inputs": {}}}
    assert found[0] == {"prompt": graph}
    assert found[1] == {"prompt": graph, "extra_data": {}}
    assert found[3] == {**found[1], "partial_execution_targets": None}
    assert found[2] == {"prompt": graph, "extra_data": {}, "client_id": "c", "other": [1]}
    assert [text.split()[0] for text in found[4:8]] == ["client_id", "extra_data", "partial_execution_targets", "partial_execution_targets"]
    assert found[8] == "01234567-89ab-cdef-0123-456789abcdef"
    assert len(found[9]) == len(found[10]) == 36 and found[9] != "01234567-89AB-cdef-0123-456789abcdef"


def test_a_history_is_json_without_secrets():
    found = run_python(
        None,
        """
        import json
        from resvisor.comfyui import history

        extra = {"client_id": "c", "api_key_comfy_org": "s", "auth_token_comfy_org": "s", "kept": float("inf")}
        entry = {"prompt": (3, "theirs", {"1": {}}, extra, ["9"], {"auth_token_comfy_org": "s"}), "outputs": {"9": {"v": [float("nan")]}}}
        large = {**entry, "outputs": {"9": "x" * history.SIZE_MAX}}
        huge = {**entry, "prompt": (3, "t", {"1": "x" * history.SIZE_MAX}, {}, []), "status": {"messages": ["x"], "completed": True}}

        def dump(entry, keep):
            return json.loads(history.dump("mine", entry, keep), parse_constant=lambda name: 1 / 0)

        print(json.dumps([dump(entry, True), dump(entry, False), dump(large, True), dump(huge, True), dump({"odd": 1}, True)]))
        """,
    )
    kept, dropped, large, huge, odd = found
    assert kept == {"prompt": [3, "mine", {"1": {}}, {"client_id": "c", "kept": None}, ["9"]], "outputs": {"9": {"v": [None]}}}
    assert dropped["prompt"][3] == {"kept": None}
    assert large["outputs"] == {} and large["prompt"][1] == "mine"
    assert huge["prompt"] == [0, "mine", {}, {}, []] and huge["status"] == {"messages": [], "completed": True}
    assert odd == {"odd": 1}


def test_a_prompt_is_judged_by_any_comfyui():
    """validate_prompt has taken one, two and three arguments; handlers of packs are asked only if it is bad without them."""
    found = run_python(
        None,
        """
        import asyncio, json, sys, types
        from resvisor.comfyui import validate

        execution = sys.modules["execution"] = types.ModuleType("execution")

        def verdict(prompt):
            good = "new" in prompt
            return good, None if good else {"type": "bad"}, ["9"] if good else [], {}

        def one(prompt):
            return verdict(prompt)

        def two(prompt_id, prompt):
            return verdict(prompt)

        async def three(prompt_id, prompt, targets):
            assert targets == ["9"]
            return verdict(prompt)

        class Server:
            on_prompt_handlers = []
            asked = 0

            def trigger_on_prompt(self, body):
                self.asked += 1
                body["prompt"]["new"] = body["prompt"].pop("old", 1)
                return body

        def judge(prompt, handlers):
            server = Server()
            server.on_prompt_handlers = handlers
            body = {"prompt": prompt, "partial_execution_targets": ["9"]}
            return [*asyncio.run(validate.judge(server, body)), server.asked, body["prompt"]]

        results = []
        for execution.validate_prompt in (one, two, three):
            results.append([judge({"new": 1}, []), judge({"old": 1}, []), judge({"new": 1}, [1]), judge({"old": 1}, [1])])
        print(json.dumps(results))
        """,
    )
    good, bad = [200, {"node_errors": {}, "outputs_to_execute": ["9"]}], [400, {"error": {"type": "bad"}, "node_errors": {}}]
    wanted = [[*good, 0, {"new": 1}], [*bad, 0, {"old": 1}], [*good, 0, {"new": 1}], [*good, 1, {"old": 1}]]
    assert found == [wanted] * 3


def test_a_process_that_was_stopped_has_no_loop_that_stands_still():
    """Also a library that reads a large model and keeps Python's lock meanwhile: nobody could have answered."""
    pause, seconds, reasons = run_python(
        None,
        """
        import json, threading, types
        from resvisor.comfyui import monitor

        now, late, reasons = [1000.0], [0.0, 300.0], []
        monitor.time = types.SimpleNamespace(monotonic=lambda: now[0], time=lambda: 0.0, localtime=lambda at: at, strftime=lambda *found: "")

        class Wake:
            def wait(self, seconds):
                now[0] += seconds + (late.pop(0) if late else 0.0)

            def clear(self):
                pass

        loop = types.SimpleNamespace(call_soon_threadsafe=lambda function: None)  # it never answers
        found = monitor.Monitor(types.SimpleNamespace(loop=loop), types.SimpleNamespace(sweep=lambda: None), 60.0)
        found._wake, found.end = Wake(), reasons.append
        found._watch()
        print(json.dumps([300.0, now[0] - 1000.0, reasons]))
        """,
    )
    assert len(reasons) == 1 and "stands still for 60 s" in reasons[0]
    assert seconds == 30 + pause + 60


def test_folders_given_by_a_relative_path_lie_in_comfyuis_folder():
    assert run_python(
        None,
        """
        import json, pathlib
        from resvisor.comfyui.folders import Folders

        def folders(*arguments):
            found = Folders("/state", "image/0", True, pathlib.Path("/comfyui"), list(arguments))
            return [str(found.base), str(found.user)]

        print(json.dumps([folders(), folders("--base-directory", "b", "--user-directory=u"), folders("--user-directory", "/u")]))
        """,
    ) == [["/comfyui", "/state/comfyui/users"], ["/comfyui/b", "/comfyui/u"], ["/comfyui", "/u"]]


def test_texts_and_names_that_are_no_unicode_come_back_with_a_mark():
    """Half a surrogate pair in a text of a node, or a file whose name is not UTF-8: no reason to lose the others."""
    found = run_python(
        None,
        """
        import json
        from resvisor.comfyui import files

        made = []
        class Job:
            def add_output(self, name, data, content_type):
                made.append([name, bytes(data).decode()])

        files.attach(Job(), files.find_outputs({"1": {"text": ["a" + chr(0xD800), "b"]}}))
        print(json.dumps([made, files._unique("x" + chr(0xDCFF) + ".png", set())]))
        """,
    )
    assert found == [[["node-1.txt", "a?"], ["node-1-2.txt", "b"]], "x?.png"]
