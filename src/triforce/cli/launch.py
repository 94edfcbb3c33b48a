"""`triforce launch`: a coding agent in front of a server, which is started for it where none listens."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from time import monotonic, sleep
from typing import Any
from urllib.error import URLError
from urllib.request import ProxyHandler, Request, build_opener

from triforce.cli.engine_arguments import served_name
from triforce.errors import RequestError, printable
from triforce.server.access import KEYS_VARIABLE, listen, read_keys, resolve

START_SECONDS = 0.2
"""Seconds between two looks whether a server has started."""
PROBE_SECONDS = 5.0
"""Seconds in which a running server must describe its model."""
SHUTDOWN_SECONDS = 30.0
"""Seconds in which a server that was started here must end; then it is killed."""
_DIRECT = build_opener(ProxyHandler({}))
"""Opens addresses of this machine, which no proxy of the environment reaches."""
AGENT_KEY = "TRIFORCE_AGENT_KEY"
"""Variable that holds the key for Codex. Programs that Codex runs see it, so it is not the one of servers."""
ANY_KEY = "triforce"
"""Key for clients that want one, where the server needs none."""
FULL_CONTEXT = 32_768
"""Tokens below which an agent's own instructions leave little room for work."""


@dataclass(frozen=True, slots=True)
class AgentServer:
    """A server as an agent finds it. context: of its model in tokens. catalog: its answer to /v1/models."""

    url: str
    key: str
    model: str
    context: int
    catalog: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Agent:
    """A coding agent.

    install: the command that installs it. places: of its program beside the PATH. settings: its arguments and its
    environment for a server; a folder is given for files that it reads, and goes away when it ends.
    """

    install: str
    places: tuple[str, ...]
    settings: Callable[[AgentServer, Path], tuple[list[str], dict[str, str]]]


def _claude(server: AgentServer, folder: Path) -> tuple[list[str], dict[str, str]]:
    switched_off = ("DISABLE_ERROR_REPORTING", "DISABLE_FEEDBACK_COMMAND", "CLAUDE_CODE_DISABLE_FEEDBACK_SURVEY")
    names = ("ANTHROPIC_DEFAULT_OPUS_MODEL", "ANTHROPIC_DEFAULT_SONNET_MODEL", "ANTHROPIC_DEFAULT_HAIKU_MODEL")
    environment = {
        "ANTHROPIC_BASE_URL": server.url,
        "ANTHROPIC_AUTH_TOKEN": server.key,
        "ANTHROPIC_API_KEY": "",
        "API_TIMEOUT_MS": str(24 * 3600 * 1000),  # a long prompt takes its time; the stream has a ping meanwhile
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",  # it would change the prompt's first line
        "CLAUDE_CODE_TOTAL_TOKENS_REMINDER": "off",
        "CLAUDE_CODE_AUTO_COMPACT_WINDOW": str(server.context),
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "CLAUDE_CODE_SUBAGENT_MODEL": server.model,
        **dict.fromkeys(switched_off, "1"),
        **dict.fromkeys(names, server.model),
    }
    return ["--model", server.model], environment


def _codex(server: AgentServer, folder: Path) -> tuple[list[str], dict[str, str]]:
    catalog = folder / "models.json"
    catalog.write_text(json.dumps({"models": server.catalog["models"]}))
    provider = {
        "name": "triforce",
        "base_url": f"{server.url}/v1",
        "wire_api": "responses",
        "env_key": AGENT_KEY,
        "stream_idle_timeout_ms": 3_600_000,
    }
    settings: dict[str, Any] = {f"model_providers.triforce.{name}": value for name, value in provider.items()}
    settings |= {"model_provider": "triforce", "model_catalog_json": str(catalog)}
    settings |= {"model_context_window": server.context, "web_search": "disabled"}
    pairs = [f"{name}={json.dumps(value)}" for name, value in settings.items()]  # TOML, which is JSON here
    options = [part for pair in pairs for part in ("-c", pair)]
    return [*options, "-m", server.model], {AGENT_KEY: server.key}


