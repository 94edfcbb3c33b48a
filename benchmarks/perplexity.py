"""Perplexity of a model in its default precision and in bfloat16, beside float32, and how far predictions stray.

    python -m benchmarks.perplexity smollm2 --texts FOLDER

All read the same windows of each text: the model as it is by default, and the numbers that its weights stand for. Two
figures are told of each precision: the increase of perplexity over float32, with the half of its 95 % interval, for
which tokens are soon too few; and the mean divergence KL(float32 | precision) per token, which is the increase for a
text drawn from the model itself, and known much more exactly.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import exp, expm1
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from benchmarks import study
from triforce.arrays import DType
from triforce.backends.decoder import Decoder
from triforce.checkpoint.weights import read_weights
from triforce.cli.bench import parts, setup
from triforce.cli.bench.setup import show
from triforce.cli.options import described, json_file, model, quiet
from triforce.cli.text_files import read_texts
from triforce.errors import RequestError
from triforce.eval import scoring, tokenize
from triforce.eval.context import Text, spread_windows
from triforce.eval.scoring import interval
from triforce.llm import LLM
from triforce.tables import Table

Row = dict[str, Any]
EXACT, OTHERS = "float32", ("default", "bfloat16")
BLOCK = 64
"""Neighbouring tokens that count as one observation."""


def precisions(llm: LLM) -> dict[str, Decoder]:
    """Return a model's decoder as it is, and those of the numbers that its weights stand for."""
    target = llm.target

    def numbers(dtype: DType) -> Decoder:
        archives, rows = target.files.archives(packed=False), target.files.config.vocab_size
        weights = read_weights(target.path, archives, target.config, rows=rows, dtype=dtype)
        return Decoder(target.config, weights)

    return {"default": target.decoder, EXACT: numbers(EXACT), "bfloat16": numbers("bfloat16")}


def losses(decoders: Mapping[str, Decoder], ids_N: Tensor) -> dict[str, Tensor]:
    """Return for each decoder float32 (2, N - 1): the loss of each token but the first, and the divergence there."""
    views = {name: scoring.full_view(decoder, len(ids_N)) for name, decoder in decoders.items()}
    passes = (scoring.read(decoder, views[name], ids_N[:-1]) for name, decoder in decoders.items())
    found: dict[str, list[Tensor]] = {name: [] for name in decoders}
    for labels_T, *logits in zip(scoring.parts(ids_N[1:], scoring.WIDTH), *passes, strict=True):
        logs = {name: logits_TV.float().log_softmax(-1) for name, logits_TV in zip(decoders, logits, strict=True)}
        for name, log_TV in logs.items():
            nats_T = -log_TV.gather(-1, labels_T[:, None])[:, 0]
            strayed_T = (logs[EXACT].exp() * (logs[EXACT] - log_TV)).sum(-1)
            found[name].append(torch.stack([nats_T, strayed_T]))
    return {name: torch.cat(each, 1) for name, each in found.items()}


def row(name: str, found: Mapping[str, Tensor]) -> Row:
    """Return a text's figures: increases and their intervals as shares, divergences in nats."""
    exact_N = found[EXACT][0].double()
    figures: Row = {"text": name, "tokens": len(exact_N), "perplexity": exp(exact_N.mean())}
    for other in OTHERS:
        increase = interval(found[other][0].double() - exact_N, BLOCK)
        half, strayed = expm1(increase.high) - expm1(increase.mean), found[other][1].double().mean().item()
        figures[other] = {"increase": expm1(increase.mean), "half": half, "divergence": strayed}
    return figures


def add_arguments(parser: ArgumentParser) -> None:
    model(parser)
    parts.texts(parser)
    parser.add_argument("--length", type=int, default=1024, metavar="N", help=described("tokens of a window"))
    parser.add_argument("--windows", type=int, default=4, metavar="N", help=described("windows of each text at most"))
    quiet(parser)
    json_file(parser)


def measure(options: Namespace) -> None:
    """Print a table at the end. Raises RequestError for windows that are too short."""
    if options.length <= 2 * BLOCK or options.windows < 1:
        raise RequestError(f"--length must be above {2 * BLOCK}, and --windows at least 1")
    llm = LLM(options.model, None)
    texts = tokenize(llm, read_texts(options.texts) if options.texts else setup.own_texts())
    windows = [window for text in texts for window in spread_windows(text, options.length, options.windows)]
    found = list(rows(precisions(llm), tqdm(windows, desc="perplexity", disable=options.quiet or None, leave=False)))
    study.write(options, {"model": Path(llm.target.path).name, "rows": found})
    show(tables(found))


def rows(decoders: Mapping[str, Decoder], windows: Iterable[Text]) -> Iterator[Row]:
    """Yield a row for each text, and at last one for all of them."""
    of_text: dict[str, list[dict[str, Tensor]]] = {}
    for window in windows:
        of_text.setdefault(window.name, []).append(losses(decoders, window.ids_N))
    of_text["all"] = [each for found in of_text.values() for each in found]
    for name, found in of_text.items():
        yield row(name, {each: torch.cat([one[each] for one in found], 1) for each in decoders})


def tables(found: Sequence[Row]) -> list[Table]:
    """Return a table, a line for each text."""
    lines = []
    for each in found:
        cells = [each["text"], f"{each['tokens']:,}", f"{each['perplexity']:.3f}"]
        for name in OTHERS:
            figures = each[name]
            cells += [f"{figures['increase']:+.2%}", f"{figures['half']:.2%}", f"{figures['divergence']:.5f}"]
        lines.append(cells)
    note = (
        "Perplexity of float32, and by how much that of the default precision and of bfloat16 is higher, with the half "
        "of the 95 % interval; then the mean divergence from float32 per token, in nats."
    )
    header = ["text", "tokens", EXACT, *(cell for name in OTHERS for cell in (name, "±", "KL"))]
    return [Table("Perplexity", note, header, lines)]


main = study.command("perplexity", __doc__, add_arguments, measure)

if __name__ == "__main__":
    sys.exit(main())
