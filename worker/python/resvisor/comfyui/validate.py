"""`POST /resvisor/validate` of ComfyUI's own server: says what ComfyUI would answer to a prompt, and queues nothing."""

import copy
import inspect
import sys
from types import ModuleType
from typing import Any

from .report import log

PATH = "/resvisor/validate"


def add_route(module: ModuleType) -> None:
    """module: ComfyUI's `server`, before it makes its server."""
    original = getattr(module.PromptServer, "add_routes", None)
    if original is None:
        log("this ComfyUI's server has no add_routes; prompts are judged when they run, not when they come")
        return

    def add_routes(self: Any) -> Any:
        async def handle(request: Any) -> Any:
            status, answer = await judge(self, await request.json())
            return module.web.json_response(answer, status=status)

        self.routes.post(PATH)(handle)
        return original(self)

    module.PromptServer.add_routes = add_routes


async def judge(server: Any, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """(status, answer): 400 with ComfyUI's own answer, or 200 with node_errors and outputs_to_execute.

    Packs may change a prompt when it comes (ComfyUI's on_prompt handlers), and tell their pages about it. They are asked
    only if the prompt is not good without them, since they are asked again when it is queued.
    """
    before = copy.deepcopy(body) if getattr(server, "on_prompt_handlers", None) else None
    found = await _validate(body)
    if before is not None and not found[0]:
        found = await _validate(server.trigger_on_prompt(before))
    good, error, outputs, node_errors = found
    if not good:
        return 400, {"error": error, "node_errors": node_errors}
    return 200, {"node_errors": node_errors, "outputs_to_execute": outputs}


async def _validate(body: dict[str, Any]) -> tuple[Any, ...]:
    """validate_prompt has taken one argument, two and three; it became async in between."""
    execution: Any = sys.modules["execution"]
    wanted = len(inspect.signature(execution.validate_prompt).parameters)
    given = (body.get("prompt_id", ""), body["prompt"], body.get("partial_execution_targets"))
    found = execution.validate_prompt(*(given[1:2] if wanted == 1 else given[:wanted]))
    return tuple(await found if inspect.isawaitable(found) else found)
