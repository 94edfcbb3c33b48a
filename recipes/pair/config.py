"""All settings of a run, read from one TOML file per size of the pair."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, field
from pathlib import Path

import torch

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Machine:
    """Device and precision. threads: threads on a CPU. slice: positions whose logits are in memory at once."""

    device: str = "cpu"
    dtype: str = "bf16"
    compile: bool = False
    threads: int = 2
    slice: int = 1024

    @property
    def torch_dtype(self) -> torch.dtype:
        """The autocast dtype of matrix products. Weights and optimizer states stay in fp32."""
        return DTYPES[self.dtype]


@dataclass(frozen=True)
class Corpus:
    """Corpus of a run. archives: archives of each source. sample_bytes: bytes of each text that train the tokenizer.

    evaluation: archives of the evaluation texts. heldout_tokens: last tokens of each source, which are not trained on.
    """

    archives: dict[str, list[str]]
    evaluation: list[str]
    sample_bytes: dict[str, int]
    vocab: int
    heldout_tokens: int


@dataclass(frozen=True)
class Shape:
    """Shape of a Llama with as many KV heads as query heads and with tied embeddings.

    yarn_factor: above 1, the rotation is YaRN's (Peng et al. 2023) for `max_positions` from the start of training on.
    circuits: whether the initial weights have the induction circuit (circuits.py).
    """

    hidden: int
    layers: int
    heads: int
    intermediate: int
    max_positions: int
    rope_theta: float
    yarn_factor: float = 1.0
    circuits: bool = False


@dataclass(frozen=True)
class Stage:
    """One stage of training: `steps` steps of `rows` sequences of `length` tokens, with `micro_rows` rows per pass.

    mix: share of rows per source. planted: share of rows with each kind of planted repetition (plants.py). With `span`,
    a share `stretched` of the rows consists of 2 to `pieces` pieces within `span` positions (batches.py).

    After `warmup` steps the learning rate falls linearly from `lr` to `lr_end`. The embedding has the factor
    `embedding_lr`, and the attention of the first two layers, which have the circuits, the factor `circuit_lr`.

    sharpen: factor of all queries at the start of the stage, because more keys need larger differences of scores.
    teacher: model that the stage distils. kl_share: weight of KL in the distillation. patience: number of held-out
    checks without progress after which the stage ends; 0: it never ends early.
    """

    name: str
    model: str
    length: int
    rows: int
    micro_rows: int
    steps: int
    lr: float
    lr_end: float
    mix: dict[str, float]
    planted: dict[str, float] = field(default_factory=dict)
    span: int = 0
    stretched: float = 1.0
    pieces: int = 4
    embedding_lr: float = 1.0
    circuit_lr: float = 1.0
    sharpen: float = 1.0
    warmup: int = 20
    weight_decay: float = 0.05
    clip: float = 1.0
    teacher: str = ""
    kl_share: float = 0.9
    check_every: int = 100
    save_every: int = 50
    patience: int = 0


@dataclass(frozen=True)
class Measure:
    """Measurements of the model card. max_context: tokens of the longest texts of `triforce eval`.

    far_context: tokens of the longest texts for loss by position. prompt: start of the card's sample text.
    sample_tokens: tokens that follow the prompt.
    """

    max_context: int
    far_context: int
    prompt: str
    sample_tokens: int


@dataclass(frozen=True)
class Config:
    """All settings of a run."""

    name: str
    seed: int
    machine: Machine
    corpus: Corpus
    shapes: dict[str, Shape]
    stages: list[Stage]
    measure: Measure


def load(path: Path) -> Config:
    """Return the settings in a TOML file. Raises TypeError for an unknown key."""
    raw = tomllib.loads(path.read_text(encoding="utf-8"))
    return Config(
        name=path.stem,
        seed=raw["seed"],
        machine=Machine(**raw["machine"]),
        corpus=Corpus(**raw["corpus"]),
        shapes={name: Shape(**shape) for name, shape in raw["shapes"].items()},
        stages=[Stage(**stage) for stage in raw["stages"]],
        measure=Measure(**raw["measure"]),
    )
