"""Placement of replicas and ranks on the nodes of a cluster."""

from __future__ import annotations

from typing import Any

import pytest

from triforce.errors import RequestError
from triforce.replicas.cluster import ClusterPlan, plan_cluster


def nodes(*cpus: int, gpus: tuple[int, ...] = ()) -> list[dict[str, Any]]:
    gpus = gpus or (0,) * len(cpus)
    return [{"Alive": True, "Resources": {"CPU": c, "GPU": g}} for c, g in zip(cpus, gpus, strict=True)]


@pytest.mark.parametrize(
    ("machines", "count", "device", "plan"),
    [
        (nodes(8), 1, "auto", ClusterPlan(1, 8, 0)),
        (nodes(8), 3, "cpu", ClusterPlan(3, 2, 0)),
        (nodes(8, 4), 2, "auto", ClusterPlan(2, 4, 0)),
        (nodes(8, 4), 3, "auto", ClusterPlan(3, 4, 0)),
        ([*nodes(1), {"Alive": False, "Resources": {"CPU": 9}}], 1, "auto", ClusterPlan(1, 1, 0)),
        (nodes(16, 4, gpus=(2, 0)), 2, "cuda", ClusterPlan(2, 8, 1)),
        (nodes(16, gpus=(1,)), 2, "cpu", ClusterPlan(2, 8, 0)),
    ],
)
def test_ray_replicas_share_resources(machines: Any, count: int, device: str, plan: ClusterPlan) -> None:
    assert plan_cluster(machines, count, device) == plan


def test_ray_ranks_have_own_device() -> None:
    assert plan_cluster(nodes(8, 3), 3, "cpu", 3) == ClusterPlan(3, 3, 0, 3)
    assert plan_cluster(nodes(8, gpus=(4,)), 2, "auto", 2) == ClusterPlan(2, 4, 2, 2)
    with pytest.raises(RequestError, match=r"3 replicas need a GPU and a processor for each of their 2 ranks.*for 2"):
        plan_cluster(nodes(8, 1, gpus=(4, 4)), 3, "auto", 2)


@pytest.mark.parametrize(
    ("machines", "count", "device", "says"),
    [
        (nodes(1, 1), 3, "auto", "3 replicas need a processor each, and this Ray has room for 2"),
        (nodes(8, gpus=(1,)), 2, "auto", "2 replicas need a GPU and a processor each, and this Ray has room for 1"),
        (nodes(8, gpus=(2,)), 2, "cuda:1", "use --device cuda"),
        ([], 1, "auto", "this Ray has room for 0"),
    ],
)
def test_ray_impossible_placement_is_reported(machines: Any, count: int, device: str, says: str) -> None:
    with pytest.raises(RequestError, match=says):
        plan_cluster(machines, count, device)
