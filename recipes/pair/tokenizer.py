"""A byte-level BPE that is lossless on any text: no normaliser, no prefix space, all 256 bytes in the alphabet."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

END = "<|endoftext|>"


def train(texts: Iterable[str], vocab: int) -> Tokenizer:
    """Learn `vocab` entries: entry 0 is `<|endoftext|>`, entries 1 to 256 are the bytes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save(tokenizer: Tokenizer, folder: Path, max_positions: int) -> None:
    """Write tokenizer.json and then tokenizer_config.json. `AutoTokenizer` can load them offline."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END,
        "eos_token": END,
        "add_bos_token": False,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_positions,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def load(folder: Path) -> Tokenizer:
    """Return the tokenizer that `save` wrote."""
    return Tokenizer.from_file(str(folder / "tokenizer.json"))
