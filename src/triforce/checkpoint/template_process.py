"""Untrusted chat templates, rendered in a separate process: some loop for hours, some take all memory."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from threading import Lock
from typing import IO

from triforce.checkpoint import template_worker
from triforce.errors import RequestError
from triforce.sandbox import working_folder

TRUSTED_TEMPLATES = frozenset({"872be49dbb638044ad01b60388f48d469ff2980e5f0dccdc22ec907db54d0788"})
"""The sha256 of known models' templates, which are rendered in this process."""


class TemplateProcess:
    """A worker process, started for the first template and again after a template that ended it. Thread-safe."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def render(self, template: str, variables: str) -> str:
        """Return a template's text. variables: JSON. Raises RequestError with the reason of a failure."""
        answer = self._answer(f"[{json.dumps(template)}, {variables}]\n".encode())
        if not answer.endswith(b"\n"):
            limits = f"{template_worker.SECONDS} s or {template_worker.MEMORY_BYTES >> 20} MiB"
            raise RequestError(f"it takes more than {limits}, or ends the process that renders it")
        rendered, text = json.loads(answer)
        if not rendered:
            raise RequestError(text)
        return str(text)

    def end(self) -> None:
        """End the process if it runs."""
        process = self._process
        self._process = None
        if process:
            process.kill()
            process.communicate()

    def _answer(self, request: bytes) -> bytes:
        """Return the process's answer line; an incomplete one if the process has ended."""
        answer = b""
        with self._lock:
            stdin, stdout = self._streams()
            try:
                stdin.write(request)
                stdin.flush()
                answer = stdout.readline()
            except BrokenPipeError:
                pass
            finally:
                if not answer.endswith(b"\n"):  # also after Ctrl-C: else the next call would read this call's answer
                    self.end()
        return answer

    def _streams(self) -> tuple[IO[bytes], IO[bytes]]:
        if self._process and self._process.poll() is not None:
            self.end()
        if not self._process:
            command = [sys.executable, "-P", template_worker.__file__]
            pipe = subprocess.PIPE
            self._process = subprocess.Popen(
                command,
                stdin=pipe,
                stdout=pipe,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                cwd=working_folder(),
            )
        assert self._process.stdin and self._process.stdout
        return self._process.stdin, self._process.stdout


PROCESS = TemplateProcess()
os.register_at_fork(after_in_child=PROCESS.__init__)  # type: ignore[misc]  # the parent's process answers the parent


def render_isolated(template: str, variables: str) -> str:
    """Return a template's text. variables: JSON. Raises RequestError with the reason of a failure."""
    if hashlib.sha256(template.encode("utf-8", "surrogatepass")).hexdigest() not in TRUSTED_TEMPLATES:
        return PROCESS.render(template, variables)
    from triforce.checkpoint.chat_template import render  # imports Jinja, which most runs do not need

    try:
        return render(template, json.loads(variables))
    except Exception as error:  # a template is a program and may raise anything
        raise RequestError(str(error)) from error
