"""ComfyUI's own page, in a Chromium without a window, through the router: it loads, queues a prompt, shows its steps and the picture.

RESVISOR_SCREENSHOTS names a folder that keeps the pictures of the page.
"""

import importlib.util
import json
import os
import pathlib

import pytest
import tiny
from conftest import START_S, comfy_type
from harness import browser, http, procfs
from harness.service import Service

pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.skipif(not browser.find(), reason="there is no Chromium: deploy/install-dependencies.sh --full-tests"),
    pytest.mark.skipif(importlib.util.find_spec("comfyui_frontend_package") is None, reason="comfyui-frontend-package is not installed"),
]

# What the page asks for, and which a new installation does not have; and what it says where its makers cannot be reached.
NOT_THERE = ("/userdata/user.css", "/user.css", "/favicon.ico", "/userdata?dir=", "/userdata/comfy.templates.json")
NOT_THERE += ("/workflow_templates", "/templates/")
OF_ITS_OWN = ("api.comfy.org", "Failed to load resource", "reading 'id'", "graph accessed before initialization")

LOADED = "window.app && app.graph && app.extensionManager && app.vueAppReady && document.querySelector('canvas')"
EVENTS = ("progress", "b_preview", "executing", "executed", "execution_success", "execution_error", "status")
WATCH = f"window.seen = []; {json.dumps(EVENTS)}.forEach((kind) => app.api.addEventListener(kind, () => seen.push(kind))); true"
RUN = "[...document.querySelectorAll('button')].find((button) => button.innerText.trim() == 'Run')"
PICTURE = "app.graph.getNodeById(8).imgs[0]"
SHOWN = f"app.graph.getNodeById(8).imgs && {PICTURE}.complete && {PICTURE}.naturalWidth == 64"


@pytest.fixture(scope="module")
def service(tmp_path_factory, base):
    """One worker, with the frontend of its package instead of the empty one."""
    folder = tmp_path_factory.mktemp("frontend")
    service = http.listen(Service(folder, {"model_folders": [str(base / "models")]}))
    keys = comfy_type(base, state_folder=str(folder / "state"), accepts=["any"])
    at = keys["args"].index("--front-end-root")
    del keys["args"][at : at + 2]
    service.config["types"] = {"image": {**keys, "args": [*keys["args"], "--preview-method", "latent2rgb"]}}
    service.start()
    service.wait_ready(timeout=START_S)
    http.wait_front(service)
    yield service
    service.end()


@pytest.fixture(scope="module")
def screenshots(tmp_path_factory):
    folder = os.environ.get("RESVISOR_SCREENSHOTS")
    return pathlib.Path(folder) if folder else tmp_path_factory.mktemp("screenshots")


@pytest.fixture
def page(service):
    with http.Client(service) as client:
        settings = {"Comfy.TutorialCompleted": True, "Comfy.Minimap.Visible": False}
        assert client.post("/api/settings", settings).status == 200
    with browser.Browser() as page:
        page.open(f"http://127.0.0.1:{service.http_port}/")
        page.wait(LOADED)
        page.run(WATCH)
        yield page


def matters(page, service):
    """Errors that have to do with us."""
    ours = f"http://127.0.0.1:{service.http_port}"
    wrong = [f"{status} {url}" for status, url in page.answers if status >= 400 and not any(part in url for part in NOT_THERE)]
    wrong += [f"{reason} {url}" for reason, url in page.failed if url.startswith(ours)]
    wrong += [text for level, text in page.messages if level == "error" and not any(part in text for part in OF_ITS_OWN)]
    return wrong + page.exceptions


def test_the_page_queues_a_prompt_and_shows_the_picture(service, page, screenshots):
    page.run(f"app.loadApiJson({json.dumps(tiny.image(steps=8))}, 'image')")
    page.wait("app.graph._nodes.length == 9")
    page.run("app.graph.getNodeById(8).pos = [app.graph.getNodeById(9).pos[0], app.graph.getNodeById(9).pos[1] + 160]; true")
    page.run("app.extensionManager.command.execute('Comfy.Canvas.FitView').then(() => true)")
    page.click(RUN)
    page.wait("seen.includes('executing')")
    page.wait("seen.includes('execution_success') || seen.includes('execution_error')")
    seen = page.run("seen")
    assert "execution_error" not in seen and seen.count("progress") == 8, seen
    assert seen.count("b_preview") >= 1, seen
    page.wait(SHOWN)
    page.run("new Promise((resolve) => requestAnimationFrame(() => requestAnimationFrame(() => resolve(true))))")
    assert page.screenshot(screenshots / "frontend.png").startswith(b"\x89PNG")
    assert page.run(f"{PICTURE}.src").startswith(f"http://127.0.0.1:{service.http_port}/api/view?")
    assert not matters(page, service)
    with http.Client(service) as client:
        found = procfs.wait_until(lambda: client.get("/api/history?max_items=1").json, 20, "the prompt in the history")
    (entry,) = found.values()
    assert entry["status"]["status_str"] == "success" and entry["status"]["resvisor"]["type"] == "image", entry["status"]


def test_the_page_stays_alive_when_its_worker_is_killed(service, page, screenshots):
    """The page's own socket is ours: it hears of the end, and the next prompt runs without a reload."""
    page.run(f"app.loadApiJson({json.dumps(tiny.image(seed=3))}, 'image')")
    page.wait("app.graph._nodes.length == 9")
    worker = service.worker("image")
    os.kill(worker.pid, 9)
    service.wait_worker("image", starts=worker.starts + 1, timeout=100)
    http.wait_front(service)
    page.screenshot(screenshots / "after-restart.png")
    page.run("app.queuePrompt(0, 1).then(() => true)")
    page.wait("seen.includes('execution_success') || seen.includes('execution_error')", timeout=100)
    assert "execution_error" not in page.run("seen")
