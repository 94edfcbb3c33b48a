"""Buckets and padding: what a pass looks like to a graph. Shape suffixes as in backends/kernel_api.py."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from triforce.backends.cuda.graphs import MAX_GRAPHS, GraphInputs, Graphs, Replay, clear_graphs, shape_of
from triforce.backends.cuda.splits import bucket
from triforce.backends.kernel_api import ForwardBatch, PageTable

CPU = "cpu"


@pytest.mark.parametrize(
    ("size", "min_size", "padded"), [(0, 4, 0), (1, 1, 1), (3, 1, 4), (4, 1, 4), (5, 8, 8), (9, 8, 16)]
)
def test_bucket_sizes_cover_widths(size: int, min_size: int, padded: int) -> None:
    assert bucket(size, min_size) == padded


def a_pass(rows: int, units: int, **batch_fields: object) -> ForwardBatch:
    page_list = torch.arange(rows * units).view(rows, units).int()
    of_heads = torch.arange(3 * rows * 2 * units).view(3, rows, 2, units).int()
    lists = [PageTable(page_list, [5] * rows, [2] * rows), PageTable(of_heads, [7] * rows, [2] * rows, 8)]
    return ForwardBatch([9] * rows, [(2, lists[0]), (3, lists[1])], **batch_fields)  # type: ignore[arg-type]


def test_view_shape_is_rounded_to_bucket() -> None:
    shape = shape_of(3, 5, 2, a_pass(3, 70), padded=True)
    assert (shape.rows, shape.width, shape.columns) == (4, 8, 2)
    assert [view.units for view in shape.views] == [(4, 128), (3, 4, 2, 128)]
    exact = shape_of(3, 5, 2, a_pass(3, 70), padded=False)
    assert (exact.rows, exact.width, exact.columns) == (3, 5, 2)
    assert [view.units for view in exact.views] == [(3, 70), (3, 3, 2, 70)]


def test_shape_hint_gives_one_shape() -> None:
    """Plain decoding and verification, of one row and of several, have one shape.

    Without `least` there are many shapes.
    """
    kinds = [(1, 1, 1), (1, 7, 7), (2, 9, 9), (8, 16, 12)]
    assert len({shape_of(*kind, a_pass(kind[0], 40, min_shape=(8, 16)), padded=True) for kind in kinds}) == 1
    assert len({shape_of(*kind, a_pass(kind[0], 40), padded=True) for kind in kinds}) == len(kinds)


def test_graph_inputs_hold_only_current_pass() -> None:
    frame = GraphInputs(shape_of(3, 4, 4, a_pass(3, 64), padded=True), CPU)
    frame.fill(np.full((4, 4), 9), np.full((4, 4), 3), a_pass(4, 64))
    frame.fill(np.array([[1, 2, 3]]), np.array([[2]]), a_pass(1, 60))
    assert frame.ids_BT.tolist() == [[1, 2, 3, 0], *[[0] * 4] * 3]
    assert frame.at_BJ.tolist() == [[2, 0, 0, 0], *[[0] * 4] * 3]
    assert frame.positions_B.tolist() == [9, 0, 0, 0] and frame.counts_B.tolist() == [2, 0, 0, 0]
    assert [starts.tolist() for starts in frame.starts] == [[5, 0, 0, 0], [7, 0, 0, 0]]
    assert torch.equal(frame.units[0][0, :60], torch.arange(60))
    layers = frame.layer_tables()
    assert len(layers) == 5 and layers[4][0].shape == (4, 2, 64) and layers[4][2].unit == 8
    assert torch.equal(layers[4][0][0, 1, :60], torch.arange(5 * 60, 6 * 60))


def test_used_graphs_are_kept() -> None:
    graphs = Graphs(CPU)
    captured_keys = []
    inputs = GraphInputs(shape_of(1, 1, 1, a_pass(1, 1), padded=True), CPU)

    def make(key: int) -> Replay:
        captured_keys.append(key)
        return Replay(inputs)

    for key in [*range(MAX_GRAPHS), 0, MAX_GRAPHS, 0, 1]:
        graphs.get(key, lambda key=key: make(key))  # type: ignore[misc]
    assert captured_keys == [*range(MAX_GRAPHS), MAX_GRAPHS, 1]
    clear_graphs()
    graphs.get(0, lambda: make(0))
    assert captured_keys[-1] == 0
