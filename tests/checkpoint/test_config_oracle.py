"""config.json as in transformers: sizes, defaults, windows, and rotations. Bad values are refused.

Rotations are those of transformers bit for bit, once torch's powers are rounded as ours: its own are a unit in the last
place off here and there, and which ones depends on the machine.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from tests.helpers.mutants.mutation import Mutant
from tests.helpers.mutants.registry import caught_in
from triforce.checkpoint import rope_scaling
from triforce.checkpoint.hf_config import HFConfig, frequencies, model_config, read_config
from triforce.errors import ModelError

Values = dict[str, Any]
SAME = (
    "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "rms_norm_eps", "tie_word_embeddings", "max_position_embeddings",
)  # fmt: skip
TRIES = 25


def random_fields(random: Random, **choices: Any) -> Values:
    """Return each of the fields with one of its values, or without the field."""
    return {name: random.choice(values) for name, values in choices.items() if random.random() < 0.5}


def rope(random: Random, kind: str, D: int) -> Values:
    """Return the fields that a rope type needs, and some of its optional fields."""
    needs: Values = {} if kind == "default" else {"factor": random.choice([1.0, 2, 4.0, 8.0, 32.0, 2.5])}
    options: Values = {}
    if kind == "yarn":
        options = random_fields(
            random, beta_fast=[16, 32.0], beta_slow=[1, 2.0], attention_factor=[0.7, 1.2], truncate=[False]
        )
        options |= random_fields(random, mscale=[1.0, 0.707], mscale_all_dim=[1.0, 0.5])
        needs |= random.choice([{"factor": None, "original_max_position_embeddings": 32}, options])
        needs.setdefault("original_max_position_embeddings", random.choice([32, 4096, 8192]))
    if kind == "llama3":
        needs |= {"low_freq_factor": random.choice([1, 1.5]), "high_freq_factor": random.choice([4.0, 6])}
        options = random_fields(random, original_max_position_embeddings=[32, 8192])
    if kind == "longrope":
        needs = {
            f"{name}_factor": [round(random.uniform(1, 40), 2) for _ in range(D // 2)] for name in ("short", "long")
        }
        options = random_fields(random, factor=[1.0, 16.0, 32.0], attention_factor=[1.0, 1.19])
        options |= random_fields(random, original_max_position_embeddings=[64, 4096])
    return needs | options


def config(random: Random, family: str, kind: str) -> Values:
    """Return a config.json, with its rope in the old form or the new one."""
    heads = random.choice([4, 8, 32])
    values: Values = {
        "model_type": family,
        "hidden_size": heads * random.choice([16, 64, 96]),
        "num_attention_heads": heads,
    }
    values |= random_fields(
        random,
        vocab_size=[97, 128_256],
        intermediate_size=[96, 14_336],
        num_hidden_layers=[1, 2, 30, 36],
        num_key_value_heads=[1, 2, 4, 4 if family == "mistral" else None],
        head_dim=[8, 128, 64],
        rms_norm_eps=[1e-5, 1e-6],
        tie_word_embeddings=[True, False],
        max_position_embeddings=[128, 4096, 131_072],
        sliding_window=[None, 64, 4096],
        use_sliding_window=[True, False],
        max_window_layers=[0, 1, 28],
    )
    if 4 % (values.get("num_key_value_heads") or 4) or family != "llama":
        values.setdefault("num_key_value_heads", heads)  # or a family's own number, which may not divide
    D = values.get("head_dim") or (128 if family == "qwen3" else values["hidden_size"] // heads)
    thetas = {"rope_theta": random.choice([10_000.0, 500_000, 1e6, 10_000_000])}
    old = random.random() < 0.5
    rope_fields = rope(random, kind, D)
    if kind in ("llama3", "longrope") and random.random() < 0.2:
        values["original_max_position_embeddings"] = 2048  # above the others, as in Phi-3
    if old and kind == "default":
        return values | random.choice([thetas, {}])
    if old:
        return (
            values
            | random.choice([thetas, {}])
            | {"rope_scaling": {random.choice(["type", "rope_type"]): kind} | rope_fields}
        )
    return values | {"rope_parameters": {"rope_type": kind} | random.choice([thetas, {}]) | rope_fields}


def read_both(folder: Path, values: Values) -> tuple[HFConfig, Any]:
    (folder / "config.json").write_text(json.dumps(values))
    return read_config(folder), transformers.AutoConfig.from_pretrained(folder, local_files_only=True)


def differences(folder: Path, family: str, kind: str) -> Iterator[str]:
    """Yield the fields that differ from transformers, over random configs of a family and a rope type."""
    random = Random(f"{family} {kind}")
    for _ in range(TRIES):
        values = config(random, family, kind)
        ours, theirs = read_both(folder, values)
        facts = {name: (getattr(ours, name), getattr(theirs, name)) for name in SAME}
        D = getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads
        facts |= {"head_dim": (ours.head_dim, D), "window": (ours.sliding_window, window(theirs))}
        facts["rope_theta"] = ours.rope_theta, theirs.rope_parameters["rope_theta"]
        for context in (32, theirs.max_position_embeddings, 3 * theirs.max_position_embeddings):
            table, scale = frequencies(ours, context)
            expected, factor = reference(theirs, kind, context)
            facts[f"table for {context}"] = table.tolist(), expected.tolist()  # float32: every bit
            facts[f"scale for {context}"] = scale, factor
        yield from (
            f"{name} of {values}: {our_value} {their_value}"
            for name, (our_value, their_value) in facts.items()
            if our_value != their_value
        )


@pytest.fixture
def rounded_powers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Round torch's powers of float32 numbers once, from float64."""

    def power(exponents: Tensor, base: float) -> Tensor:
        return (torch.tensor(base, dtype=torch.float32).double() ** exponents.double()).float()

    monkeypatch.setattr(Tensor, "__rpow__", power)


