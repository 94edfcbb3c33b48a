"""`triforce serve`: the HTTP interfaces of OpenAI, Anthropic and Ollama to a model."""

from __future__ import annotations

import asyncio
import sys
from argparse import Namespace
from collections.abc import Sequence
from contextlib import ExitStack
from math import inf
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any

from triforce.checkpoint.named_templates import template_fault
from triforce.cli import replicas
from triforce.cli.answer_output import chat_sampling
from triforce.cli.engine_arguments import served_name
from triforce.cli.process_one import run_below_process_one
from triforce.disk_cache.folder import CacheFolder
from triforce.distributed.group import TPGroup
from triforce.errors import RequestError, TriforceError, printable
from triforce.server.access import (
    checked_origins,
    listen,
    read_keys,
    require_hosts,
    require_key_beyond_loopback,
    resolve,
    url,
)
from triforce.server.limits import Limits, connection_limit

if TYPE_CHECKING:
    from triforce.checkpoint.tokenizer import Tokenizer

MINIMUMS = {
    "max_connections": 1,
    "max_connections_per_address": 1,
    "max_num_seqs": 1,
    "max_kv_tokens": 16,
    "max_queue": 0,
}
"""Options that take whole numbers, and the minimum of each."""
FINITE_OPTIONS = ("max_body", "timeout", "max_itl", "shutdown_timeout")
"""Options that take a finite number above 0; only `shutdown_timeout` may be 0."""


def run(options: Namespace) -> int:
    """Run in one process, in several ranks that share the model, or in the ranks of replicas."""
    return run_below_process_one(lambda: replicas.run(options, serve, graceful=True))


def serve(options: Namespace, ranks: TPGroup) -> int:
    """Serve until SIGTERM, SIGHUP or SIGINT; rank 0 listens. Raises RequestError before the model is loaded."""
    keys = _checked_keys(options)
    name = served_name(options)
    with ExitStack() as stack:
        sock = None if ranks.rank else stack.enter_context(listen(options.host, options.port))
        from triforce.server import http_server, logs
        from triforce.server.app import create_app

        limits = _limits(options)
        watched = _watched_cache(options)
        if sock is None:
            return replicas.follow(options, ranks, limits)
        llm, engine = replicas.engine(options, ranks, limits, f"serve {sock.getsockname()[1]}")
        Thread(target=_require_balances).start()  # there are no requests yet, so processors are idle
        logs.configure()
        hosts = [options.host, *options.allowed_host]
        access_settings: dict[str, Any] = {
            "keys": keys,
            "hosts": hosts,
            "origins": checked_origins(options.cors_origin),
            "any_model": not options.only_name,
        }
        app = create_app(llm, engine, name, limits=limits, watched=watched, **access_settings)
        try:
            print(f"triforce serves {printable(name)} at {url(sock)}", flush=True)
            if llm.tokenizer and llm.tokenizer.chats:
                print(f"sampling of chats: {chat_sampling(llm.sampling_defaults)}", flush=True)
        except (OSError, TriforceError):
            asyncio.run(engine.close())  # else the engine's thread holds the model while the interpreter ends
            raise
        Thread(target=_tell_template_fault, args=(llm.tokenizer,)).start()
        logs.event("listening", url=url(sock), model=name)
        try:
            http_server.serve(app, engine, sock, options.shutdown_timeout)
        finally:
            if ranks.count > 1:  # a second signal may have cut the shutdown short before other ranks learned of it
                asyncio.run(engine.close())
    return 0


def _require_balances() -> None:
    from triforce.cli.machine_rates import require_balances

    require_balances()


def _tell_template_fault(tokenizer: Tokenizer | None) -> None:
    """Print why the chat template cannot be used, if so: else each chat would be refused for it."""
    if tokenizer and tokenizer.chats and (fault := template_fault(tokenizer)):
        advice = "chats will be refused; give another template by --chat-template"
        print(f"triforce: notice: {printable(fault)}; {advice}", file=sys.stderr, flush=True)


def _checked_keys(options: Namespace) -> list[str]:
    """Return API keys, after all checks that need no model. Raises RequestError."""
    for name, minimum in MINIMUMS.items():
        value = getattr(options, name)
        if value is not None and value < minimum:
            raise RequestError(f"--{name.replace('_', '-')} {value}: give {minimum} or more")
    for name in FINITE_OPTIONS:
        value = getattr(options, name)
        if not 0 <= value < inf or (value == 0 and name != "shutdown_timeout"):
            advice = "give a finite number above 0; a large one is as good as no limit"
            raise RequestError(f"--{name.replace('_', '-')} {value:g}: {advice}")
    connection_limit(options.max_connections)
    resolve(options.host, options.port)
    keys = read_keys(options.api_key_file)
    require_key_beyond_loopback(options.host, keys)
    checked_origins(options.cors_origin)
    require_hosts(options.allowed_host)
    _require_watched(options, keys)
    return keys


def _limits(options: Namespace) -> Limits:
    return Limits(
        connections=connection_limit(options.max_connections),
        connections_per_address=options.max_connections_per_address,
        body_bytes=int(min(options.max_body * 2**20, sys.maxsize)),
        seconds=options.timeout,
        waiting=options.max_queue,
        rows=options.max_num_seqs,
        kv_tokens=options.max_kv_tokens,
        max_itl=options.max_itl / 1000,
    )


def _require_watched(options: Namespace, keys: Sequence[str]) -> None:
    """Raise RequestError for --show-watched without a disk cache, or with API keys."""
    if options.show_watched and (not options.disk_cache or keys):
        raise RequestError("--show-watched needs --disk-cache and a server without API keys: only requests without a "
                           "key reuse the KV of watched documents; add --disk-cache, or leave it out")  # fmt: skip


def _watched_cache(options: Namespace) -> CacheFolder | None:
    """Return the disk cache whose documents the page offers, if any. Raises CacheError."""
    return CacheFolder(Path(options.disk_cache), options.disk_cache_network) if options.show_watched else None
