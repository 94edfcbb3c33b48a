"""A two-node Ray on this machine, on loopback; without Ray nothing here runs."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import chat_fixtures

pair, llm = chat_fixtures.pair, chat_fixtures.llm  # fixtures; `llm` is what replicas are compared with
MISSING = importlib.util.find_spec("ray") is None
collect_ignore_glob = ["test_ray_*.py"] if MISSING else []

if not MISSING:
    from triforce.replicas.ray_env import prepare

    prepare(None)
    with warnings.catch_warnings(action="ignore"):  # Ray's own, of what it uses
        importlib.import_module("ray.serve")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    from ray.cluster_utils import Cluster

    node = {"num_cpus": 1, "object_store_memory": 100 << 20}
    cluster = Cluster(initialize_head=True, head_node_args=node | {"include_dashboard": False})
    cluster.add_node(**node)
    yield cluster
    cluster.shutdown()


@pytest.fixture(scope="module")
def limits() -> object:
    from triforce.server.limits import Limits

    return Limits(waiting=8)


@pytest.fixture(scope="module")
def served(cluster: Any, pair: Path, limits: Any) -> Iterator[tuple[Any, Any]]:
    """What requests are read with, and a replica on each node."""
    from triforce.replicas.cluster import start_replicas

    settings = {"model": str(pair / "target"), "draft": str(pair / "draft"), "retrieval_budget": 64, "device": "cpu"}
    frontend, engine = start_replicas(settings, limits, 2, cluster.address, "tests", lambda running, message: None)
    yield frontend, engine
    asyncio.run(engine.close())


@pytest.fixture(scope="module")
def app(served: tuple[Any, Any], limits: Any) -> Any:
    from triforce.server.app import create_app

    frontend, engine = served
    return create_app(frontend, engine, "tiny", limits=limits)
