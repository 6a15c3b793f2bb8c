"""The fake's queue, history, check of prompts, and what runs them: ComfyUI's names and shapes, none of its weight."""

import copy
import heapq
import threading
import time
import traceback

import nodes

SENSITIVE_EXTRA_DATA_KEYS = ("auth_token_comfy_org", "api_key_comfy_org")


def _refused(kind, message, details=""):
    return False, {"type": kind, "message": message, "details": details, "extra_info": {}}, [], {}


def _wrong_inputs(prompt, node_id):
    """What is wrong with the inputs of one node, as entries of node_errors."""
    found = []
    inputs = prompt[node_id].get("inputs", {})
    for name, (kind, *_) in nodes.NODE_CLASS_MAPPINGS[prompt[node_id]["class_type"]].INPUT_TYPES()["required"].items():
        if name not in inputs:
            text = "Required input is missing"
            found.append({"type": "required_input_missing", "message": text, "details": name, "extra_info": {"input_name": name}})
        elif kind == "INT" and not isinstance(inputs[name], (int, list)):
            text = "Failed to convert an input value to a INT value"
            found.append({"type": "invalid_input_type", "message": text, "details": name, "extra_info": {"input_name": name}})
    return found


def _upstream(prompt, node_id):
    """The node and all it needs, what is needed first."""
    order = []

    def visit(current):
        if current in order or current not in prompt:
            return
        for value in prompt[current].get("inputs", {}).values():
            if isinstance(value, list):
                visit(str(value[0]))
        order.append(current)

    visit(node_id)
    return order


async def validate_prompt(prompt_id, prompt, partial_execution_list=None):
    outputs = []
    for node_id, node in prompt.items():
        if "class_type" not in node:
            return _refused("invalid_prompt", "Cannot execute because a node is missing the class_type property.", f"Node ID '#{node_id}'")
        kind = nodes.NODE_CLASS_MAPPINGS.get(node["class_type"])
        if kind is None:
            text = f"Cannot execute because node {node['class_type']} does not exist."
            return _refused("invalid_prompt", text, f"Node ID '#{node_id}'")
        if kind.OUTPUT_NODE and (partial_execution_list is None or node_id in partial_execution_list):
            outputs.append(node_id)
    if not outputs:
        return _refused("prompt_no_outputs", "Prompt has no outputs")
    good, errors = [], {}
    for output in outputs:
        wrong = {node_id: found for node_id in _upstream(prompt, output) if (found := _wrong_inputs(prompt, node_id))}
        for node_id, found in wrong.items():
            kind = prompt[node_id]["class_type"]
            errors.setdefault(node_id, {"errors": found, "dependent_outputs": [], "class_type": kind})["dependent_outputs"].append(output)
        if not wrong:
            good.append(output)
    if not good:
        return *_refused("prompt_outputs_failed_validation", "Prompt outputs failed validation")[:3], errors
    return True, None, good, errors


