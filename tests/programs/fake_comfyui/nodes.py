"""Nodes of the fake: sinks with ComfyUI's names, so that graphs can be classified, and Fake* nodes that do what a test needs."""

import os
import select
import struct
import sys
import time
import zlib

import folder_paths

TURN_S = 0.02


class Interrupted(Exception):
    """As InterruptProcessingException."""


class _State:
    interrupted = False
    server = None
    client_id = None
    prompt_id = node_id = ""


state = _State()


def check_interrupt():
    if state.interrupted:
        state.interrupted = False
        raise Interrupted


def picture(side=8, extra=0):
    """A PNG; `extra` bytes more in a chunk that nobody reads."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = b"".join(b"\0" + b"\x20\x80\xf0" * side for _ in range(side))
    head = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    fill = chunk(b"fiLl", bytes(i & 0xFF for i in range(256)) * (extra // 256 + 1)) if extra else b""
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + fill + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def wait_gate(path):
    """Until the test opens the FIFO, or the prompt is interrupted."""
    if not path:
        return
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        while not any(events & (select.POLLIN | select.POLLHUP) for _, events in poll.poll(TURN_S * 1000)):
            check_interrupt()
        os.read(fd, 1)
    finally:
        os.close(fd)


def send(event, data):
    state.server.send_sync(event, data, state.client_id)


class _Node:
    """optional `images` makes an order between nodes."""

    RETURN_TYPES, FUNCTION, CATEGORY, OUTPUT_NODE = ("IMAGE",), "run", "fake", False
    REQUIRED, OPTIONAL = {}, {}

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": dict(cls.REQUIRED), "optional": {"images": ("IMAGE",), **cls.OPTIONAL}}


def _text(default=""):
    return ("STRING", {"default": default})


def _number(default):
    return ("INT", {"default": default, "min": 0, "max": 1 << 40})


class EmptyImage(_Node):
    REQUIRED = {"width": _number(8), "height": _number(8), "color": _number(0)}

    def run(self, images=None, **_):
        return (None,)


class FakeGate(_Node):
    """Stands at a FIFO until the test opens it."""

    REQUIRED = {"path": _text()}

    def run(self, path, images=None):
        wait_gate(path)
        return (None,)


class FakeSteps(_Node):
    """Progress and previews: `preview` is a type of binary frame (1 or 4, 0 = none) with `bytes` bytes. A gate after each step if given."""

    OPTIONAL = {"steps": _number(3), "preview": _number(0), "bytes": _number(1000), "path": _text()}

    def run(self, steps=3, preview=0, bytes=1000, path="", images=None):
        for step in range(1, steps + 1):
            check_interrupt()
            send("progress", {"value": step, "max": steps, "prompt_id": state.prompt_id, "node": state.node_id})
            if preview:
                self.show(preview, max(bytes, 0))
            wait_gate(path)
        return (None,)

    @staticmethod
    def show(kind, size):
        """The picture's bytes say whose prompt it is: a client can tell whether it is his."""
        body = (state.prompt_id.encode() + b" ").ljust(size, b"x")
        if kind == 1:
            send(1, struct.pack(">I", 1) + body)
        else:
            send(4, ({"node_id": state.node_id, "prompt_id": state.prompt_id, "image_type": "image/jpeg"}, body))


class FakeText(_Node):
    """A text on the node: binary frame of type 3."""

    OPTIONAL = {"text": _text("hello")}

    def run(self, text="hello", images=None):
        node = state.node_id.encode()
        send(3, struct.pack(">I", len(node)) + node + text.encode())
        return (None,)


class FakeRaise(_Node):
    OPTIONAL = {"text": _text("no such luck")}

    def run(self, text="no such luck", images=None):
        raise ValueError(text)


class FakeExit(_Node):
    """Ends the prompt thread."""

    OPTIONAL = {"code": _number(3)}

    def run(self, code=3, images=None):
        sys.exit(code)


class FakeKill(_Node):
    """Ends the process, once per mark: the file `mark` says that it was here."""

    OPTIONAL = {"signal": _number(9), "mark": _text()}

    def run(self, signal=9, mark="", images=None):
        if mark:
            try:
                os.close(os.open(mark, os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                return (None,)
        os.kill(os.getpid(), signal)
        time.sleep(60)
        return (None,)


class FakeHangLoop(_Node):
    """The event loop stands still until the gate opens: nothing is answered; the prompt itself goes on."""

    REQUIRED = {"path": _text()}

    def run(self, path, images=None):
        def block():
            fd = os.open(path, os.O_RDONLY)
            os.read(fd, 1)
            os.close(fd)

        state.server.loop.call_soon_threadsafe(block)
        return (None,)


class FakeLog(_Node):
    """Lines of a log."""

    OPTIONAL = {"lines": _number(10)}

    def run(self, lines=10, images=None):
        for i in range(lines):
            print(f"fake line {i}", file=sys.stderr)
        sys.stderr.flush()
        return (None,)


class _Sink(_Node):
    OUTPUT_NODE, RETURN_TYPES = True, ()
    KIND, KEY, SUFFIX = "output", "images", ".png"
    REQUIRED, OPTIONAL = {"images": ("IMAGE",)}, {"filename_prefix": _text("fake"), "bytes": _number(0)}

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": dict(cls.REQUIRED), "optional": dict(cls.OPTIONAL)}

    def run(self, images=None, filename_prefix="fake", bytes=0):
        path, name, subfolder = folder_paths.new_file(self.KIND, filename_prefix, self.SUFFIX)
        with open(path, "wb") as file:
            file.write(picture(extra=bytes))
        return {"ui": {self.KEY: [{"filename": name, "subfolder": subfolder, "type": self.KIND}]}}


class SaveImage(_Sink):
    pass


class PreviewImage(_Sink):
    KIND = "temp"


class SaveAnimatedWEBP(_Sink):
    """A video, by its class."""

    SUFFIX = ".webp"


class SaveAudio(_Sink):
    KEY, SUFFIX = "audio", ".flac"


NODE_CLASS_MAPPINGS = {
    found.__name__: found
    for found in (
        EmptyImage, FakeGate, FakeSteps, FakeText, FakeRaise, FakeExit, FakeKill, FakeHangLoop, FakeLog, SaveImage, PreviewImage,
        SaveAnimatedWEBP, SaveAudio,
    )  # fmt: skip
}
NODE_DISPLAY_NAME_MAPPINGS = {}
