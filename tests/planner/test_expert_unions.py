"""Unions of experts: reported by passes, learnt from routing, and priced for widths that never ran.

Shape suffixes: N tokens, K experts of a token.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import pytest
from torch import Tensor

from tests.helpers.family_models import LENGTH, family_model, paged_logits, texts
from tests.helpers.mutants.mutation import Mutant
from tests.helpers.mutants.registry import caught_in
from tests.helpers.tiny_checkpoint import save
from tests.planner.test_break_even import LLAMA_8B, WINDOWS
from triforce.backends import dispatch
from triforce.backends.torch import model as torch_experts
from triforce.engine.model_loader import load
from triforce.kvcache import FullView, PagePool
from triforce.llm import LLM
from triforce.model.config import Architecture, Experts, ModelConfig
from triforce.model.expert_unions import SAMPLED_TOKENS, ExpertUnions, experts_touched
from triforce.planner.pass_costs import MACHINES, PASS_OVERHEAD_BYTES, TierWork
from triforce.ragged import ints

EXPERTS = Experts(128, 8, True)
LAYERS = 24
CORRELATED = [1.0, 1.6, 2.0, 2.4, 2.7, 3.0, 3.3, 3.6]
"""Size of the union of experts of 1 to 8 neighbouring tokens, relative to that of one token."""


def route(generator: Random, width: int) -> int:
    """Return how many experts `width` neighbours choose in a layer: each adds some, and repeats others."""
    chosen_experts: set[int] = set()
    for previous_union, union in zip([0.0, *CORRELATED], CORRELATED[:width], strict=False):
        new_experts = EXPERTS.chosen * (union - previous_union)
        new = int(new_experts) + (generator.random() < new_experts % 1)
        chosen_experts |= {*generator.sample(sorted(set(range(EXPERTS.count)) - chosen_experts), new)}
    return len(chosen_experts)


def route_uniformly(generator: Random, width: int) -> int:
    return len({e for _ in range(width) for e in generator.sample(range(EXPERTS.count), EXPERTS.chosen)})


def learnt(route: object, widths: tuple[int, ...], passes: int = 40) -> ExpertUnions:
    """Return unions learnt from passes of these widths by turns."""
    generator = Random(1)
    unions = ExpertUnions(EXPERTS)
    for i in range(passes):
        width = widths[i % len(widths)]
        unions.observe(width, sum(route(generator, width) for _ in range(LAYERS)) / LAYERS)  # type: ignore[operator]
    return unions


def price(unions: ExpertUnions, width: float, rows: int = 1) -> float:
    """Return the bytes of experts that a pass reads, relative to one token, where operations take no time."""
    config = replace(LLAMA_8B, intermediate_size=768, architecture=Architecture(experts=EXPERTS))
    work = TierWork.of(config, 2.0, 2.0, unions=unions)
    seconds = float(work.byte_times(width, rows, 0.0, 1e12, 0.0, 1.0)) - PASS_OVERHEAD_BYTES
    return (seconds - work.weight_bytes + work.expert_bytes) / work.expert_bytes


@pytest.mark.parametrize("widths", [(2, 4, 8), (2, 4), (4, 8), (8,)], ids=str)
def test_correlated_unions_are_priced_within_a_twentieth(widths: tuple[int, ...]) -> None:
    """Widths that ran and widths that did not are both priced within 5 %."""
    unions = learnt(route, widths)
    for width in (2, 4, 8):
        assert price(unions, width) == pytest.approx(CORRELATED[width - 1], rel=0.05)
    assert price(unions, 1) == pytest.approx(1.0)


def test_uniform_unions_are_priced_within_a_twentieth() -> None:
    for unions in (ExpertUnions(EXPERTS), learnt(route_uniformly, (2, 4, 8))):
        for width in (1, 2, 3, 4, 8, 16):
            assert price(unions, width) == pytest.approx(experts_touched(EXPERTS, width) / 8, rel=0.05)


def test_texts_that_changed_are_learnt_anew() -> None:
    generator = Random(2)
    unions = learnt(route, (2, 4, 8))
    for _ in range(120):
        unions.observe(8, sum(route_uniformly(generator, 8) for _ in range(LAYERS)) / LAYERS)
    assert price(unions, 8) == pytest.approx(experts_touched(EXPERTS, 8) / 8, rel=0.05)


def test_rows_are_taken_to_choose_independently() -> None:
    unions = learnt(route, (8,))
    unchosen = EXPERTS.count * (1 - price(unions, 8) * EXPERTS.chosen / EXPERTS.count)
    assert price(unions, 8, rows=3) == pytest.approx((EXPERTS.count - unchosen**3 / EXPERTS.count**2) / EXPERTS.chosen)


def test_shared_experts_are_priced_once() -> None:
    """Eight tokens read the shared experts once, as one token does. Only routed experts add bytes."""
    mixture = replace(EXPERTS, shared=4)
    config = replace(LLAMA_8B, intermediate_size=768, architecture=Architecture(experts=mixture))
    one_token, eight = (
        float(TierWork.of(config, 2.0, 2.0).byte_times(width, 1, 0.0, 1e12, 0.0, 1.0)) - PASS_OVERHEAD_BYTES
        for width in (1, 8)
    )
    assert one_token == pytest.approx(2 * config.weights_read)
    assert eight - one_token == pytest.approx(2 * config.expert_weights * (experts_touched(EXPERTS, 8) - 8), rel=1e-6)


@pytest.mark.parametrize(
    "config", [LLAMA_8B, replace(LLAMA_8B, architecture=Architecture(kinds=WINDOWS))], ids=["whole", "windows"]
)
def test_dense_prices_have_the_same_bits(config: ModelConfig) -> None:
    """A pass of a model without experts reads all weights, whatever was learnt of other models."""
    work, (balance, overhead, overlap) = TierWork.of(config, 0.6, 2.0), MACHINES.T
    for width, rows, keys in ((1.0, 1, 0.0), (5.0, 3, 4000.0)):
        weights = work.weight_bytes * (1.0 + (width * rows / (balance * 0.3)) ** overlap) ** (1.0 / overlap)
        kv = work.token_kv_bytes * keys * (1.0 + (width * 4 / (balance * 1.0)) ** overlap) ** (1.0 / overlap)
        expected_times = PASS_OVERHEAD_BYTES + overhead * 32 + (weights + kv)
        assert np.array_equal(work.byte_times(width, rows, keys, balance, overhead, overlap), expected_times)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a model of four layers. Each token chooses three of eight experts."""
    return save(family_model("qwen3-moe"), tmp_path_factory.mktemp("mixture"))


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a model of an MLP and three layers of experts. All tokens share two experts."""
    return save(family_model("glm-4.5"), tmp_path_factory.mktemp("shared"))


Observations = list[tuple[int, float]]


def observed_unions(
    folder: Path, pieces: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> tuple[Observations, list[list[int]]]:
    """Return observed unions of one text or two, and by layer with experts the unions of each pass's first tokens."""
    observed = Observations()
    chosen = list[list[int]]()
    choose = torch_experts.choose

    def spy(logits_NE: Tensor, experts: Experts, correction_E: Tensor | None) -> tuple[Tensor, Tensor]:
        ids_NK, weights_NK = choose(logits_NE, experts, correction_E)
        chosen.append([len(set(ids_NK[:width].flatten().tolist())) for width in range(1, SAMPLED_TOKENS + 1)])
        return ids_NK, weights_NK

    decoder = load(folder, device="cpu", dtype="float32", context=LENGTH).decoder
    with monkeypatch.context() as patch:
        patch.setattr(ExpertUnions, "observe", lambda self, width, touched: observed.append((width, touched)))
        patch.setattr(torch_experts, "choose", spy)
        paged_logits(decoder, texts(len(pieces[0])), pieces)
    return observed, chosen


