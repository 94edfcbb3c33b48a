"""The arguments of `triforce`. Imports nothing heavy: the help answers at once."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

from triforce import __version__
from triforce.request import SamplingParams

MODES = ("ar", "draft", "retrieval", "streaming", "triforce", "lookup", "hybrid", "auto")
SELECTIONS = ("observed", "mean_key", "quest")
COUPLINGS = ("seeded", "rejection", "block")
LOWER_TIERS = ("same", "int8")
DTYPES = ("auto", "float32", "bfloat16", "float16")
NO_DRAFT = "none"
DEFAULTS = {field.name: field.default for field in fields(SamplingParams)}


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands; `command` in its result names the module of triforce.cli to run."""
    parser = argparse.ArgumentParser(
        prog="triforce",
        description="Lossless long-context speculative decoding: three tiers, and the text of plain decoding.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"triforce {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, summary, add in COMMANDS:
        add(
            commands.add_parser(
                name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.", allow_abbrev=False
            )
        )
    return parser


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The arguments, those that options separate too: `generate MODEL --seed 1 PROMPT` is more than argparse takes."""
    parser = build_parser()
    options, rest = parser.parse_known_args(argv)
    for slot in ("model", "prompt"):
        if rest and not rest[0].startswith("-") and getattr(options, slot, "") is None:
            setattr(options, slot, rest.pop(0))
    if rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    return options


def _generate(parser: argparse.ArgumentParser) -> None:
    _model(parser)
    parser.add_argument(
        "prompt",
        nargs="?",
        metavar="PROMPT",
        help="the text to continue; without one, and without --prompt-file, it is read from stdin. "
        "A single argument with white space in it is the PROMPT, not a MODEL",
    )
    parser.add_argument("--prompt-file", metavar="FILE", help="read the prompt from a UTF-8 file (-: stdin)")
    _engine(parser)
    _sampling(parser)
    saved = parser.add_argument_group("saved prompts")
    saved.add_argument("--save-cache", metavar="FILE", help="write the KV cache of the prompt to FILE")
    saved.add_argument("--load-cache", metavar="FILE", help="reuse what the KV cache in FILE has of the prompt")
    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="print one JSON object instead of text and statistics")
    _color(output)


def _chat(parser: argparse.ArgumentParser) -> None:
    _model(parser)
    parser.add_argument("--file", metavar="DOC", help="a UTF-8 document to talk about")
    _engine(parser)
    _sampling(parser)
    _color(parser.add_argument_group("output"))


def _serve(parser: argparse.ArgumentParser) -> None:
    _model(parser)
    add = parser.add_argument
    add("--host", default="127.0.0.1", help=_help("address to listen on; any but this machine's own needs a key"))
    add("--port", type=int, default=8000, metavar="N", help=_help("0: any free one"))
    add("--name", help="what clients call the model (default: as its hub or folder calls it)")
    guard = parser.add_argument_group("security")
    add = guard.add_argument
    add(
        "--api-key-file", metavar="FILE", help="keys, one a line; more may be in TRIFORCE_API_KEYS, with commas between"
    )
    add(
        "--allowed-host",
        action="append",
        default=[],
        metavar="NAME",
        help="a name that clients reach this server by; addresses and localhost are allowed anyway; may be repeated",
    )
    add("--max-queue", type=int, default=64, metavar="N", help=_help("prompts that may wait, beside as many as rows"))
    add("--max-body", type=float, default=16, metavar="MIB", help=_help("largest request"))
    add(
        "--max-kv-tokens",
        type=int,
        metavar="N",
        help="KV tokens that there is room for, of all texts together (default: the context, or 65536)",
    )
    add("--max-rows", type=int, default=8, metavar="N", help=_help("texts made at a time"))
    add(
        "--timeout",
        type=float,
        default=600,
        metavar="S",
        help=_help("seconds that a request may take, waiting included"),
    )
    add("--grace", type=float, default=30, metavar="S", help=_help("seconds that requests may still run after SIGTERM"))
    _engine(parser)


def _batch(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="requests in OpenAI's batch format, one JSON object a line")
    _model(parser)
    add = parser.add_argument
    add(
        "-o",
        "--output",
        metavar="OUT",
        help="answers, one a line; what OUT has answered is not asked again (default: FILE with .out.jsonl)",
    )
    add("--name", help="what the requests call the model (default: as its hub or folder calls it)")
    _engine(parser)


def _info(parser: argparse.ArgumentParser) -> None:
    _model(parser)
    _lower_tiers(parser)
    _placement(parser)


def _demo(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompt-tokens", type=int, default=16_384, metavar="N", help=_help("length of the prompt"))
    parser.add_argument("--max-tokens", type=int, default=96, metavar="N", help=_help("new tokens of each text"))
    parser.add_argument("--seed", type=int, default=1, metavar="N", help=_help("seed of the sampled text"))
    _placement(parser, context=False)


def _eval(parser: argparse.ArgumentParser) -> None:
    _model(parser)
    add = parser.add_argument
    _draft(parser)
    add("--texts", nargs="+", metavar="PATH", help="UTF-8 files or folders of them (default: the book of the demo)")
    add("--only", metavar="NAME,...", help="some measurements, such as needle,copy; a wrong name lists them all")
    add("--quick", action="store_true", help="few and short readings: a minute for a small model")
    add("--max-context", type=int, default=32_768, metavar="N", help=_help("longest readings, in tokens"))
    _json(parser)
    _placement(parser, context=False)


def _bench(parser: argparse.ArgumentParser) -> None:
    what = parser.add_subparsers(dest="bench", required=True, metavar="WHAT")
    speed = what.add_parser("speed", help="modes against plain decoding", allow_abbrev=False)
    _model(speed)
    _draft(speed)
    add = speed.add_argument
    add("--texts", nargs="+", metavar="FILE", help="UTF-8 texts, read one after another (default: the demo's book)")
    add("--contexts", type=_list(int), default=[4096, 16_384], metavar="N,...", help="prompt tokens")
    add("--temperatures", type=_list(float), default=[0.0, 0.6], metavar="X,...", help="0 is greedy")
    add("--top-p", type=float, default=0.9, metavar="X", help=_help("of the sampled texts"))
    add("--modes", type=_list(str), default=["ar", "triforce", "retrieval"], metavar="MODE,...", help=", ".join(MODES))
    add("--tokens", type=int, default=256, metavar="N", help=_help("new tokens of each text"))
    add("--repeats", type=int, default=3, metavar="N", help=_help("times that each is measured"))
    add("--gamma-1", type=int, default=2, metavar="N", help=_help("tokens the draft guesses at a time"))
    add("--gamma-2", type=int, default=6, metavar="N", help=_help("tokens the retrieval tier guesses at a time"))
    add("--budget", default="2048", metavar="N|P%", help="tokens the retrieval tier sees (default: 2048)")
    _full_layers(speed)
    _lower_tiers(speed)
    _coupling(speed)
    add(
        "--synthetic",
        type=_list(float),
        metavar="OUTER,INNER",
        help="instead of a model: a 30 M shape of random weights, whose guesses are kept with these probabilities",
    )
    _placement(speed, context=False)
    _json(speed)
    kernels = what.add_parser("kernels", help="kernels against the memory's bandwidth", allow_abbrev=False)
    add = kernels.add_argument
    add("--contexts", type=_list(int), default=[32_768, 131_072], metavar="N,...", help="tokens in the KV cache")
    add("--shapes", type=_list(str), default=["30m", "llama-3.2-1b"], metavar="NAME,...", help="30m, llama-3.2-1b")
    _json(kernels)


def _json(parser: argparse._ActionsContainer) -> None:
    parser.add_argument("--json", metavar="FILE", help="write all figures to FILE")


def _list(kind: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    def values(text: str) -> list[Any]:
        return [kind(part) for part in text.split(",")]

    return values


def _model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="a Hugging Face folder or name; without one, the pair of models that comes with triforce",
    )


def _draft(parser: argparse._ActionsContainer) -> None:
    text = f"small model of the same vocabulary, or {NO_DRAFT} (default: auto)"
    parser.add_argument("--draft", default="auto", metavar="MODEL", help=text)


def _lower_tiers(parser: argparse._ActionsContainer) -> None:
    text = "what the tiers below the full one read: the same weights and KV, or int8 copies, half as large or less"
    parser.add_argument("--lower-tiers", choices=LOWER_TIERS, default="same", help=_help(text))


def _full_layers(parser: argparse._ActionsContainer) -> None:
    text = "layers where the retrieval tier sees all, or none (default: auto)"
    parser.add_argument("--full-layers", default="auto", metavar="N,...", help=text)


def _coupling(parser: argparse._ActionsContainer) -> None:
    parser.add_argument("--coupling", choices=COUPLINGS, default="seeded", help=_help("how guesses are verified"))


def _placement(parser: argparse._ActionsContainer, *, context: bool = True) -> None:
    parser.add_argument("--device", default="auto", help="cpu, cuda, cuda:1, ... (default: cuda where present)")
    parser.add_argument(
        "--dtype", choices=DTYPES, default="auto", help="(default: bfloat16; float32 without native kernels)"
    )
    if context:
        parser.add_argument("--context", type=int, metavar="N", help="positions to use (default: all the model has)")


def _engine(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("engine")
    add = group.add_argument
    _draft(group)
    add("--mode", choices=MODES, help="which tiers; auto: it chooses (default: triforce with a draft, else retrieval)")
    add("--gamma-1", type=int, default=2, metavar="N", help=_help("tokens the draft guesses at a time"))
    add("--gamma-2", type=int, default=6, metavar="N", help=_help("tokens the retrieval tier guesses at a time"))
    add(
        "--budget",
        default="2048",
        metavar="N|P%",
        help="tokens the retrieval tier sees, or a share such as 3%% (default: 2048)",
    )
    add("--chunk", type=int, default=16, metavar="N", help=_help("tokens selected together"))
    add("--selection", choices=SELECTIONS, default="observed", help=_help("how the retrieval tier chooses"))
    add("--refresh", default="1", metavar="N|auto", help="choose anew every N verifications; 0: once (default: 1)")
    _full_layers(group)
    _lower_tiers(group)
    _coupling(group)
    _placement(group)


def _sampling(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling")

    def add(name: str, kind: type, text: str) -> None:
        default = DEFAULTS[name]
        group.add_argument(
            _flag(name), type=kind, default=default, metavar="X" if kind is float else "N", help=_help(text, default)
        )

    add("temperature", float, "0 is greedy")
    add("top_k", int, "keep the K most probable tokens; 0: off")
    add("top_p", float, "keep the most probable tokens up to this mass; 1: off")
    add("min_p", float, "drop what is less probable than this share of the best; 0: off")
    add("repetition_penalty", float, "over prompt and output; 1: off")
    add("presence_penalty", float, "over the output; 0: off")
    add("frequency_penalty", float, "over the output; 0: off")
    group.add_argument(
        "--logit-bias", type=_bias, action="append", default=[], metavar="ID=BIAS", help="may be repeated"
    )
    group.add_argument("--json-schema", metavar="FILE", help="the text is JSON that the schema in FILE describes")
    add("seed", int, "the same seed, the same text (default: drawn and reported)")
    add("n", int, "continuations of the prompt")
    add("max_tokens", int, "new tokens at most")
    group.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end before this text; may be repeated"
    )
    group.add_argument("--stop-token-id", type=int, action="append", default=[], metavar="ID", help="may be repeated")
    group.add_argument("--ignore-eos", action="store_true", help="go on after the end-of-sequence token")
    add("logprobs", int, "list this many alternatives at each new token, in the JSON")
    add("prompt_logprobs", int, "the same at each prompt token")


def _color(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--color", action="store_true", help="colour each token by the tier that proposed it")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _help(text: str, default: Any = "%(default)s") -> str:
    return text if default is None else f"{text} (default: {default})"


def _bias(text: str) -> tuple[int, float]:
    token, _, bias = text.partition("=")
    try:
        return int(token), float(bias)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not ID=BIAS, such as 42=-1.5") from None


COMMANDS = (
    ("generate", "continue a text", _generate),
    ("chat", "talk, about a document if you like; the KV cache is kept between turns", _chat),
    ("serve", "answer OpenAI's HTTP interface", _serve),
    ("batch", "answer a file of requests, as the server would", _batch),
    ("info", "say what a model is, its KV bytes per token, and what fits in memory", _info),
    ("demo", "continue a book from a long prompt, plainly and with TriForce: the same text", _demo),
    ("bench", "measure speed: modes against plain decoding, kernels against the memory", _bench),
    ("eval", "measure a model on texts: loss, use of far context, agreement with its draft", _eval),
)
