"""Real browsers: where they are, how they start, and a small client of Firefox's WebDriver BiDi."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tempfile
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[3]
AXE = ROOT / "build/page/node_modules/axe-core/axe.min.js"
CHROMIUM_FLAGS = [
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync"),
]
INSTALL_S = 600
ANSWER_S = 60  # longest wait for Firefox


def absent(what: str) -> None:
    """Skip with a reason; fail where CI would not notice."""
    if os.environ.get("CI") == "true":
        pytest.fail(f"{what}, and CI must not skip this")
    pytest.skip(what)


def browser(*names: str, package: str) -> str:
    """The path of a browser. Debian's package is installed if this process may do so."""
    for attempt in (1, 2):
        for name in names:
            if found := shutil.which(name):
                return found
        if attempt == 1 and os.geteuid() == 0 and shutil.which("apt-get"):
            _apt("update")
            _apt("install", "-y", "--no-install-recommends", package)
    absent(f"there is no {package} here and it cannot be installed")
    raise AssertionError


def _apt(*arguments: str) -> None:
    command = ["apt-get", "-o", "DPkg::Lock::Timeout=300", *arguments]
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    with suppress(subprocess.TimeoutExpired):
        subprocess.run(
            command, check=False, capture_output=True, timeout=INSTALL_S, stdin=subprocess.DEVNULL, env=environment
        )


def axe() -> str:
    """The source of axe-core, installed by scripts/check-page."""
    if not AXE.exists() and shutil.which("npm"):
        subprocess.run([ROOT / "scripts/check-page"], check=False, capture_output=True, timeout=INSTALL_S)
    if not AXE.exists():
        absent("axe-core is not installed; scripts/check-page does so where there is npm")
    return AXE.read_text(encoding="utf-8")


class Firefox:
    """One tab of a headless Firefox."""

    def __init__(self, socket: Any) -> None:
        self._socket = socket
        self._number = 0
        self.logged: list[str] = []  # what the page's console said
        self.send("session.new", {"capabilities": {}})
        self.send("session.subscribe", {"events": ["log.entryAdded"]})
        self._tab = self.send("browsingContext.create", {"type": "tab"})["context"]

    def send(self, method: str, params: dict[str, Any]) -> dict[str, Any]:
        self._number += 1
        self._socket.send(json.dumps({"id": self._number, "method": method, "params": params}))
        while True:
            message = json.loads(self._socket.recv(timeout=ANSWER_S))
            if message.get("method") == "log.entryAdded":
                self.logged.append(f"{message['params']['level']}: {message['params']['text']}")
            if message.get("id") == self._number:
                assert message["type"] == "success", message
                return message["result"]

    def open(self, url: str) -> None:
        self.send("browsingContext.navigate", {"context": self._tab, "url": url, "wait": "complete"})

    def run(self, expression: str) -> Any:
        """The value of an expression; a promise is waited for. Values travel as JSON."""
        wrapped = f"Promise.resolve({expression}).then((value) => JSON.stringify(value ?? null))"
        target = {"context": self._tab}
        found = self.send("script.evaluate", {"expression": wrapped, "target": target, "awaitPromise": True})
        assert found["type"] == "success", found
        return json.loads(found["result"]["value"])

    def wait(self, condition: str, seconds: float = 30) -> None:
        loop = f"""new Promise((resolve, reject) => {{
            const end = performance.now() + {seconds * 1000};
            const look = () => {{
                if ({condition}) resolve(true);
                else if (performance.now() > end) reject(new Error("waited in vain"));
                else setTimeout(look, 50);
            }};
            look();
        }})"""
        self.run(loop)

    def type(self, text: str) -> None:
        keys = [{"type": kind, "value": key} for key in text for kind in ("keyDown", "keyUp")]
        actions = [{"type": "key", "id": "keys", "actions": keys}]
        self.send("input.performActions", {"context": self._tab, "actions": actions})


@contextmanager
def firefox(path: str) -> Iterator[Firefox]:
    """A headless Firefox with a profile of its own."""
    from websockets.sync.client import connect

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        command = [path, "--headless", "--no-remote", "--profile", profile, "--remote-debugging-port", "0"]
        environment = os.environ | {"MOZ_HEADLESS": "1", "HOME": profile}
        process = subprocess.Popen(
            command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, env=environment
        )
        try:
            address = None
            assert process.stderr is not None
            for line in process.stderr:
                if address := re.search(r"WebDriver BiDi listening on (ws://\S+)", line):
                    break
            assert address, "Firefox ended before it listened"
            with connect(f"{address[1]}/session", max_size=64 << 20) as socket:
                yield Firefox(socket)
        finally:
            process.terminate()
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            process.stderr.close()
