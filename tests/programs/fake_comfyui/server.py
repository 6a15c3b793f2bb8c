"""The fake's server: ComfyUI's routes in their simplest form, and the socket through which tests ask for broken frames."""

import asyncio
import hashlib
import json
import os
import struct
import sys
import time
import uuid

import execution
import faults
import folder_paths
import nodes
from aiohttp import web
from comfyui_version import __version__


class PromptServer:
    instance = None

    def __init__(self, loop):
        PromptServer.instance = self
        self.loop = loop
        self.messages = asyncio.Queue()
        self.sockets, self.sockets_metadata = {}, {}
        self.prompt_queue = execution.PromptQueue(self)
        self.number = 0
        self.client_id = self.last_node_id = self.last_prompt_id = None
        self.on_prompt_handlers = []
        self.app = web.Application(client_max_size=100 << 20)
        self.app.first = faults.first
        self.routes = web.RouteTableDef()
        self.files = {}  # userdata and settings
        for handler in (queue_routes, file_routes, read_routes, user_routes, page_routes):
            handler(self, self.routes)

    def add_routes(self):
        for method, path, handler in list(self.routes):
            self.app.router.add_route(method, "/api" + path, handler)
        self.app.add_routes(self.routes)

    # ---- events ----

    def send_sync(self, event, data, sid=None):
        self.loop.call_soon_threadsafe(self.messages.put_nowait, (event, data, sid))

    def queue_updated(self):
        self.send_sync("status", {"status": self.get_queue_info()})

    def get_queue_info(self):
        return {"exec_info": {"queue_remaining": self.prompt_queue.get_tasks_remaining()}}

    async def send(self, event, data, sid=None):
        sockets = list(self.sockets.values()) if sid is None else [self.sockets[sid]] if sid in self.sockets else []
        for socket in sockets:
            try:
                await self._send_one(socket, event, data)
            except OSError:
                pass

    async def _send_one(self, socket, event, data):
        if isinstance(event, str):
            await socket.send_json({"type": event, "data": data})
            return
        if isinstance(data, tuple):
            metadata = json.dumps(data[0]).encode()
            data = struct.pack(">I", len(metadata)) + metadata + data[1]
        await socket.send_bytes(struct.pack(">I", event) + data)

    async def publish_loop(self):
        while True:
            await self.send(*await self.messages.get())

    def trigger_on_prompt(self, data):
        for handler in self.on_prompt_handlers:
            data = handler(data)
        return data

    # ---- life ----

    async def start(self, address, port):
        runner = web.AppRunner(self.app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, address, port).start()
        control = f"control/{os.getpid()}.sock"  # relative: a test's folder may have a long name
        await asyncio.start_unix_server(self.control, control)
        try:
            await self.publish_loop()
        finally:
            os.unlink(control)

    async def control(self, reader, writer):
        """One request of the test as a line of JSON, one answer."""
        asked = json.loads(await reader.readline())
        try:
            answer = await getattr(self, f"control_{asked.pop('do')}")(**asked)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        writer.write(json.dumps(answer).encode() + b"\n")
        await writer.drain()
        writer.close()

    async def control_state(self):
        flags = {sid: found["feature_flags"] for sid, found in self.sockets_metadata.items()}
        return {"sockets": sorted(self.sockets), "feature_flags": flags, "connections": self.app["runner"].connections}

    async def control_push(self, client, kind, **parameters):
        """Begins to send; it may take until the other side reads. Pushes to one socket keep their order."""
        socket = self.sockets[client]
        before = getattr(socket, "push", None)

        async def run():
            if before is not None:
                await before
            try:
                await faults.push(socket, kind, parameters)
            except (OSError, AttributeError):  # the other side has gone; asyncio may say the latter then
                pass
            faults.note(pushed=kind, client=client)

        socket.push = asyncio.create_task(run())
        return {}

    async def control_event(self, event, data, client=None):
        await self.send(event, data, client)
        return {}


