"""Every number of a run, read from one TOML file per size."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, field
from pathlib import Path

import torch

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Machine:
    """Where and how to compute; `threads` is for the CPU only, `slice` the positions whose logits exist at once."""

    device: str = "cpu"
    dtype: str = "bf16"
    compile: bool = False
    threads: int = 2
    slice: int = 1024

    @property
    def torch_dtype(self) -> torch.dtype:
        """The autocast dtype of matrix products; weights and optimizer states stay in fp32."""
        return DTYPES[self.dtype]


@dataclass(frozen=True)
class Corpus:
    """The archive of each source, and the bytes of each text that train the tokenizer."""

    archives: dict[str, list[str]]
    evaluation: list[str]
    sample_bytes: dict[str, int]
    vocab: int
    heldout_tokens: int


@dataclass(frozen=True)
class Shape:
    """A Llama with as many key-value heads as query heads and tied embeddings.

    With a `yarn_factor` its rotation is YaRN's (Peng et al. 2023) for `max_positions`, from the start of training on.
    With `circuits` it starts with heads that look things up (circuits.py).
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
    """One stretch of training: `steps` steps of `rows` sequences of `length` tokens, `micro_rows` at a time.

    `mix` is the share of rows per source, `planted` the share of rows with repetitions of a kind (plants.py). With a
    `span` a share `stretched` of the rows is made of 2 to `pieces` pieces over up to `span` positions (batches.py).
    `lr` runs linearly from `lr` to `lr_end` after `warmup` steps; the embedding has `embedding_lr` of it, and the
    attention of the first layers, where the circuits are, `circuit_lr`. The stage begins by multiplying all queries by
    `sharpen`: among more keys than before, scores must lie further apart. `patience` counts held-out checks without
    progress.
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
    """For the model card: tokens of the longest texts of all measurements of `triforce eval`, and of the longer texts
    for loss by position alone; the prompt of the sample, and how many tokens follow it.
    """

    max_context: int
    far_context: int
    prompt: str
    sample_tokens: int


@dataclass(frozen=True)
class Config:
    """A whole run."""

    name: str
    seed: int
    machine: Machine
    corpus: Corpus
    shapes: dict[str, Shape]
    stages: list[Stage]
    measure: Measure


def load(path: Path) -> Config:
    """Reads a run from a TOML file; unknown keys raise TypeError."""
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
