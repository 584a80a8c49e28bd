"""A headless Chromium, driven over its own debugging protocol: what the tests in a browser share.

It needs Debian's `chromium` (or another Chromium or Chrome on PATH) and the package websocket-client, which JupyterLab
brings anyway; nothing is downloaded.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import websocket

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
# quiet and closed: no first-run pages, no calls home; --no-sandbox because tests may run as root in a container
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage", "--mute-audio",
    "--remote-debugging-port=0", "--remote-allow-origins=*", "--force-device-scale-factor=1",
)  # fmt: skip


def executable() -> str | None:
    """The browser's path; None where there is none."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


@contextlib.contextmanager
def jupyter(command: Callable[[int], Sequence[str]], folder: Path, own: Path, **more: str) -> Iterator[str]:
    """The address of the server that ``command(port)`` starts in `folder`; its settings and its log lie in `own`, and
    `more` are variables of its environment. It is ended afterwards. Its token is "course"."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    settings = {f"JUPYTER_{name}_DIR": str(own / name.lower()) for name in ("CONFIG", "DATA", "RUNTIME")}
    log = own / "lab.log"
    with log.open("w") as file:
        process = subprocess.Popen(
            command(port), cwd=folder, env={**os.environ, **settings, "HOME": str(own), **more},
            stdout=file, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            until = time.monotonic() + 120
            while True:
                assert process.poll() is None and time.monotonic() < until, log.read_text()[-3000:]
                with contextlib.suppress(OSError):
                    urllib.request.urlopen(f"http://127.0.0.1:{port}/api?token=course", timeout=5).close()
                    break
                time.sleep(0.3)
            yield f"http://127.0.0.1:{port}"
        finally:
            os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


@contextlib.contextmanager
def browser(width: int = 1280, height: int = 900) -> Iterator[Page]:
    """A page of a fresh browser; everything of it is gone afterwards."""
    program = executable()
    assert program, "no Chromium here"
    with tempfile.TemporaryDirectory(prefix="labkit-browser-", ignore_cleanup_errors=True) as profile:
        command = [program, *FLAGS, f"--user-data-dir={profile}", f"--window-size={width},{height}", "about:blank"]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            port = _port(Path(profile), process)
            tabs = json.load(urllib.request.urlopen(f"http://127.0.0.1:{port}/json", timeout=10))
            page = Page(next(tab["webSocketDebuggerUrl"] for tab in tabs if tab["type"] == "page"))
            page.resize(width, height)
            try:
                yield page
            finally:
                page.socket.close()
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _port(profile: Path, process: subprocess.Popen[bytes]) -> int:
    until = time.monotonic() + 60
    while time.monotonic() < until and process.poll() is None:
        with contextlib.suppress(OSError, ValueError, IndexError):
            return int((profile / "DevToolsActivePort").read_text().split()[0])
        time.sleep(0.1)
    raise AssertionError("the browser did not start")


class Page:
    """One tab: go somewhere, run JavaScript, type, wait for something, take a picture. ``requests`` are the addresses
    that it asked for, ``errors`` what its scripts complained about."""

    def __init__(self, address: str):
        self.socket = websocket.create_connection(address, timeout=120)
        self.number = 0
        self.requests: list[str] = []
        self.errors: list[str] = []
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command of the DevTools protocol, and its result."""
        self.number += 1
        self.socket.send(json.dumps({"id": self.number, "method": method, "params": parameters}))
        while True:
            message = json.loads(self.socket.recv())
            if message.get("id") == self.number:
                assert "error" not in message, f"{method}: {message['error']}"
                found: dict[str, Any] = message["result"]
                return found
            self._note(message)

    def _note(self, message: dict[str, Any]) -> None:
        method, found = message.get("method"), message.get("params", {})
        if method == "Network.requestWillBeSent":
            self.requests.append(found["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.errors.append(found["exceptionDetails"].get("exception", {}).get("description", "an exception"))
        elif method == "Log.entryAdded" and found["entry"]["level"] == "error":
            self.errors.append(found["entry"]["text"])

    def open(self, address: str, seconds: float = 60) -> None:
        """Go to an address, and wait until the page is there."""
        self.send("Page.navigate", url=address)
        self.wait("document.readyState === 'complete' && location.href !== 'about:blank'", seconds)

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression; a promise is waited for."""
        options = {"returnByValue": True, "awaitPromise": True, "userGesture": True}
        found = self.send("Runtime.evaluate", expression=script, **options)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait(self, condition: str, seconds: float = 30) -> Any:
        """Wait until a JavaScript expression is true; its value."""
        until = time.monotonic() + seconds
        while not (value := self.run(condition)):
            assert time.monotonic() < until, f"waited {seconds:g} s for {condition}"
            time.sleep(0.2)
        return value

    def type(self, text: str) -> None:
        """Text into what has the focus."""
        self.send("Input.insertText", text=text)

    def click(self, element: str) -> None:
        """A real click in the middle of the element that a JavaScript expression gives."""
        self.wait(f"!!({element})")
        x, y = self.run(
            f"(() => {{ const e = {element}; e.scrollIntoView({{block: 'center'}});"
            " const r = e.getBoundingClientRect(); return [r.left + r.width / 2, r.top + r.height / 2]; })()"
        )
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def key(self, key: str, code: int, modifiers: int = 0) -> None:
        """Press and release a key; `modifiers` as the protocol counts them (2 is Control, 8 is Shift)."""
        pressed = {"key": key, "code": key, "windowsVirtualKeyCode": code, "modifiers": modifiers}
        text = {"text": "\r"} if key == "Enter" else {}
        self.send("Input.dispatchKeyEvent", type="keyDown" if text else "rawKeyDown", **pressed, **text)
        self.send("Input.dispatchKeyEvent", type="keyUp", **pressed)

    def resize(self, width: int, height: int, mobile: bool = False) -> None:
        """The size of the window, in pixels."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": mobile}
        self.send("Emulation.setDeviceMetricsOverride", **size)

    def picture(self, path: Path) -> None:
        """A PNG of what can be seen."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(self.send("Page.captureScreenshot", format="png")["data"]))
