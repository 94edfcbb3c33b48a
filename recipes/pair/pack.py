"""Packs the corpus into files of uint16 tokens: training and held-out tokens per source, and each evaluation text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from recipes.pair import apart, corpus, files
from recipes.pair.config import Corpus
from recipes.pair.tokenizer import END

TEXTS_AT_ONCE = 8


def encode(tokenizer: Tokenizer, texts: Iterable[str]) -> Iterator[np.ndarray]:
    """Yield the uint16 ids of each text, after `<|endoftext|>`."""
    end = tokenizer.token_to_id(END)
    texts = iter(texts)
    while group := list(islice(texts, TEXTS_AT_ONCE)):
        for encoding in tokenizer.encode_batch_fast(group, add_special_tokens=False):
            yield np.array([end, *encoding.ids], dtype=np.uint16)


def pack_source(tokenizer: Tokenizer, settings: Corpus, source: str, folder: Path, out: Path) -> None:
    """Write `<source>.heldout.npy` with the last tokens, and then `<source>.train.npy` with all other tokens.

    Windows of the evaluation texts, which must be packed before, are cut from the source.
    """
    texts = corpus.texts(folder, settings.archives[source], source)
    evaluation = [np.load(path) for path in sorted((out / "eval").glob("*.npy"))]
    tokens = apart.cut(np.concatenate(list(encode(tokenizer, (text for _, text in texts)))), evaluation)
    cut = len(tokens) - settings.heldout_tokens
    files.write_array(out / f"{source}.heldout.npy", tokens[cut:])
    files.write_array(out / f"{source}.train.npy", tokens[:cut])


def pack_evaluation(tokenizer: Tokenizer, settings: Corpus, folder: Path, out: Path) -> None:
    """Write `eval/<name>.npy` for each evaluation text, and `eval/bytes.json` with their sizes in bytes."""
    (out / "eval").mkdir(exist_ok=True)
    sizes = {}
    for name, text in corpus.texts(folder, settings.evaluation):
        (tokens,) = encode(tokenizer, [text])
        files.write_array(out / "eval" / f"{name}.npy", tokens)
        sizes[name] = len(text.encode())
    files.write_json(out / "eval" / "bytes.json", sizes)


def sample(settings: Corpus, folder: Path) -> Iterator[str]:
    """Yield the start of each training text, for the tokenizer. Raises ValueError if it is an evaluation text."""
    evaluation = [name for name, _ in corpus.texts(folder, settings.evaluation)]
    for source, archives in settings.archives.items():
        for name, text in corpus.texts(folder, archives, source):
            corpus.check_apart([name], evaluation)
            yield text[: settings.sample_bytes[source]]
