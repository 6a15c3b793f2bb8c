"""A ComfyUI without torch: enough for start, stop, port, log and warm-up of a worker. Faults by environment."""

import asyncio
import os
import signal
import sys
import threading

import folder_paths
import nodes
import server

print("arguments:", " ".join(sys.argv[1:]), flush=True)
print("saves as:", folder_paths.get_save_image_path("a/b", folder_paths.get_output_directory())[4], flush=True)
if os.environ.get("STUB_DEAF"):  # does not end when asked; says which signals came
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda got, frame: print("got", signal.Signals(got).name, flush=True))
for _ in range(int(os.environ.get("STUB_FLOOD_LINES", "0"))):
    print("a line of the flood, which is not interesting at all", flush=False)
print(os.environ.get("STUB_WORDS", "").encode().decode("unicode_escape"), flush=True)
for byte in os.environ.get("STUB_LAST_BYTES", "").encode():  # a write each, and no newline behind them
    os.write(2, bytes([byte]))
if os.environ.get("STUB_LAST_BYTES"):
    os._exit(1)
if os.environ.get("STUB_LAST_WORDS"):
    sys.exit(os.environ["STUB_LAST_WORDS"])


async def serve(found, address, port):
    await nodes.init_extra_nodes()
    threading.Thread(target=server.prompt_worker, args=(found,), daemon=True, name="Thread-1 (prompt_worker)").start()
    await server.web.TCPSite(found.serve, address, port).start()
    await asyncio.Event().wait()


def value(flag):
    return sys.argv[sys.argv.index(flag) + 1]


try:
    asyncio.run(serve(server.PromptServer(), value("--listen"), int(value("--port"))))
except KeyboardInterrupt:
    print("Stopped server", flush=True)
