"""`triforce serve`: OpenAI's HTTP interface in front of a model."""

from __future__ import annotations

import asyncio
import sys
from argparse import Namespace
from collections.abc import Sequence
from math import inf
from pathlib import Path
from threading import Thread
from typing import Any

from triforce.checkpoint.hub import model_name
from triforce.cli import replicas
from triforce.cli.machine_rates import require_balances
from triforce.cli.sampling_text import of_chats
from triforce.disk_cache.folder import CacheFolder
from triforce.distributed.group import TPGroup
from triforce.errors import RequestError


def run(options: Namespace) -> int:
    """Run in one process, in several ranks that share the model, or in the ranks of replicas."""
    return replicas.run(options, serve, graceful=True)


def serve(options: Namespace, ranks: TPGroup) -> int:
    """Serve until SIGTERM, SIGHUP or SIGINT; rank 0 listens. Raises RequestError before the model is loaded."""
    with replicas.extra():
        from triforce.server import http_server, logs, origins, security
        from triforce.server.app import create_app
        from triforce.server.limits import Limits, connection_limit

    keys = security.read_keys(options.api_key_file)
    security.require_key_beyond_loopback(options.host, keys)
    origins.require_origins(options.cors_origin)
    if not 0 <= options.port < 1 << 16:
        raise RequestError(f"port is {options.port}; give a number from 1 to 65535, or 0 for any free one")
    for name in ("max_body", "timeout", "max_itl", "shutdown_timeout"):
        if not 0 <= getattr(options, name) < inf:
            given = f"--{name.replace('_', '-')} {getattr(options, name):g}"
            raise RequestError(
                f"{given}: give a finite number that is not negative; a large one is as good as no limit"
            )
    limits = Limits(
        connections=connection_limit(options.max_connections),
        connections_per_address=options.max_connections_per_address,
        body_bytes=int(min(options.max_body * 2**20, sys.maxsize)),
        seconds=options.timeout,
        waiting=options.max_queue,
        rows=options.max_num_seqs,
        kv_tokens=options.max_kv_tokens,
        max_itl=options.max_itl / 1000,
    )
    watched = _watched(options, keys)
    if ranks.rank:
        return replicas.follow(options, ranks, limits)
    name = options.name or model_name(options.model)
    with http_server.listen(options.host, options.port) as sock:
        llm, engine = replicas.engine(options, ranks, limits, f"serve {sock.getsockname()[1]}")
        Thread(target=require_balances).start()  # nobody has asked yet, so processors are idle
        logs.configure()
        hosts = [options.host, *options.allowed_host]
        reach: dict[str, Any] = {"keys": keys, "hosts": hosts, "origins": options.cors_origin}
        app = create_app(llm, engine, name, limits=limits, watched=watched, **reach)
        print(f"triforce serves {name} at {(url := http_server.url(sock))}", flush=True)
        if llm.tokenizer and llm.tokenizer.chats:
            print(f"sampling of chats: {of_chats(llm.sampling_defaults)}", flush=True)
        logs.event("listening", url=url, model=name)
        try:
            http_server.serve(app, engine, sock, options.shutdown_timeout)
        finally:
            if ranks.count > 1:  # a second signal leaves no time for it, and the others are to be told
                asyncio.run(engine.close())
    return 0


def _watched(options: Namespace, keys: Sequence[str]) -> CacheFolder | None:
    """The folder whose documents the page offers, if any. Raises RequestError, or CacheError."""
    if not options.show_watched:
        return None
    if not options.disk_cache or keys:
        raise RequestError("--show-watched is of a disk cache and of a server without keys, as documents are read for "
                           "requests without; add --disk-cache, or leave it out")  # fmt: skip
    return CacheFolder(Path(options.disk_cache), options.disk_cache_network)
