"""The parts of `triforce bench`, and the arguments of each. Imports nothing heavy."""

from __future__ import annotations

import argparse
from typing import Any

from triforce.cli import options
from triforce.cli.options import minutes, path

_BUDGET = "tokens the retrieval tier sees (default: auto: 2048 or so)"
_MODES = f"some of {', '.join(options.MODES)}"


def bench(parser: argparse.ArgumentParser) -> None:
    subparsers = parser.add_subparsers(dest="bench", metavar="|".join(name for name, _, _ in PARTS))
    for name, summary, add in PARTS:
        part = subparsers.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
        add(part)
        options.json_file(part)


def _speed(parser: argparse.ArgumentParser) -> None:
    _models_and_texts(parser)
    add = parser.add_argument
    _cells(parser)
    options.number(parser, "--top-p", "top-p of sampled texts", 0.9, float, "X")
    default_modes = "ar, retrieval, triforce, draft-ngram and auto, if these models can run them"
    _several(parser, "--modes", str, "MODE", f"{_MODES} (default: {default_modes})")
    options.number(parser, "--tokens", "new tokens of each text", 128)
    text = "maximal number of turns of a cell (default: 7, or as many as fit into 30 seconds if these are more)"
    options.number(parser, "--repeats", text)
    options.number(parser, "--minutes", "minutes for all cells, which share them evenly", 90, minutes, "X")
    text = "keep the KV of prompts in FOLDER for later runs: 6 KiB per token"
    add("--caches", type=path, metavar="FOLDER", help=text)
    options.speculation_lengths(parser)
    options.retrieval_budget(parser, _BUDGET)
    options.searched_layers(parser)
    options.lower_tiers(parser)
    options.coupling(parser)
    text = "measure random weights instead of a model, and accept draft tokens with these probabilities"
    add("--synthetic", type=options.several(float), metavar="OUTER,INNER", help=text)
    _several(parser, "--shapes", str, "NAME", "of --synthetic: 30m (default), qwen3-30b-a3b and others")
    add("--layers", type=int, metavar="N", help="layers of these shapes, if memory has no room for all (default: all)")
    options.quiet(parser)
    options.placement(parser, context=False)


def _cells(parser: argparse.ArgumentParser) -> None:
    _several(parser, "--cells", str, "NAME", "cells by name; paper: 48 cells that cover all values (default)")
    parser.add_argument("--full", action="store_true", help="every cell there is: 600 of them, half a day")
    _several(parser, "--contexts", int, "N", "prompt tokens, instead of --cells")
    _several(parser, "--batches", int, "N", "texts generated together")
    _several(parser, "--temperatures", float, "X", "0 is greedy")
    _several(parser, "--workloads", str, "NAME", "books, code, needle, copy, summary, many-shot")


def _kernels(parser: argparse.ArgumentParser) -> None:
    options.model(parser, f"{options.MODEL}, whose passes are timed; without one, shapes with random weights are")
    text = "tokens in the KV cache (default: 32768,131072; of a model 300,4096)"
    _several(parser, "--contexts", int, "N", text)
    text = "such as llama-3.1-8b-q4_k_m, qwen3-30b-a3b (default: 30m,llama-3.2-1b)"
    _several(parser, "--shapes", str, "NAME", text)
    _several(parser, "--widths", int, "N", "tokens of a pass of a model (default: 1,2,3,4,5,7,8,9,16)")
    _several(parser, "--prompts", int, "N", "tokens of prompts that a model reads (default: 512)")
    text = "engines to measure on a GGUF file (default: triforce,ikllamacpp,llamacpp)"
    _several(parser, "--engines", str, "NAME", text)
    _pythons(parser)
    options.kv_dtype(parser)
    options.weight_inputs(parser)