def test_powers_are_within_a_unit_of_those_of_torch() -> None:
    random = Random(0)
    units = set[int]()
    for _ in range(200):
        theta, D = random.choice([1e4, 5e5, 1e6, random.uniform(2, 1e8)]), random.choice([16, 64, 96, 128, 256])
        theirs_F = (theta ** (torch.arange(0, D, 2, dtype=torch.float32) / D)).numpy()
        units |= {*np.unique(rope_scaling.wavelengths(theta, D).view(np.int32) - theirs_F.view(np.int32)).tolist()}
    assert 0 in units and units <= {-1, 0, 1}


def window(theirs: Any) -> int | None:
    kinds = getattr(theirs, "layer_types", None) or ["sliding_attention"]
    sliding_window = getattr(theirs, "sliding_window", None)
    if theirs.model_type == "llama":
        return None  # for any config: its class makes no such mask
    return sliding_window if "sliding_attention" in kinds else None


def reference(theirs: Any, kind: str, context: int) -> tuple[torch.Tensor, float]:
    if kind == "default":
        return LlamaRotaryEmbedding.compute_default_rope_parameters(theirs)
    return ROPE_INIT_FUNCTIONS[kind](theirs, torch.device("cpu"), seq_len=context)


@pytest.mark.usefixtures("rounded_powers")
@pytest.mark.parametrize("kind", rope_scaling.TYPES)
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_config_equals_transformers(tmp_path: Path, family: str, kind: str) -> None:
    assert list(differences(tmp_path, family, kind)) == []


@pytest.mark.usefixtures("rounded_powers")
@pytest.mark.parametrize("mutant", caught_in("test_config_mutant_differs_from_transformers"), ids=str)
def test_config_mutant_differs_from_transformers(
    tmp_path: Path, mutant: Mutant, monkeypatch: pytest.MonkeyPatch
) -> None:
    (where,) = mutant.checks
    mutant.apply(monkeypatch)
    family, kind = where.split()
    assert list(differences(tmp_path, family, kind))