def _websocket(server):
    async def handler(request):
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        sid = request.query.get("clientId") or uuid.uuid4().hex
        server.sockets[sid] = socket
        server.sockets_metadata[sid] = {"feature_flags": {}}
        try:
            await server.send("status", {"status": server.get_queue_info(), "sid": sid}, sid)
            if server.client_id == sid and server.last_node_id is not None:
                await server.send("executing", {"node": server.last_node_id}, sid)
            first = True
            while (message := await socket.receive()) is not None:
                text = message[1].decode(errors="replace") if message[0] == web.TEXT else f"binary {len(message[1])}"
                faults.note(ws=sid, text=text[:2000])
                if first and text.startswith("{") and json.loads(text).get("type") == "feature_flags":
                    server.sockets_metadata[sid]["feature_flags"] = json.loads(text).get("data", {})
                    await server.send("feature_flags", {"supports_preview_metadata": True, "max_upload_size": 100 << 20}, sid)
                first = False
        finally:
            if server.sockets.get(sid) is socket:
                server.sockets.pop(sid)
                server.sockets_metadata.pop(sid)
            faults.note(ws=sid, text="", gone=True)

    return handler


def queue_routes(server, routes):
    queue = server.prompt_queue
    routes.get("/ws")(_websocket(server))

    @routes.get("/prompt")
    async def get_prompt(request):
        return web.json_response(server.get_queue_info())

    @routes.post("/prompt")
    async def post_prompt(request):
        body = server.trigger_on_prompt(await request.json())
        if "prompt" not in body:
            error = {"type": "no_prompt", "message": "No prompt provided", "details": "No prompt provided", "extra_info": {}}
            return web.json_response({"error": error, "node_errors": {}}, status=400)
        number = float(body["number"]) if "number" in body else -server.number if body.get("front") else server.number
        server.number += 1
        prompt_id = str(body.get("prompt_id", uuid.uuid4()))
        valid, error, outputs, node_errors = await execution.validate_prompt(prompt_id, body["prompt"], body.get("partial_execution_targets"))
        if not valid:
            return web.json_response({"error": error, "node_errors": node_errors}, status=400)
        extra = dict(body.get("extra_data", {}))
        if "client_id" in body:
            extra["client_id"] = body["client_id"]
        sensitive = {key: extra.pop(key) for key in execution.SENSITIVE_EXTRA_DATA_KEYS if key in extra}
        extra["create_time"] = int(time.time() * 1000)
        queue.put((number, prompt_id, body["prompt"], extra, outputs, sensitive))
        return web.json_response({"prompt_id": prompt_id, "number": number, "node_errors": node_errors})

    @routes.get("/queue")
    async def get_queue(request):
        running, pending = queue.get_current_queue_volatile()
        return web.json_response({"queue_running": [item[:5] for item in running], "queue_pending": [item[:5] for item in pending]})

    @routes.post("/queue")
    async def post_queue(request):
        body = await request.json()
        if body.get("clear"):
            queue.wipe_queue()
        for wanted in body.get("delete", []):
            queue.delete_queue_item(lambda item, wanted=wanted: item[1] == wanted)
        return web.Response()

    @routes.get("/history")
    async def get_history(request):
        most, offset = request.query.get("max_items"), request.query.get("offset")
        return web.json_response(queue.get_history(max_items=int(most) if most else None, offset=int(offset) if offset else -1))

    @routes.get("/history/{prompt_id}")
    async def get_history_of(request):
        return web.json_response(queue.get_history(prompt_id=request.match_info["prompt_id"]))

    @routes.post("/history")
    async def post_history(request):
        body = await request.json()
        if body.get("clear"):
            queue.wipe_history()
        for wanted in body.get("delete", []):
            queue.delete_history_item(wanted)
        return web.Response()

    @routes.post("/interrupt")
    async def post_interrupt(request):
        text = await request.text()
        wanted = (json.loads(text) if text else {}).get("prompt_id")
        if not wanted or any(item[1] == wanted for item in queue.get_current_queue()[0]):
            nodes.state.interrupted = True
        return web.Response()

    @routes.post("/free")
    async def post_free(request):
        for name, value in (await request.json()).items():
            queue.set_flag(name, value)
        return web.Response()


