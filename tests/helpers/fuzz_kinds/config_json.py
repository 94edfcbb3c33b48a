"""Cases of config.json: folders of several families with spoiled configs or generation configs."""

from __future__ import annotations

import json
import shutil
from contextlib import redirect_stdout
from functools import cache, partial
from io import StringIO
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.helpers.family_models import family_model
from tests.helpers.forked_folder import made_apart
from tests.helpers.hostile_values import as_json, spoiled
from tests.helpers.tiny_checkpoint import save, tiny_tokenizer
from triforce.cli import main, parser

FAMILIES = ["llama-biases", "mistral-window", "phi-4-mini", "gemma-3", "glm-4.5", "gpt-oss"]
FIELDS = [
    "head_dim", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "vocab_size", "max_position_embeddings", "sliding_window", "layer_types", "rope_theta", "rope_scaling",
    "rope_parameters", "partial_rotary_factor", "rms_norm_eps", "tie_word_embeddings", "model_type", "num_experts",
    "num_local_experts", "num_experts_per_tok", "quantization_config", "auto_map", "eos_token_id", "text_config",
    "num_nextn_predict_layers", "original_max_position_embeddings", "hidden_act", "factor", "rope_type", "type",
]  # fmt: skip
ASKED = ["-p", "the cat", "-n", "2", "--ignore-eos", "-q"]
PARSER = cache(parser.build_parser)


@cache
def whole(family: str) -> Path:
    """Return a valid folder."""

    def make(folder: Path) -> None:
        tiny_tokenizer().save_pretrained(folder)
        save(family_model(family, num_hidden_layers=2, vocab_size=300), folder)

    return made_apart(make)


def copied(family: str, folder: Path) -> Path:
    """Copy a valid folder into an empty one."""
    return Path(shutil.copytree(whole(family), folder, dirs_exist_ok=True))


WHOLES = [partial(copied, family) for family in FAMILIES]


def make_case(random: Random, folder: Path) -> None:
    copied(random.choice(FAMILIES), folder)
    name = "config.json" if random.random() < 0.9 else "generation_config.json"
    file = folder / name
    values: dict[str, Any] = json.loads(file.read_text())
    text = as_json(spoiled(random, values, FIELDS if name == "config.json" else ["temperature", "top_p", "top_k"]))
    if random.random() < 0.05:
        text = text[: random.randrange(len(text))]
    file.write_text(text)


def open_case(folder: Path) -> int:
    """Run `info` and `generate`; the text may hold anything."""
    return commanded(["info", str(folder)]) or generated([str(folder), "--draft", "none", *ASKED])


def generated(arguments: list[str]) -> int:
    """Return the exit code of `generate`."""
    with redirect_stdout(StringIO()):
        return commanded(["generate", *arguments])


def commanded(arguments: list[str]) -> int:
    """Return the exit code of a command. All share one parser: building it takes longer than many refusals."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parser, "build_parser", PARSER)
        return main(arguments)