class PromptQueue:
    """Items are (number, prompt_id, prompt, extra_data, outputs, sensitive)."""

    def __init__(self, server):
        self.server = server
        self.changed = threading.Condition(threading.RLock())
        self.queue, self.running, self.history = [], {}, {}
        self.counter = 0
        self.flags = []

    def put(self, item):
        with self.changed:
            self.counter += 1
            heapq.heappush(self.queue, (item[0], self.counter, item))
            self.changed.notify()
        self.server.queue_updated()

    def get(self, timeout=None):
        with self.changed:
            while not self.queue:
                self.changed.wait(timeout)
            number, key, item = heapq.heappop(self.queue)
            self.running[key] = item
        self.server.queue_updated()
        return item, key

    def task_done(self, key, result, status):
        with self.changed:
            item = self.running.pop(key)
            self.history[item[1]] = {"prompt": item[:5], **copy.deepcopy(result), "status": status}
        self.server.queue_updated()

    def get_current_queue_volatile(self):
        with self.changed:
            return list(self.running.values()), [item for _, _, item in sorted(self.queue, key=lambda entry: entry[:2])]

    get_current_queue = get_current_queue_volatile

    def get_tasks_remaining(self):
        with self.changed:
            return len(self.queue) + len(self.running)

    def wipe_queue(self):
        with self.changed:
            self.queue = []
        self.server.queue_updated()

    def delete_queue_item(self, wanted):
        with self.changed:
            left = [entry for entry in self.queue if not wanted(entry[2])]
            found, self.queue = len(left) != len(self.queue), left
            heapq.heapify(self.queue)
        if found:
            self.server.queue_updated()
        return found

    def get_history(self, prompt_id=None, max_items=None, offset=-1):
        with self.changed:
            if prompt_id is not None:
                return {prompt_id: self.history[prompt_id]} if prompt_id in self.history else {}
            items = list(self.history.items())
            if offset < 0:
                offset = max(0, len(items) - max_items) if max_items is not None else 0
            return dict(items[offset : None if max_items is None else offset + max_items])

    def wipe_history(self):
        with self.changed:
            self.history = {}

    def delete_history_item(self, prompt_id):
        with self.changed:
            self.history.pop(prompt_id, None)

    def set_flag(self, name, value):
        with self.changed:
            self.flags.append((name, value))


class PromptExecutor:
    def __init__(self, server):
        self.server = server
        self.messages, self.outputs, self.meta = [], {}, {}
        self.success = True

    def add_message(self, event, data, broadcast=False):
        data = {**data, "timestamp": int(time.time() * 1000)}
        self.messages.append((event, data))
        if self.server.client_id is not None or broadcast:
            self.server.send_sync(event, data, self.server.client_id)

    def execute(self, prompt, prompt_id, extra_data, outputs):
        nodes.state.interrupted = False
        nodes.state.server, nodes.state.prompt_id = self.server, prompt_id
        self.server.client_id = nodes.state.client_id = extra_data.get("client_id")
        self.messages, self.outputs, self.meta, self.success = [], {}, {}, True
        self.add_message("execution_start", {"prompt_id": prompt_id})
        self.add_message("execution_cached", {"nodes": [], "prompt_id": prompt_id})
        order = []
        for output in outputs:
            order += [node_id for node_id in _upstream(prompt, output) if node_id not in order]
        for node_id in order:
            if not self._run_node(prompt, prompt_id, node_id):
                self.success = False
                return
        self.add_message("execution_success", {"prompt_id": prompt_id})

    def _run_node(self, prompt, prompt_id, node_id):
        node = prompt[node_id]
        place = {"prompt_id": prompt_id, "node_id": node_id, "node_type": node["class_type"]}
        nodes.state.node_id = self.server.last_node_id = node_id
        shown = {"node": node_id, "display_node": node_id, "prompt_id": prompt_id}
        if self.server.client_id is not None:
            self.server.send_sync("executing", shown, self.server.client_id)
        inputs = {name: value for name, value in node.get("inputs", {}).items() if not isinstance(value, list)}
        if "images" in node.get("inputs", {}):
            inputs["images"] = None
        try:
            result = nodes.NODE_CLASS_MAPPINGS[node["class_type"]]().run(**inputs)
        except nodes.Interrupted:
            self.add_message("execution_interrupted", {**place, "executed": []}, broadcast=True)
            return False
        except Exception as error:
            trace = traceback.format_tb(error.__traceback__)
            more = {"executed": [], "exception_message": str(error), "exception_type": type(error).__name__, "traceback": trace}
            self.add_message("execution_error", {**place, **more, "current_inputs": {}, "current_outputs": []})
            return False
        ui = result.get("ui") if isinstance(result, dict) else None
        if ui is not None:
            self.outputs[node_id] = ui
            self.meta[node_id] = {"node_id": node_id, "display_node": node_id, "parent_node": None, "real_node_id": node_id}
            if self.server.client_id is not None:
                self.server.send_sync("executed", {**shown, "output": ui}, self.server.client_id)
        return True