def _inside(kind, subfolder, filename):
    """The path of a file in one of the folders; None if it would lie outside."""
    folder = folder_paths.get_directory_by_type(kind)
    path = os.path.abspath(os.path.join(folder or "", subfolder or "", filename))
    return path if folder and os.path.commonpath((path, os.path.abspath(folder))) == os.path.abspath(folder) else None


def file_routes(server, routes):
    @routes.get("/view")
    async def view(request):
        query = request.query
        path = _inside(query.get("type", "output"), query.get("subfolder"), os.path.basename(query.get("filename", "")))
        if "filename" not in query or path is None:
            return web.Response(status=400)
        if not os.path.isfile(path):
            return web.Response(status=404)
        return web.FileResponse(path, headers={"Content-Disposition": f'filename="{os.path.basename(path)}"'})

    async def upload(request):
        form = await request.post()
        image = form.get("image")
        kind = form.get("type", "input")
        if image is None or isinstance(image, str) or not image.filename:
            return web.Response(status=400)
        path = _inside(kind, form.get("subfolder"), image.filename)
        if path is None:
            return web.Response(status=400)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as file:
            file.write(image.data)
        faults.note(upload=image.filename, sha256=hashlib.sha256(image.data).hexdigest())
        return web.json_response({"name": image.filename, "subfolder": form.get("subfolder", ""), "type": kind})

    routes.post("/upload/image")(upload)
    routes.post("/upload/mask")(upload)


def _node_info(name):
    kind = nodes.NODE_CLASS_MAPPINGS[name]
    inputs = kind.INPUT_TYPES()
    return {
        "input": inputs, "input_order": {key: list(value) for key, value in inputs.items()}, "output": list(kind.RETURN_TYPES),
        "output_is_list": [False] * len(kind.RETURN_TYPES), "output_name": list(kind.RETURN_TYPES), "name": name,
        "display_name": name, "description": "", "python_module": "nodes", "category": kind.CATEGORY,
        "output_node": kind.OUTPUT_NODE,
    }  # fmt: skip


def read_routes(server, routes):
    @routes.get("/object_info")
    async def object_info(request):
        return web.json_response({name: _node_info(name) for name in nodes.NODE_CLASS_MAPPINGS})

    @routes.get("/object_info/{name}")
    async def object_info_of(request):
        name = request.match_info["name"]
        return web.json_response({name: _node_info(name)} if name in nodes.NODE_CLASS_MAPPINGS else {})

    @routes.get("/system_stats")
    async def system_stats(request):
        system = {"os": "posix", "ram_total": 1 << 34, "ram_free": 1 << 33, "comfyui_version": __version__, "python_version": sys.version}
        device = {"name": "cpu", "type": "cpu", "index": None, "vram_total": 1 << 34, "vram_free": 1 << 33}
        return web.json_response({"system": {**system, "argv": sys.argv}, "devices": [device]})

    fixed = {
        "/features": {"supports_preview_metadata": True}, "/embeddings": [], "/extensions": ["/extensions/core/fake.js"],
        "/models": ["checkpoints", "loras"], "/models/{folder}": ["one.safetensors"], "/view_metadata/{folder}": {},
        "/experiment/models": [{"name": "checkpoints", "folders": []}], "/experiment/models/{folder}": [],
        "/i18n": {}, "/workflow_templates": {}, "/global_subgraphs": {}, "/node_replacements": {}, "/tags": {"tags": []},
        "/assets": {"assets": [], "total": 0}, "/internal/folder_paths": {}, "/internal/logs": "", "/internal/files/{kind}": [],
        "/internal/logs/raw": {"entries": [], "size": {"cols": 80, "rows": 24}},
    }  # fmt: skip
    for path, answer in fixed.items():

        async def give(request, answer=answer):
            return web.json_response(answer)

        routes.get(path)(give)

    @routes.patch("/internal/logs/subscribe")
    async def subscribe(request):
        return web.Response()

    # what a pack may add
    @routes.get("/fake_pack/who")
    async def who(request):
        return web.json_response({"pid": os.getpid(), "headers": request.headers.pairs})

    @routes.post("/fake_pack/echo")
    async def echo(request):
        return web.Response(body=await request.read(), content_type=request.headers.get("Content-Type", "text/plain"))

    @routes.get("/manager/reboot")
    async def reboot(request):
        os._exit(0)