def _opencode(server: AgentServer, folder: Path) -> tuple[list[str], dict[str, str]]:
    limit = {"context": server.context, "output": max(1, server.context // 4)}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "triforce",
        "options": {"baseURL": f"{server.url}/v1", "apiKey": server.key, "timeout": False},
        "models": {server.model: {"name": server.model, "limit": limit}},
    }
    config = {
        "$schema": "https://opencode.ai/config.json",
        "provider": {"triforce": provider},
        "model": f"triforce/{server.model}",
        "small_model": f"triforce/{server.model}",
    }
    return [], {"OPENCODE_CONFIG_CONTENT": json.dumps(config)}


AGENTS = {
    "claude": Agent(
        "npm install -g @anthropic-ai/claude-code", ("~/.local/bin/claude", "~/.claude/local/claude"), _claude
    ),
    "codex": Agent("npm install -g @openai/codex", (), _codex),
    "opencode": Agent("npm install -g opencode-ai", ("~/.opencode/bin/opencode",), _opencode),
}
"""The agents by their name, which is that of their program."""


def run(options: Namespace) -> int:
    """Run an agent and return its exit code. Raises RequestError before a model is loaded."""
    agent = AGENTS[options.agent]
    program = _program(options.agent, agent)
    keys = read_keys(options.api_key_file)
    resolve(options.host, options.port)
    port = options.port or _free_port(options.host)
    host = f"[{options.host}]" if ":" in options.host else options.host
    address = f"http://{host}:{port}"
    options.arguments += ["--port", str(port)]
    with _ending_signals(), _served(options, address, keys[0] if keys else ANY_KEY) as server:
        if server.context < FULL_CONTEXT:
            text = f"the model's context is {server.context:,} tokens, and the agent's own prompt may need most of it"
            print(f"triforce: notice: {text}", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory(prefix="triforce-launch-") as folder:
            arguments, environment = agent.settings(server, Path(folder))
            direct = ",".join(filter(None, [os.environ.get("NO_PROXY") or os.environ.get("no_proxy"), options.host]))
            environment |= {"NO_PROXY": direct, "no_proxy": direct}
            return _ran([program, *arguments, *options.agent_arguments], environment)


@contextmanager
def _ending_signals() -> Iterator[None]:
    """End this process by SystemExit on SIGTERM and SIGHUP, so that the server and the agent end with it."""

    def end(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    earlier_handlers = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in earlier_handlers.items():
            signal.signal(number, handler)


def _free_port(host: str) -> int:
    """Return a port that nothing listens at. Raises RequestError."""
    with listen(host, 0) as sock:
        port: int = sock.getsockname()[1]
    return port


def _program(name: str, agent: Agent) -> str:
    """Return the program of an agent. Raises RequestError, which says how to install it."""
    places = [os.path.expanduser(place) for place in agent.places]
    program = shutil.which(name) or next((place for place in places if os.access(place, os.X_OK)), None)
    if program is None:
        raise RequestError(f"{name} is not installed; install it with: {agent.install}")
    return program


def _ran(command: Sequence[str], environment: dict[str, str]) -> int:
    """Run an agent to its end, and return its exit code. Ctrl-C is for the agent."""
    earlier_handler = signal.signal(signal.SIGINT, lambda number, frame: None)
    agent = subprocess.Popen(command, env=os.environ | environment)
    try:
        code = agent.wait()
    finally:
        if agent.poll() is None:
            agent.terminate()
        signal.signal(signal.SIGINT, earlier_handler)
    return code if code >= 0 else 128 - code


@contextmanager
def _served(options: Namespace, address: str, key: str) -> Iterator[AgentServer]:
    """Yield the server at an address. One that is started here ends with the block. Raises RequestError."""
    server = _probed(address, key)
    if server is None:
        with _started(options, address, key) as started_server:
            yield started_server
    elif options.model is None or served_name(options) == server.model:
        print(f"triforce: the server at {address} serves {printable(server.model)}", file=sys.stderr, flush=True)
        yield server
    else:
        raise RequestError(
            f"the server at {address} serves {printable(server.model)}; stop it, leave out the MODEL to use it, or "
            "give another --port"
        )


def _probed(address: str, key: str) -> AgentServer | None:
    """Return the triforce server at an address; None where nothing listens. Raises RequestError."""
    request = Request(f"{address}/v1/models", headers={"Authorization": f"Bearer {key}"})
    try:
        with _DIRECT.open(request, timeout=PROBE_SECONDS) as answer:
            catalog = json.load(answer)
        card = catalog["data"][0]
        if "triforce" not in card or "models" not in catalog:
            raise KeyError("triforce")
        return AgentServer(address, key, card["id"], card["max_model_len"], catalog)
    except (URLError, OSError) as error:
        if isinstance(getattr(error, "reason", error), ConnectionRefusedError):
            return None
        raise RequestError(f"{address} does not answer as a server of triforce ({error}); give another --port, or its "
                           f"key in {KEYS_VARIABLE}") from error  # fmt: skip
    except (HTTPException, ValueError, KeyError, IndexError, TypeError) as error:
        raise RequestError(f"{address} is another program's; give another --port") from error


@contextmanager
def _started(options: Namespace, address: str, key: str) -> Iterator[AgentServer]:
    """Start a server, and yield it once it has loaded its model. Raises RequestError with the end of its log."""
    arguments = options.arguments[1:]
    arguments.remove(options.agent)
    with tempfile.NamedTemporaryFile("w+", prefix="triforce-serve-", suffix=".log", delete=False) as log:
        command = [sys.executable, "-m", "triforce", "serve", *arguments]
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )  # a session of its own: Ctrl-C is for the agent
        try:
            server = _awaited(process, address, key, log.name)
            yield server
        finally:
            process.terminate()
            try:
                process.wait(SHUTDOWN_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()


def _awaited(process: subprocess.Popen[bytes], address: str, key: str, log: str) -> AgentServer:
    """Return a started server once it answers. log: path of its log."""
    began = monotonic()
    is_terminal = sys.stderr.isatty()
    print(f"triforce: starting the server; its log is {log}", file=sys.stderr, flush=True)
    while process.poll() is None:
        with suppress(RequestError):  # it listens before it answers
            if server := _probed(address, key):
                return server
        if is_terminal:
            print(f"\rloading: {monotonic() - began:.0f} s ", end="", file=sys.stderr, flush=True)
        sleep(START_SECONDS)
    lines = Path(log).read_text(errors="replace").splitlines()
    reason = next((line for line in reversed(lines) if line.startswith("triforce: error:")), "")
    text = reason.removeprefix("triforce: error:").strip() or f"the server ended; its log is {log}"
    raise RequestError(text)