def _lossless(parser: argparse.ArgumentParser) -> None:
    _models_and_texts(parser)
    _several(parser, "--contexts", int, "N", "prompt tokens", [512, 4096, 16_384])
    _several(parser, "--temperatures", float, "X", "0 is greedy", [0.0, 0.6, 1.0, 1.2])
    _several(parser, "--batches", int, "N", "texts generated together", [1, 4])
    _several(parser, "--workloads", str, "NAME", "as in bench speed", ["books", "code", "copy"])
    _several(parser, "--modes", str, "MODE", "to compare (default: all that these models can run)")
    _several(parser, "--couplings", str, "NAME", ", ".join(options.COUPLINGS), list(options.COUPLINGS))
    options.number(parser, "--tokens", "new tokens of each text", 128)
    options.retrieval_budget(parser, _BUDGET)
    _several(parser, "--lower-tiers", str, "NAME", "same, int8, int4", ["same"])
    options.quiet(parser)
    options.placement(parser, context=False)


def _compare(parser: argparse.ArgumentParser) -> None:
    _models_and_texts(parser)
    add = parser.add_argument
    _several(parser, "--engines", str, "NAME", "engines to compare (default: all; an unknown name lists them)")
    text = "prompt tokens (default: 16384,32768; of a GGUF file 512,2048,7168)"
    _several(parser, "--contexts", int, "N", text)
    text = "as in bench speed (default: books); of a GGUF file books, questions (default: both)"
    _several(parser, "--workload", str, "NAME", text)
    options.number(parser, "--tokens", "new tokens (default: 64; of a GGUF file 128)")
    _several(
        parser,
        "--temperatures",
        float,
        "X",
        "temperatures on a GGUF file; 0 is greedy (default: 0,0.6). Other models decode greedily",
    )
    _several(parser, "--modes", str, "MODE", f"modes of triforce on a GGUF file: {_MODES} (default: ar,auto)")
    options.number(parser, "--repeats", "turns of each engine on a GGUF file (default: 3)")
    options.number(parser, "--threads", "for every engine (default: the cores there are)")
    options.number(parser, "--timeout", "seconds that one run may take", 1800, float, "S")
    _pythons(parser)
    text = "keep converted checkpoints there (default: they are made anew each time)"
    add("--work", type=path, metavar="FOLDER", help=text)


def _start(parser: argparse.ArgumentParser) -> None:
    options.model(parser)
    options.draft(parser)
    add = parser.add_argument
    text = "measure random weights of a shape instead of a model: thin32 has 32 layers, thin80 has 80"
    add("--shape", metavar="NAME", help=text)
    _several(parser, "--modes", str, "MODE", _MODES, ["ar", "auto"])
    add("--prompt-file", type=path, metavar="FILE", help="a UTF-8 text (default: two words, or the demo's book)")
    options.number(parser, "--prompt-tokens", "use the first N tokens of the text")
    options.load_cache(parser)
    options.number(parser, "--repeats", "processes for each row", 5)
    options.placement(parser, context=False)


def _models_and_texts(parser: argparse.ArgumentParser) -> None:
    options.model(parser)
    options.draft(parser)
    texts(parser)


def _pythons(parser: argparse.ArgumentParser) -> None:
    text = "interpreter to run an engine with, as openvino=/path/to/python; all=... is for the others; may be repeated"
    parser.add_argument("--python", action="append", default=[], metavar="ENGINE=PATH", help=text)


def _several(
    parser: argparse.ArgumentParser, flag: str, kind: type, metavar: str, text: str, default: list[Any] | None = None
) -> None:
    """Add an option that takes values separated by commas."""
    parser.add_argument(flag, type=options.several(kind), default=default, metavar=f"{metavar},...", help=text)


def texts(parser: argparse.ArgumentParser) -> None:
    text = "UTF-8 files, or folders of them (default: the demo's book, and the source of triforce)"
    parser.add_argument("--texts", type=path, nargs="+", metavar="PATH", help=text)


PARTS = (
    ("speed", "modes against plain decoding, by context, batch, temperature and workload", _speed),
    ("lossless", "the certificate: texts of every mode against plain decoding", _lossless),
    ("compare", "other engines on the same checkpoint or GGUF file, and the same prompts", _compare),
    ("kernels", "kernels against the memory's bandwidth", _kernels),
    ("start", "from the command to the first token, and where the time goes", _start),
)
