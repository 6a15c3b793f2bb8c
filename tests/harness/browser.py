"""The system's Chromium without a window, driven by the DevTools protocol over a pair of pipes: nothing to install beside it."""

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import tempfile
import time

NAMES = ("chromium", "chromium-browser", "google-chrome")
START_S = 60
TIMEOUT_S = 60
TURN_MS = 50


def find():
    """Its path, or None."""
    return next((path for path in map(shutil.which, NAMES) if path), None)


class Failed(AssertionError):
    pass


class Browser:
    """One page. messages: (level, text) of its console; exceptions: texts; answers: (status, URL); failed: (reason, URL)."""

    def __init__(self, width=1280, height=800):
        self.folder = tempfile.mkdtemp(prefix="rv-browser-", dir="/tmp")
        self.messages, self.exceptions, self.answers, self.failed = [], [], [], []
        self._urls, self._replies, self._number, self._buffer = {}, {}, 0, b""
        self.session = None
        command = [
            find(), "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--disable-sync",
            "--disable-extensions", "--disable-background-networking", "--disable-component-update", "--disable-default-apps",
            "--hide-scrollbars", "--mute-audio", "--remote-debugging-pipe", f"--user-data-dir={self.folder}/profile",
            f"--window-size={width},{height}", "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1", "about:blank",
        ]  # fmt: skip
        theirs_in, self._to = os.pipe()
        self._from, theirs_out = os.pipe()
        self._log = open(f"{self.folder}/log", "wb")
        try:
            self.process = subprocess.Popen(
                ["sh", "-c", f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}', "sh", *command],
                stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log, pass_fds=[theirs_in, theirs_out],
                start_new_session=True, env={**os.environ, "HOME": self.folder},
            )  # fmt: skip
        finally:
            os.close(theirs_in)
            os.close(theirs_out)
        try:
            self._attach()
        except BaseException:
            self.close()
            raise

    def _attach(self):
        deadline = time.monotonic() + START_S
        pages = []
        while not pages:
            found = self.call("Target.getTargets", timeout=max(1, deadline - time.monotonic()))
            pages = [target["targetId"] for target in found["targetInfos"] if target["type"] == "page"]
        self.session = self.call("Target.attachToTarget", targetId=pages[0], flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        """Ends it and everything that it has started."""
        with contextlib.suppress(Exception):
            self.session = None
            self.call("Browser.close", timeout=10)
        for fd in (self._to, self._from):
            os.close(fd)
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            pass
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, 9)
        self.process.wait(10)
        self._log.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    # ---- the protocol ----

    def call(self, method, timeout=TIMEOUT_S, **parameters):
        """The result of a command; events that come meanwhile are kept."""
        self._number += 1
        number = self._number
        message = {"id": number, "method": method, "params": parameters, **({"sessionId": self.session} if self.session else {})}
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._to, data) :]
        deadline = time.monotonic() + timeout
        while number not in self._replies:
            self._read(deadline, method)
        reply = self._replies.pop(number)
        if "error" in reply:
            raise Failed(f"{method}: {reply['error']}")
        return reply["result"]

    def _read(self, deadline, what):
        left = deadline - time.monotonic()
        if left <= 0 or not select.select([self._from], [], [], left)[0]:
            raise Failed(f"{what} did not end; console: {self.messages[-20:]}")
        data = os.read(self._from, 1 << 20)
        if not data:
            with open(f"{self.folder}/log", errors="replace") as log:
                raise Failed(f"the browser has ended in {what}: {log.read()[-2000:]}")
        self._buffer += data
        *whole, self._buffer = self._buffer.split(b"\0")
        for text in whole:
            message = json.loads(text)
            if "id" in message:
                self._replies[message["id"]] = message
            else:
                self._on_event(message["method"], message["params"])

    def _on_event(self, method, data):
        if method == "Runtime.consoleAPICalled":
            text = " ".join(str(value.get("value", value.get("description", value["type"]))) for value in data["args"])
            self.messages.append((data["type"], text))
        elif method == "Runtime.exceptionThrown":
            details = data["exceptionDetails"]
            self.exceptions.append(f"{details['text']} {details.get('exception', {}).get('description', '')} at {details.get('url')}")
        elif method == "Log.entryAdded":
            self.messages.append((data["entry"]["level"], f"{data['entry']['text']} {data['entry'].get('url', '')}"))
        elif method == "Network.requestWillBeSent":
            self._urls[data["requestId"]] = data["request"]["url"]
        elif method == "Network.responseReceived":
            self.answers.append((data["response"]["status"], data["response"]["url"]))
        elif method == "Network.loadingFailed" and not data.get("canceled"):
            self.failed.append((data["errorText"], self._urls.get(data["requestId"], "?")))

    # ---- the page ----

    def open(self, url):
        self.call("Page.navigate", url=url)

    def run(self, code, timeout=TIMEOUT_S):
        """The value of an expression; a promise is waited for."""
        found = self.call("Runtime.evaluate", timeout=timeout, expression=code, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in found:
            details = found["exceptionDetails"]
            raise Failed(f"{code}: {details['text']} {details.get('exception', {}).get('description', '')}")
        return found["result"].get("value")

    def wait(self, condition, timeout=TIMEOUT_S):
        """Waits in the page until an expression is true."""
        deadline = time.monotonic() + timeout
        code = f"""new Promise((resolve) => {{
            const look = (left) => {{
                let found = null;
                try {{ found = ({condition}); }} catch (error) {{ found = null; }}
                if (found || left <= 0) resolve(Boolean(found)); else setTimeout(look, {TURN_MS}, left - 1);
            }};
            look(40);
        }})"""
        while time.monotonic() < deadline:
            try:
                found = self.run(code, timeout=max(1, deadline - time.monotonic()))
            except Failed as error:
                if not any(word in str(error) for word in ("context", "navigated", "did not end")):  # the page was changed below us
                    raise
                found = False
            if found:
                return
        raise Failed(f"{condition} did not become true within {timeout} s; console: {self.messages[-20:]}, {self.exceptions}")

    def click(self, element):
        """The mouse on the middle of an element; element is an expression."""
        x, y = self.run(f"(() => {{ const r = ({element}).getBoundingClientRect(); return [r.x + r.width / 2, r.y + r.height / 2]; }})()")
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="none" if kind == "mouseMoved" else "left", clickCount=1)

    def screenshot(self, path):
        data = base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])
        with open(path, "wb") as file:
            file.write(data)
        return data
