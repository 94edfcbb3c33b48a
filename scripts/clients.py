"""Tries client libraries of other projects on a running server: python scripts/clients.py URL [KEY].

The libraries are installed into a separate environment, build/clients; a library that does not install is skipped.
Exit code 1: a call failed.
"""

from __future__ import annotations

import json
import subprocess
import sys
import venv
from pathlib import Path

import httpx

ROOT = Path(__file__).parents[1]
PLACE = ROOT / "build" / "clients"
PACKAGES = {
    "openai": ["openai"],
    "langchain": ["langchain-openai"],
    "litellm": ["litellm", "mcp"],  # calls with tools need mcp
    "llama_index": ["llama-index-llms-openai-like"],
    "instructor": ["instructor"],
    "outlines": ["outlines", "openai"],
    "llm": ["llm"],
    "anthropic": ["anthropic"],
    "ollama": ["ollama"],
}
CALLS = ("plain", "streamed", "structured", "tools", "required")
ABSENT_CALLS = {
    *(("outlines", "tools"), ("outlines", "required"), ("llm", "required"), ("instructor", "tools")),
    ("ollama", "required"),
}
"""Calls that a client has no way to make; instructor requires each call of a function."""
CASES = [(client, call) for client in PACKAGES for call in CALLS if (client, call) not in ABSENT_CALLS]
"""All calls of all clients."""
SECONDS = 300.0
"""Time for one call."""


def install_libraries() -> dict[str, str]:
    """Install the libraries once. Returns the reason of failure for each client that cannot be installed."""
    marker = PLACE / "installed.json"
    python = PLACE / "bin" / "python"
    if marker.exists():
        recorded_reasons: dict[str, str] = json.loads(marker.read_text())
        return recorded_reasons
    venv.create(PLACE, with_pip=True)
    everything = sorted({package for packages in PACKAGES.values() for package in packages})
    missing = {}
    if _installation(python, everything):  # then each client is installed separately
        missing = {
            client: reason
            for client, client_packages in PACKAGES.items()
            if (reason := _installation(python, client_packages))
        }
    marker.write_text(json.dumps(missing))
    return missing


def _installation(python: Path, packages: list[str]) -> str:
    """Install packages. Returns the reason of failure, or an empty text."""
    command = [str(python), "-m", "pip", "install", "--quiet", *packages]
    done = subprocess.run(command, capture_output=True, text=True)
    lines = done.stderr.strip().splitlines() or ["pip failed"]
    return f"{' '.join(packages)} cannot be installed: {lines[-1]}" if done.returncode else ""


def attempt(client: str, call: str, url: str, model: str, key: str) -> str:
    """Make a call. Returns the reason of failure, or an empty text."""
    program = Path(__file__).with_name("client_calls.py")
    command = [str(PLACE / "bin" / "python"), str(program), client, call, url, model, key]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return f"not done within {SECONDS:g} seconds"
    lines = done.stderr.strip().splitlines() or ["it failed without a message"]
    return lines[-1] if done.returncode else ""


def is_asked(model: str, call: str) -> bool:
    """Whether a call is made to a model. `smollm2` answers in words where it may choose whether to call a function."""
    return call != "tools" or "smollm2" not in model.lower()


def main(url: str, key: str = "sk-no-key-required") -> int:
    """Try every call of every client, and print the results. Returns the exit code."""
    headers = {"authorization": f"Bearer {key}"}
    model = httpx.get(f"{url}/v1/models", headers=headers).raise_for_status().json()["data"][0]["id"]
    missing = install_libraries()
    failures = 0
    for client, call in CASES:
        if not is_asked(model, call):
            continue
        if client in missing:
            print(f"{client:12} {call:11} skipped: {missing[client]}")
            continue
        failure = attempt(client, call, url, model, key)
        failures += bool(failure)
        print(f"{client:12} {call:11} {failure or 'ok'}", flush=True)
    return min(failures, 1)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
