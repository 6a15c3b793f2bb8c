"""ComfyUI's server as far as the launcher touches it: the names that it replaces, and the routes that it asks."""

import asyncio
import json
import os
import threading
import time
import types

STUCK = os.environ.get("STUB_STUCK")  # a file: as long as it is there a request stops the loop


class _Site:
    def __init__(self, runner, sock, ssl_context=None):
        self.runner, self.sock = runner, sock

    async def start(self):
        await asyncio.start_server(self.runner, sock=self.sock)


def _tcp_site(runner, host=None, port=None, **options):
    raise RuntimeError("nobody gave this server a socket")


web = types.SimpleNamespace(SockSite=_Site, TCPSite=_tcp_site)


class PromptServer:
    """Runs a prompt by noting it: a node of class `Fail` fails, one of class `Note` appends its text to a file."""

    def __init__(self):
        self.history = {}
        self.queue = []
        self.lock = threading.Condition()

    def send_sync(self, event, data, sid=None):
        pass

    def answer(self, method, path, body):
        if STUCK and os.path.exists(STUCK):
            while os.path.exists(STUCK):
                time.sleep(0.02)
        if (method, path) == ("POST", "/prompt"):
            asked = json.loads(body)
            with self.lock:
                self.queue.append(asked)
                self.lock.notify()
            return {"prompt_id": asked["prompt_id"], "number": 0, "node_errors": {}}
        if path.startswith("/history/"):
            return {key: value for key, value in self.history.items() if key == path.removeprefix("/history/")}
        return {"exec_info": {"queue_remaining": len(self.queue)}}

    async def serve(self, reader, writer):
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        method, path, _ = head.split(" ", 2)
        length = next((int(line.split(":")[1]) for line in head.splitlines() if line.lower().startswith("content-length")), 0)
        text = json.dumps(self.answer(method, path, await reader.readexactly(length))).encode()
        writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%s" % (len(text), text))
        await writer.drain()
        writer.close()


def prompt_worker(server):
    while True:
        with server.lock:
            server.lock.wait_for(lambda: server.queue)
            asked = server.queue[0]
        status = {"status_str": "success", "messages": []}
        for node, value in asked["prompt"].items():
            server.send_sync("executing", {"node": node, "prompt_id": asked["prompt_id"]})
            if value["class_type"] == "Fail":
                error = {"node_id": node, "node_type": "Fail", "exception_type": "ValueError", "exception_message": "as asked"}
                status = {"status_str": "error", "messages": [["execution_error", {**error, "prompt_id": asked["prompt_id"]}]]}
                break
            if value["class_type"] == "Note":
                with open(value["inputs"]["path"], "a") as file:
                    file.write(f"begin {os.environ['RESVISOR_WORKER']}\n")
                    file.flush()
                    time.sleep(value["inputs"].get("seconds", 0))
                    file.write(f"end {os.environ['RESVISOR_WORKER']}\n")
        server.history[asked["prompt_id"]] = {"outputs": {}, "status": status}
        with server.lock:
            server.queue.pop(0)
        server.send_sync("executing", {"node": None, "prompt_id": asked["prompt_id"]})
