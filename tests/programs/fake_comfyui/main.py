"""A fake ComfyUI: small, without torch, and able to break every rule. A test dependency only."""

import asyncio
import sys
import threading

from comfy.cli_args import args  # its arguments are read before anything else

import execution  # isort: skip
import server  # isort: skip


def prompt_worker(queue, instance):
    executor = execution.PromptExecutor(instance)
    while True:
        item, key = queue.get()
        instance.last_prompt_id = item[1]
        executor.execute(item[2], item[1], {**item[3], **item[5]}, item[4])
        instance.last_node_id = None
        result = {"outputs": executor.outputs, "meta": executor.meta}
        status = {"status_str": "success" if executor.success else "error", "completed": executor.success}
        queue.task_done(key, result, {**status, "messages": executor.messages})
        if instance.client_id is not None:
            instance.send_sync("executing", {"node": None, "prompt_id": item[1]}, instance.client_id)


async def run():
    instance = server.PromptServer(asyncio.get_running_loop())
    instance.add_routes()
    threading.Thread(target=prompt_worker, daemon=True, args=(instance.prompt_queue, instance)).start()
    await instance.start(args.listen, args.port)


if __name__ == "__main__":
    try:
        asyncio.run(run())
    except KeyboardInterrupt:
        print("Stopped server", file=sys.stderr)