def test_config_layer_types_equal_transformers(tmp_path: Path) -> None:
    values = {"model_type": "qwen3", "num_hidden_layers": 2, "use_sliding_window": True, "sliding_window": 64}
    for kinds in (["full_attention"] * 2, ["full_attention", "sliding_attention"]):
        ours, theirs = read_both(tmp_path, values | {"layer_types": kinds})
        assert ours.sliding_window == window(theirs)
    for wrong in (["full_attention"], ["linear_attention"] * 2, "full_attention", [1, 2], [[], {}]):
        (tmp_path / "config.json").write_text(json.dumps(values | {"layer_types": wrong}))
        with pytest.raises(ModelError, match=r"layer_types = .*lists of 2"):
            read_config(tmp_path)


BAD = ("x", -1, 0, float("nan"), float("inf"), -0.5, 10**30, 1e300, [], {}, [1], {"a": {}}, True)
SIZES = (*(name for name in SAME if name not in ("model_type", "tie_word_embeddings")), "head_dim")
ROPES: dict[str, Values] = {
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 2.0, "attention_factor": 1.0, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "truncate": True,
             "mscale_all_dim": 1.0, "original_max_position_embeddings": 32},
    "llama3": {"factor": 2.0, "low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 32},
    "longrope": {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "factor": 2.0, "attention_factor": 1.0,
                 "original_max_position_embeddings": 32},
}  # fmt: skip
USUAL = {"model_type": "qwen3", "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}


def outcome(folder: Path, values: Values) -> str:
    """Return what is wrong with a config, or an empty text."""
    (folder / "config.json").write_text(json.dumps(values))
    try:
        hf = read_config(folder)
        for context in (2, hf.max_position_embeddings, hf.positions):
            model_config(hf, vocab_size=hf.vocab_size, context=context)
    except ModelError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("field", SIZES)
def test_config_bad_size_raises(tmp_path: Path, field: str) -> None:
    assert outcome(tmp_path, USUAL) == ""
    for bad in BAD:
        assert f"{field} = " in outcome(tmp_path, USUAL | {field: bad}), bad


@pytest.mark.parametrize("field", ["sliding_window", "max_window_layers", "use_sliding_window", "tie_word_embeddings"])
def test_config_bad_choice_raises(tmp_path: Path, field: str) -> None:
    usual_fields = USUAL | {"use_sliding_window": True, "sliding_window": 40_000, "max_window_layers": 0}
    for bad in BAD:
        fits = type(bad) is type((usual_fields | {"tie_word_embeddings": True})[field]) and (
            bad is True or 0 <= bad < 100
        )
        assert fits or f"{field} = " in outcome(tmp_path, usual_fields | {field: bad}), bad


@pytest.mark.parametrize("kind", ROPES)
def test_config_bad_rope_raises(tmp_path: Path, kind: str) -> None:
    usual_fields: Values = {"rope_type": kind, "rope_theta": 10_000.0} | ROPES[kind]
    assert outcome(tmp_path, USUAL | {"rope_parameters": usual_fields}) == ""
    for field in usual_fields:
        for bad in BAD:
            fine = (field, bad) in (("truncate", True), ("mscale", 0), ("mscale_all_dim", 0))
            error = outcome(tmp_path, USUAL | {"rope_parameters": usual_fields | {field: bad}})
            assert fine or "config.json: " in error, (field, bad)
    for bad in ("x", 1, [], [1], True):
        assert not bad or "rope_scaling = " in outcome(tmp_path, USUAL | {"rope_scaling": bad})
    large = usual_fields | {"factor": 1e12, "rope_theta": 1e12}
    assert "gives no usable" in outcome(tmp_path, USUAL | {"rope_parameters": large}) or kind != "dynamic"


@pytest.mark.parametrize("bad", [[], {}, 1, None, True, ["llama"]])
def test_config_family_must_be_name(tmp_path: Path, bad: object) -> None:
    assert "model_type = " in outcome(tmp_path, USUAL | {"model_type": bad})


def test_config_too_many_layers_raises_at_once(tmp_path: Path) -> None:
    assert "num_hidden_layers = 1000000 " in outcome(tmp_path, USUAL | {"num_hidden_layers": 10**6})


def test_config_rope_per_layer_type_raises(tmp_path: Path) -> None:
    nested = {"full_attention": {"rope_type": "default"}, "sliding_attention": {"rope_type": "default"}}
    assert "rope_parameters.full_attention = " in outcome(tmp_path, USUAL | {"rope_parameters": nested})
