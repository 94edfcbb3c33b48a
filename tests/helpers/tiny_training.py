"""A tiny random target with a tokenizer, texts, and a training run of seconds. The clock counts updates."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from tests.helpers.tiny_checkpoint import save, tiny_model, tiny_tokenizer
from triforce.llm import LLM
from triforce.training.trainer import Trainer
from triforce.training.training_config import TrainingConfig

CONFIG = TrainingConfig(
    rows=2, width=32, deepest=64, steps=3, anchors=0.6, own_every=3, least_choices=300, learning_rate=0.02, warmup=2,
    check_every=4, heldout_rows=2,
)  # fmt: skip


def target_folder(folder: Path, **sizes: Any) -> Path:
    """Write a random target of three layers, whose latest token counts most, so that a draft can learn."""
    model = tiny_model(**({"vocab_size": 300, "max_position_embeddings": 640, "num_hidden_layers": 3} | sizes))
    for name, weight in model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weight.data *= 0.4
    tiny_tokenizer().save_pretrained(folder)
    return save(model, folder)


def text(words: int = 3000, seed: int = 0) -> str:
    generator = random.Random(seed)
    return " ".join(generator.choice(["the", "cat", "hat", "mat", "sat", "on", "and", "café"]) for _ in range(words))


def trainer(target: Path, folder: Path, texts: dict[str, str] | None = None, **changes: Any) -> Trainer:
    """Return a trainer whose clock advances one second per update."""
    folder.mkdir(exist_ok=True)
    tiny_trainer = Trainer(
        LLM(target, None, mode="ar"), texts or {"a": text()}, folder, CONFIG, clock=lambda: 0.0, **changes
    )
    tiny_trainer.clock = lambda: float(tiny_trainer.state.updates)
    return tiny_trainer