PIECES = [[100], [1], [3], [8], [38]]


def check_observed_unions(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare observed unions with the experts that the router of the torch path chose."""
    with monkeypatch.context() as patch:
        patch.setattr(dispatch, "native", None)
        by_torch, chosen = observed_unions(folder, PIECES, patch)
    layers = len(chosen) // len(PIECES)
    passes = [chosen[i : i + layers] for i in range(0, len(chosen), layers)]
    widths = [min(SAMPLED_TOKENS, *piece) for piece in PIECES]
    expected = [
        (width, sum(layer[width - 1] for layer in pass_layers) / layers)
        for width, pass_layers in zip(widths, passes, strict=True)
    ]
    of_one = expected[1][1]
    assert by_torch == expected and any(touched < of_one * width for width, touched in expected[2:])
    if dispatch.native:
        assert observed_unions(folder, PIECES, monkeypatch)[0] == expected


def test_passes_tell_how_many_experts_they_touched(mixture: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_observed_unions(mixture, monkeypatch)


def test_passes_tell_of_shared_experts_and_not_of_dense_layers(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_observed_unions(shared, monkeypatch)


def test_padding_and_neighbours_tell_nothing(mixture: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes of a batch of two texts are observed only if their first tokens all belong to the first row."""
    pieces = [[0, 20], [5, 20], [20, 5], [2, 2], [100, 100], [23, 3]]
    assert [width for width, _ in observed_unions(mixture, pieces, monkeypatch)[0]] == [8, 8, 8]


@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_pass_that_reads_no_experts_tells_nothing(
    tmp_path: Path, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pass that scores nothing stops inside the last layer, which alone has experts here."""
    if kernels == "torch":
        monkeypatch.setattr(dispatch, "native", None)
    folder = save(family_model("glm-4.5", num_hidden_layers=2), tmp_path)
    decoder = load(folder, device="cpu", dtype="float32", context=LENGTH).decoder
    observed: list[float] = []
    monkeypatch.setattr(ExpertUnions, "observe", lambda self, width, touched: observed.append(touched))
    pool = PagePool(decoder.config, 1, 8, decoder.dtype, decoder.device)
    pool.reserve(0, 40)
    view = FullView(pool)
    view.observe(0)
    for scored in (0, 1):
        decoder(texts(1)[:, :20].numpy(), ints([20]), view, np.zeros((1, scored), np.int64))
    assert len(observed) == 1 and observed[0] >= 5


def test_prices_follow_what_the_target_has_routed(mixture: Path) -> None:
    llm = LLM(mixture, draft=None)
    works = llm.engines.parts.costs.passes.works
    unions = llm.models.target.unions
    assert unions is not None
    time_before = float(works["full"].byte_times(8, 1, 0.0, 8.0, 0.0, 8.0))
    for _ in range(9):
        unions.observe(8, 3.0)
    for tier in ("full", "retrieval"):
        assert works[tier].unions is unions
    assert float(works["full"].byte_times(8, 1, 0.0, 8.0, 0.0, 8.0)) < 0.8 * time_before


@pytest.mark.parametrize("mutant", caught_in("test_union_mutant_is_noticed"), ids=str)
def test_union_mutant_is_noticed(mixture: Path, shared: Path, mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant.apply(monkeypatch)
    with pytest.raises(AssertionError):
        check_observed_unions(mixture, monkeypatch)
        check_observed_unions(shared, monkeypatch)
        test_shared_experts_are_priced_once()
        test_correlated_unions_are_priced_within_a_twentieth((2, 4, 8))
        test_prices_follow_what_the_target_has_routed(mixture)
