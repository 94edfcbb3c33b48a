"""The arguments of `triforce bench`. Imports nothing heavy."""

from __future__ import annotations

import argparse

from triforce.cli.options import (
    COUPLINGS,
    MODES,
    coupling,
    described,
    draft,
    json_file,
    lower_tiers,
    model,
    placement,
    quiet,
    searched_layers,
    several,
)


def bench(parser: argparse.ArgumentParser) -> None:
    what = parser.add_subparsers(dest="bench", required=True, metavar="WHAT")
    for name, summary, add in PARTS:
        part = what.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
        add(part)
        json_file(part)


def _speed(parser: argparse.ArgumentParser) -> None:
    model(parser)
    draft(parser)
    texts(parser)
    add = parser.add_argument
    _cells(parser)
    add("--top-p", type=float, default=0.9, metavar="X", help=described("of the sampled texts"))
    text = f"of {', '.join(MODES)} (default: ar, retrieval, triforce, draft-ngram and auto, as far as there is a draft)"
    add("--modes", type=several(str), metavar="MODE,...", help=text)
    add("--tokens", type=int, default=128, metavar="N", help=described("new tokens of each text"))
    text = "turns at most; at least 3 if there is no end (default: 7, or as many short ones as 30 seconds hold)"
    add("--repeats", type=int, metavar="N", help=text)
    add("--minutes", type=float, default=90, metavar="X", help=described("for all cells; each gets its share"))
    add("--caches", metavar="FOLDER", help="keep the KV of the prompts there for another time: 6 KiB a token")
    add("--draft-tokens", type=int, default=2, metavar="N", help=described("tokens the draft guesses at a time"))
    add(
        "--speculative-tokens",
        type=int,
        default=6,
        metavar="N",
        help=described("tokens the retrieval tier guesses at a time"),
    )
    add(
        "--retrieval-budget",
        default="auto",
        metavar="N|P%",
        help="tokens the retrieval tier sees (default: auto: 2048 or so)",
    )
    searched_layers(parser)
    lower_tiers(parser)
    coupling(parser)
    add(
        "--synthetic",
        type=several(float),
        metavar="OUTER,INNER",
        help="instead of a model: a 30 M shape of random weights, whose guesses are kept with these probabilities",
    )
    quiet(parser)
    placement(parser, context=False)


