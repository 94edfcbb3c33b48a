"""Firefox by WebDriver BiDi, the protocol that it speaks without a driver program."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PREFERENCES = 'user_pref("remote.active-protocols", 1);\nuser_pref("browser.shell.checkDefaultBrowser", false);\n'
PATIENCE = 60.0  # seconds


class Firefox:
    """A tab of a browser. errors: what its console and its scripts reported."""

    def __init__(self, socket: Any) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self.errors: list[str] = []
        self.command("session.new", capabilities={})
        self.command("session.subscribe", events=["log.entryAdded"])
        self._tab = self.command("browsingContext.getTree")["contexts"][0]["context"]

    def command(self, method: str, **params: Any) -> Any:
        number = next(self._numbers)
        self._socket.send(json.dumps({"id": number, "method": method, "params": params}))
        while True:
            message = json.loads(self._socket.recv(timeout=PATIENCE))
            if message.get("method") == "log.entryAdded" and message["params"]["level"] == "error":
                self.errors.append(str(message["params"]["text"]))
            if message.get("id") == number:
                assert message["type"] == "success", message
                return message["result"]

    def open(self, address: str) -> None:
        self.command("browsingContext.navigate", context=self._tab, url=address, wait="complete")

    def reload(self) -> None:
        self.command("browsingContext.reload", context=self._tab, wait="complete")

    def run(self, expression: str) -> Any:
        """Return the value of a JavaScript expression, which may be a promise."""
        arguments = {"target": {"context": self._tab}, "awaitPromise": True, "resultOwnership": "none"}
        answer = self.command(
            "script.evaluate", expression=f"Promise.resolve({expression}).then(JSON.stringify)", **arguments
        )
        assert answer["type"] == "success", answer["exceptionDetails"]["text"]
        text = answer["result"].get("value")
        return None if text is None else json.loads(text)

    def wait(self, expression: str) -> Any:
        """Return the value of an expression as soon as it is true."""
        end = time.monotonic() + PATIENCE
        while not (value := self.run(expression)):
            assert time.monotonic() < end, f"{expression} stays {value!r}: {self.run('document.body.innerText')}"
            time.sleep(0.1)
        return value

    def type(self, selector: str, text: str, key: str = "") -> None:
        """Write into a field, and perhaps press a key there."""
        self.run(f"document.querySelector({json.dumps(selector)}).focus()")
        keys = [*text, *([key] if key else [])]
        actions = [{"type": kind, "value": value} for value in keys for kind in ("keyDown", "keyUp")]
        source = {"type": "key", "id": "keyboard", "actions": actions}
        self.command("input.performActions", context=self._tab, actions=[source])


@contextmanager
def firefox(program: str, folder: Path) -> Iterator[Firefox]:
    """Run Firefox with a new profile in a folder. Needs the package websockets."""
    from websockets.sync.client import connect

    (folder / "user.js").write_text(PREFERENCES)
    command = [program, "--headless", "--no-remote", "--profile", str(folder), "--remote-debugging-port", "0"]
    with (folder / "log.txt").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        end = time.monotonic() + PATIENCE
        while not (found := re.search(r"BiDi listening on (ws://\S+)", (folder / "log.txt").read_text())):
            assert time.monotonic() < end and process.poll() is None, (folder / "log.txt").read_text()
            time.sleep(0.1)
        with connect(f"{found[1]}/session", max_size=None) as socket:
            yield Firefox(socket)
    finally:
        process.kill()
        process.wait()