def user_routes(server, routes):
    @routes.get("/users")
    async def users(request):
        return web.json_response({"storage": "server", "migrated": True})

    @routes.get("/settings")
    async def settings(request):
        return web.json_response({name.removeprefix("setting:"): json.loads(v) for name, v in server.files.items() if name.startswith("setting:")})

    @routes.get("/settings/{name}")
    async def setting(request):
        return web.json_response(json.loads(server.files.get("setting:" + request.match_info["name"], "null")))

    @routes.post("/settings/{name}")
    async def set_setting(request):
        server.files["setting:" + request.match_info["name"]] = await request.read()
        return web.Response()

    @routes.post("/settings")
    async def set_settings(request):
        server.files.update({f"setting:{name}": json.dumps(value).encode() for name, value in (await request.json()).items()})
        return web.Response()

    async def listing(request):
        return web.json_response([name.removeprefix("user:") for name in server.files if name.startswith("user:")])

    routes.get("/userdata")(listing)
    routes.get("/v2/userdata")(listing)

    @routes.get("/userdata/{file}")
    async def get_file(request):
        data = server.files.get("user:" + request.match_info["file"])
        return web.Response(status=404) if data is None else web.Response(body=data, content_type="application/octet-stream")

    @routes.post("/userdata/{file}")
    async def set_file(request):
        name = request.match_info["file"]
        server.files[f"user:{name}"] = await request.read()
        return web.json_response(name)

    @routes.post("/userdata/{file}/move/{dest}")
    async def move_file(request):
        server.files["user:" + request.match_info["dest"]] = server.files.pop("user:" + request.match_info["file"])
        return web.json_response(request.match_info["dest"])

    @routes.delete("/userdata/{file}")
    async def delete_file(request):
        return web.Response(status=204 if server.files.pop("user:" + request.match_info["file"], None) is not None else 404)


def page_routes(server, routes):
    async def page(request):
        return web.Response(text=f"<html><body>fake ComfyUI {os.getpid()}</body></html>", content_type="text/html")

    routes.get("/")(page)
    for path in ("/extensions/{path:.*}", "/templates/{path:.*}", "/docs/{path:.*}", "/assets/{path:.*}"):
        routes.get(path)(page)
    jobs_routes(server, routes)


def _jobs(queue):
    """Newest first, in the shape of newer versions' /api/jobs."""
    running, pending = queue.get_current_queue()
    found = [{"id": item[1], "status": "pending", "create_time": item[3].get("create_time")} for item in reversed(pending)]
    found += [{"id": item[1], "status": "in_progress", "create_time": item[3].get("create_time")} for item in running]
    for prompt_id, entry in reversed(queue.get_history().items()):
        status = "completed" if entry["status"]["completed"] else "failed"
        found.append({"id": prompt_id, "status": status, "create_time": entry["prompt"][3].get("create_time"), "outputs_count": len(entry["outputs"])})
    return found


def jobs_routes(server, routes):
    @routes.get("/jobs")
    async def jobs(request):
        found = _jobs(server.prompt_queue)
        offset, limit = int(request.query.get("offset", 0)), int(request.query.get("limit", 1000))
        pagination = {"offset": offset, "limit": limit, "total": len(found), "has_more": offset + limit < len(found)}
        return web.json_response({"jobs": found[offset : offset + limit], "pagination": pagination})

    @routes.get("/jobs/{job}")
    async def job(request):
        found = [job for job in _jobs(server.prompt_queue) if job["id"] == request.match_info["job"]]
        return web.json_response(found[0]) if found else web.json_response({"error": "Job not found"}, status=404)
