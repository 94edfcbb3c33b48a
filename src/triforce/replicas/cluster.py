"""Startup of replicas on a new or an existing Ray cluster. Call `ray_env.prepare` before importing this module."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import sleep
from typing import Any

import ray
from ray import serve
from ray.serve.config import RequestRouterConfig

from triforce.errors import RequestError, TriforceError
from triforce.replicas.frontend import ReplicaFrontend
from triforce.replicas.remote_engine import Replicas
from triforce.replicas.replica import Replica
from triforce.server.limits import Limits

ROUTER = "triforce.replicas.remote_engine.PrefixRouter"
STORE_BYTES = 256 << 20
"""Bytes of the object store of a Ray started here. It holds long prompts and log-probabilities, too large to inline."""
POLL_SECONDS = 0.2
FRONTEND_SECONDS = 60.0
CONNECT_SECONDS = 10.0
_DEPLOYMENT = "replica"

OnWait = Callable[[int, str], None]
"""Called while replicas start, with the number of running ones and Ray's message about the others."""


@dataclass(frozen=True, slots=True)
class ClusterPlan:
    """Resources of `count` replicas: processors, GPUs and ranks of each."""

    count: int
    cpus: int
    gpus: int
    ranks: int = 1


def start_replicas(
    settings: dict[str, Any],
    limits: Limits,
    count: int,
    address: str | None,
    name: str,
    on_wait: OnWait,
    ranks: int = 1,
    exact: bool = True,
) -> tuple[ReplicaFrontend, Replicas]:
    """Start replicas of LLM(**settings). Returns the frontend that parses requests, and the client of the replicas.

    address: of a Ray cluster; None starts one. name: of the Ray application; replicas that an earlier server left under
    this name are replaced. ranks: number of processes that share the model in each replica. exact: see `TPGroup`.
    Raises RequestError or ModelError. After an error, and after the client is closed, no replica stays.
    """
    connect(address)

    def release() -> None:
        if address is not None:
            serve.delete(name)
        ray.shutdown()

    try:
        plan = plan_cluster(ray.nodes(), count, settings["device"], ranks)
        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        serve.start(proxy_location="Disabled")  # only this process may reach a replica
        serve.run_many(
            [serve.RunTarget(_deployment(plan, settings, limits, exact), name)], wait_for_applications_running=False
        )
        _wait_until_running(name, on_wait)
        handle = serve.get_app_handle(name)
        frontend = handle.frontend.remote().result(timeout_s=FRONTEND_SECONDS)
        if isinstance(frontend, TriforceError):
            raise frontend
    except BaseException:
        release()
        raise
    max_requests = limits.waiting + count * limits.rows
    return frontend, Replicas(handle.options(stream=True), max_requests, lambda: _status(name)[0], release)


def connect(address: str | None) -> None:
    """Connect to the Ray cluster at `address`; None starts a local one. Raises RequestError."""
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if address is None:
        options |= {"include_dashboard": False, "object_store_memory": STORE_BYTES}
    elif address.startswith("ray://"):
        raise RequestError(f"{address} is for Ray's client; give the address of the cluster, such as 10.0.0.1:6379")
    try:
        if address and address != "auto":
            _check_reachable(address)
        ray.init(address or "local", **options)
    except (OSError, RuntimeError, ValueError) as error:
        what = f"the Ray at {address} cannot be joined" if address else "Ray cannot be started"
        advice = (
            "make this machine a node of it: ray start --address=HOST:6379"
            if address
            else "remove the cause, or leave out --replicas"
        )
        raise RequestError(f"{what} ({str(error).splitlines()[0]}); {advice}") from error


def _check_reachable(address: str) -> None:
    """Raise OSError or ValueError unless `address` accepts connections: Ray would retry for minutes, with messages."""
    host, _, port = address.rpartition(":")
    socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS).close()


def plan_cluster(nodes: Sequence[Mapping[str, Any]], count: int, device: str, ranks: int = 1) -> ClusterPlan:
    """Return a plan of replicas whose ranks share all processors evenly. Raises RequestError if a rank has none."""
    machines = [node["Resources"] for node in nodes if node["Alive"]]
    gpus = ranks * (device != "cpu" and any(machine.get("GPU") for machine in machines))
    if gpus and device not in ("auto", "cuda"):
        raise RequestError(f"--device {device} is one device, and each replica has its own; use --device cuda")

    def replica_capacity(cpus: int) -> int:
        needs = {"CPU": cpus} | ({"GPU": gpus} if gpus else {})
        return sum(min(int(machine.get(what, 0)) // need for what, need in needs.items()) for machine in machines)

    max_cpus = max((int(machine.get("CPU", 0)) for machine in machines), default=0)
    sufficient_cpus = [cpus for cpus in range(ranks, max_cpus + 1, ranks) if replica_capacity(cpus) >= count]
    if not sufficient_cpus:
        need = "a GPU and a processor" if gpus else "a processor"
        share_text = "each" if ranks == 1 else f"for each of their {ranks} ranks"
        raise RequestError(
            f"{count} replicas need {need} {share_text}, and this Ray has room for {replica_capacity(ranks)}; "
            "lower --replicas, or start Ray on more machines"
        )
    return ClusterPlan(count, sufficient_cpus[-1], gpus, ranks)


def _deployment(plan: ClusterPlan, settings: dict[str, Any], limits: Limits, exact: bool) -> Any:
    deployment = serve.deployment(
        name=_DEPLOYMENT,
        num_replicas=plan.count,
        max_ongoing_requests=limits.rows,  # requests without a row wait in the server, free to go to another replica
        graceful_shutdown_wait_loop_s=0.1,
        graceful_shutdown_timeout_s=5,
        ray_actor_options={"num_cpus": plan.cpus, "num_gpus": plan.gpus},
        request_router_config=RequestRouterConfig(request_router_class=ROUTER, max_backoff_s=0.1),
    )
    return deployment(Replica).bind(settings, limits, plan.ranks, exact)


def _wait_until_running(name: str, on_wait: OnWait) -> None:
    """Wait without a time limit until all replicas run, as models load slowly. Raises RequestError."""
    while True:
        running, status, message = _status(name)
        on_wait(running, message)
        if status == "RUNNING":
            return
        if status == "DEPLOY_FAILED":
            raise RequestError(f"the replicas do not start ({message}); each machine of this Ray needs the model, and "
                               "the same version of triforce[ray]")  # fmt: skip
        sleep(POLL_SECONDS)


def _status(name: str) -> tuple[int, str, str]:
    """Return the number of running replicas, the status of the application, and Ray's last message."""
    application = serve.status().applications[name]
    deployment = application.deployments.get(_DEPLOYMENT)
    running = deployment.replica_states.get("RUNNING", 0) if deployment else 0
    lines = (deployment.message if deployment else application.message).strip().splitlines()
    return running, str(application.status.value), lines[-1] if lines else ""
