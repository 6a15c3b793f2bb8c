"""Registration of packs, in the order that the test asks for; as silent as ComfyUI's own."""

import importlib.util
import logging
import os

NODE_CLASS_MAPPINGS = {}


async def load_custom_node(module_path, ignore=set(), module_parent="custom_nodes"):  # noqa: B006
    try:
        spec = importlib.util.spec_from_file_location("pack_" + os.path.basename(module_path), module_path + "/__init__.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        for name, node in module.NODE_CLASS_MAPPINGS.items():
            if name not in ignore:
                NODE_CLASS_MAPPINGS[name] = node
        return True
    except Exception as error:
        logging.warning(f"Cannot import {module_path} module for custom nodes: {error}")
        return False


async def init_extra_nodes():
    folder = os.environ.get("STUB_PACKS")
    for name in sorted(os.listdir(folder)) if folder else []:
        await load_custom_node(os.path.join(folder, name))
