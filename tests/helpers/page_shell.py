"""Shell blocks of pages, run by bash as in a checkout: with the shipped pair, and without the user's files."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.helpers.pages import ROOT, RUN_AS_SERVER, RUN_SLOWLY, Block

LINKED = ("README.md", "docs", "examples", "src")
"""What pages read of the checkout. All files that blocks write are in the temporary folder."""
SERVER = re.compile(r"\b(?:127\.0\.0\.1|localhost):8000\b")
"""The address of a server, as pages have it."""
SECONDS = 120.0
SLOW_SECONDS = 900.0


def runs_in_shell(block: Block) -> bool:
    """Whether a marked block runs here: shell blocks, and Python blocks that send requests to the page's server."""
    return bool(block.mark) and (block.language == "sh" or SERVER.search(block.code) is not None)


def run_page(blocks: Iterable[Block], folder: Path, slow: bool = False) -> None:
    """Run the marked blocks of one page in order, in one folder, which they share with the page's server.

    Blocks that run slowly are left out, except with `slow`. Raises AssertionError at the first block that fails.
    """
    with page_shell(folder) as shell:
        for block in filter(runs_in_shell, blocks):
            code = block.code if block.language == "sh" else f"python - <<'END_OF_BLOCK'\n{block.code}END_OF_BLOCK\n"
            if block.mark == RUN_AS_SERVER:
                shell.serve(code)
            elif block.mark != RUN_SLOWLY:
                shell.run(code)
            elif slow:
                shell.run(code, SLOW_SECONDS)


@contextmanager
def page_shell(folder: Path) -> Iterator[PageShell]:
    """Yield a shell whose server ends with it."""
    shell = PageShell(folder)
    try:
        yield shell
    finally:
        shell.stop_server()


class PageShell:
    """A folder that looks like a checkout after `make install`, and the server that runs in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)
        self.log = folder / ".log"
        self.server_log = folder / ".server.log"
        self.server: subprocess.Popen[bytes] | None = None
        self.address = ""
        for name in LINKED:
            (folder / name).symlink_to(ROOT / name)
        (folder / ".venv").symlink_to(sys.prefix)
        # Without this, curl exits with 0 after an answer of 400.
        (folder / ".curlrc").write_text("silent\nshow-error\nfail-with-body\n", encoding="utf-8")

    def run(self, code: str, seconds: float = SECONDS) -> str:
        """Return the output. Raises AssertionError if a command fails, or if all take longer than `seconds`."""
        if SERVER.search(code):
            assert self.server, f"no server runs: mark a block before this one with <!-- {RUN_AS_SERVER} -->\n{code}"
            code = SERVER.sub(self.address, code)
        process = self._bash(code, self.log)
        try:
            exit_code: int | str = process.wait(seconds)
        except subprocess.TimeoutExpired:
            exit_code = f"none after {seconds:g} s"
        finally:
            _end(process)
        output = _text(self.log)
        assert exit_code == 0, f"exit code {exit_code}\n{code}{output}"
        return output

    def serve(self, code: str) -> None:
        """Start the server of a block's last command, on a free port, in place of an earlier server."""
        self.stop_server()
        self.server = self._bash(f"{code.rstrip()} --port 0", self.server_log)
        deadline = time.monotonic() + SECONDS
        while time.monotonic() < deadline and self.server.poll() is None:
            if line := re.search(r"^triforce serves .* at https?://(\S+)$", _text(self.server_log), re.MULTILINE):
                self.address = line[1]
                return
            time.sleep(0.05)
        raise AssertionError(f"no server\n{code}{_text(self.server_log)}")

    def stop_server(self) -> None:
        if self.server:
            _end(self.server)
        self.server = None

    def _bash(self, code: str, log: Path) -> subprocess.Popen[bytes]:
        """Start `code` in a process group of its own; a command that fails ends it, within a pipe too."""
        command = ["bash", "-euo", "pipefail", "-c", code]
        with log.open("wb") as output:
            return subprocess.Popen(
                command,
                cwd=self.folder,
                env=self._environment(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _environment(self) -> dict[str, str]:
        """The tests' own variables, which name their cache folder, without keys and models of the user."""
        dropped = ("HF_", "TRIFORCE_API_KEYS", "TRIFORCE_SMOLLM2", "XDG_CONFIG_HOME")
        environment = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
        return environment | {
            "HOME": str(self.folder),
            "CURL_HOME": str(self.folder),
            "HF_HUB_OFFLINE": "1",
            "PATH": os.pathsep.join([f"{sys.prefix}/bin", os.environ["PATH"]]),
            "PYTHONPATH": str(ROOT / "src"),
        }


def _text(log: Path) -> str:
    return log.read_text(encoding="utf-8", errors="replace")


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process group, with what a block has left in the background."""
    with suppress(ProcessLookupError, PermissionError):  # the latter on macOS, of an ended one
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
