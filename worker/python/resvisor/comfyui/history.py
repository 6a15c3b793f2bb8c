"""`history.json`: what ComfyUI's history says of a prompt, as an output of its job. The router's history is made of these."""

import json
import math
from typing import Any

NAME = "history.json"
SIZE_MAX = 32 * 1024 * 1024  # bytes; the router does not show a larger one (RV_HISTORY_MAX)
SECRETS = ("auth_token_comfy_org", "api_key_comfy_org")  # older ComfyUIs leave them in extra_data


def dump(job_id: str, entry: dict[str, Any], keep_client: bool) -> bytes:
    """The entry as JSON, under the job's id. keep_client: the client id is the client's own."""
    entry = dict(entry)
    prompt = entry.get("prompt")
    if isinstance(prompt, list | tuple) and len(prompt) > 3 and isinstance(prompt[3], dict):
        hidden = SECRETS if keep_client else (*SECRETS, "client_id")
        extra = {key: value for key, value in prompt[3].items() if key not in hidden}
        entry["prompt"] = [prompt[0], job_id, prompt[2], extra, *prompt[4:5]]
    data = _encode(entry)
    if len(data) > SIZE_MAX:
        entry["outputs"] = {}
        data = _encode(entry)
    if len(data) > SIZE_MAX:
        entry.pop("prompt", None)
        status = entry.get("status")
        entry["status"] = {**status, "messages": []} if isinstance(status, dict) else None
        data = _encode({"prompt": [0, job_id, {}, {}, []], **entry})
    return data


def _encode(value: Any) -> bytes:
    try:
        return json.dumps(value, allow_nan=False).encode()
    except ValueError:  # no JSON, and browsers refuse it
        return json.dumps(_finite(value)).encode()


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