def _cells(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--cells", type=several(str), metavar="NAME,...", help="cells by name; paper: 48 that cover all (default)")
    add("--full", action="store_true", help="every cell there is: 600 of them, half a day")
    add("--contexts", type=several(int), metavar="N,...", help="prompt tokens, instead of --cells")
    add("--batches", type=several(int), metavar="N,...", help="texts made together")
    add("--temperatures", type=several(float), metavar="X,...", help="0 is greedy")
    add("--workloads", type=several(str), metavar="NAME,...", help="books, code, needle, copy, summary, many-shot")


def _kernels(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--contexts", type=several(int), default=[32_768, 131_072], metavar="N,...", help="tokens in the KV cache")
    add("--shapes", type=several(str), default=["30m", "llama-3.2-1b"], metavar="NAME,...", help="30m, llama-3.2-1b")


def _acceptance(parser: argparse.ArgumentParser) -> None:
    _walked(parser)
    add = parser.add_argument
    add("--budgets", type=several(int), metavar="N,...", help="tokens that retrieval sees (256 to 4096)")
    add("--chunks", type=several(int), metavar="N,...", help="tokens selected together (8 to 64)")
    add("--full-layer-counts", type=several(int), metavar="N,...", help="first layers that it sees in full (0 to 2)")
    add("--docs", metavar="FOLDER", help="write acceptance.md and pictures/ there; needs matplotlib")


def _locality(parser: argparse.ArgumentParser) -> None:
    _walked(parser)


def _walked(parser: argparse.ArgumentParser) -> None:
    """Of what reads given texts: nothing is generated."""
    model(parser)
    draft(parser)
    texts(parser)
    add = parser.add_argument
    add("--context", type=int, metavar="N", help="tokens of the prompts (default: 32000; --quick: 4096)")
    add("--positions", type=int, metavar="N", help="that are measured after each (default: 259; --quick: 126)")
    add(
        "--retrieval-budget", type=int, metavar="N", help="while something else is varied (default: 2048; --quick: 512)"
    )
    add(
        "--speculative-tokens",
        type=int,
        default=6,
        metavar="N",
        help="a verification scores one position more (default: 6)",
    )
    add("--temperature", type=float, default=0.6, metavar="X", help=described("0 is greedy"))
    add("--top-p", type=float, default=0.9, metavar="X", help=described("1: off"))
    add("--quick", action="store_true", help="short prompts and few settings: a minute")
    placement(parser, context=False)


def _quality(parser: argparse.ArgumentParser) -> None:
    model(parser)
    draft(parser)
    texts(parser)
    add = parser.add_argument
    add("--contexts", type=several(int), default=[4096, 16_384], metavar="N,...", help="prompt tokens")
    add("--budgets", type=several(int), default=[512, 2048], metavar="N,...", help="tokens that each keeps or sees")
    add("--questions", type=int, default=8, metavar="N", help=described("needles and passages asked for, each"))
    add("--tokens", type=int, default=64, metavar="N", help=described("new ones of a passage"))
    quiet(parser)
    placement(parser, context=False)


def _lossless(parser: argparse.ArgumentParser) -> None:
    model(parser)
    draft(parser)
    texts(parser)
    add = parser.add_argument
    add("--contexts", type=several(int), default=[512, 4096, 16_384], metavar="N,...", help="prompt tokens")
    add("--temperatures", type=several(float), default=[0.0, 0.6, 1.0, 1.2], metavar="X,...", help="0 is greedy")
    add("--batches", type=several(int), default=[1, 4], metavar="N,...", help="texts made together")
    add(
        "--workloads",
        type=several(str),
        default=["books", "code", "copy"],
        metavar="NAME,...",
        help="as in bench speed",
    )
    add("--modes", type=several(str), metavar="MODE,...", help="to compare (default: all that these models can run)")
    add("--couplings", type=several(str), default=list(COUPLINGS), metavar="NAME,...", help=", ".join(COUPLINGS))
    add("--tokens", type=int, default=128, metavar="N", help=described("new tokens of each text"))
    add("--lower-tiers", type=several(str), default=["same"], metavar="NAME,...", help="same, int8")
    quiet(parser)
    placement(parser, context=False)


def _compare(parser: argparse.ArgumentParser) -> None:
    model(parser)
    draft(parser)
    texts(parser)
    add = parser.add_argument
    add("--engines", type=several(str), metavar="NAME,...", help="some of them; a wrong name lists them all")
    add("--contexts", type=several(int), default=[16_384, 32_768], metavar="N,...", help="prompt tokens")
    add("--workload", default="books", metavar="NAME", help=described("as in bench speed"))
    add("--tokens", type=int, default=64, metavar="N", help=described("new tokens, greedy"))
    add("--threads", type=int, metavar="N", help="for every engine (default: the cores there are)")
    add("--timeout", type=float, default=1800, metavar="S", help=described("seconds that one run may take"))
    text = "interpreter to run an engine with, as openvino=/path/to/python; all=... is for the others; may be repeated"
    add("--python", action="append", default=[], metavar="ENGINE=PATH", help=text)
    add("--work", metavar="FOLDER", help="keep converted checkpoints there (default: they are made anew each time)")


def _start(parser: argparse.ArgumentParser) -> None:
    model(parser)
    draft(parser)
    add = parser.add_argument
    text = "instead of a model: random weights in as many layers as thin32 or thin80 says, or of another shape"
    add("--shape", metavar="NAME", help=text)
    add("--modes", type=several(str), default=["ar", "auto"], metavar="MODE,...", help=f"of {', '.join(MODES)}")
    add("--prompt-file", metavar="FILE", help="a UTF-8 text (default: two words, or the demo's book)")
    add("--prompt-tokens", type=int, metavar="N", help="so many tokens of the text")
    add("--load-cache", metavar="FILE", help="reuse what the KV cache in FILE has of the prompt")
    add("--repeats", type=int, default=5, metavar="N", help=described("processes of each kind"))
    placement(parser, context=False)


def texts(parser: argparse.ArgumentParser) -> None:
    text = "UTF-8 files, or folders of them (default: the demo's book, and the source of triforce)"
    parser.add_argument("--texts", nargs="+", metavar="PATH", help=text)


PARTS = (
    ("speed", "modes against plain decoding, by context, batch, temperature and workload", _speed),
    ("acceptance", "how much of what a cheap view proposes the exact one keeps, by selection", _acceptance),
    ("locality", "how long a selection stays good, layer by layer", _locality),
    ("quality", "what eviction costs: StreamingLLM and H2O beside lossless decoding", _quality),
    ("lossless", "the certificate: texts of every mode against plain decoding", _lossless),
    ("compare", "other engines on the same checkpoint and prompts", _compare),
    ("kernels", "kernels against the memory's bandwidth", _kernels),
    ("start", "from the command to the first token, and where the time goes", _start),
)
