"""The commands of `triforce`, and which arguments each takes. Imports nothing heavy."""

from __future__ import annotations

import argparse

from triforce.cli.bench.options import bench
from triforce.cli.options import (
    color,
    described,
    draft,
    engine,
    json_file,
    kv,
    lower_tiers,
    model,
    placement,
    prompt,
    quiet,
    ranks,
    replicas,
    sampling,
)


def _generate(parser: argparse.ArgumentParser) -> None:
    model(parser)
    prompt(
        parser,
        "the text to continue; without one, and without --prompt-file, it is read from stdin. "
        "A single argument with white space in it is the PROMPT, not a MODEL",
    )
    parser.add_argument("--chat", action="store_true", help="ask the prompt as in a chat, by the model's chat template")
    engine(parser)
    ranks(parser.add_argument_group("several processes"))
    sampling(parser)
    saved = parser.add_argument_group("saved prompts")
    saved.add_argument("--save-cache", metavar="FILE", help="write the KV cache of the prompt to FILE")
    saved.add_argument("--load-cache", metavar="FILE", help="reuse what the KV cache in FILE has of the prompt")
    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="print one JSON object instead of text and statistics")
    quiet(output)
    color(output)


def _explain(parser: argparse.ArgumentParser) -> None:
    model(parser)
    prompt(parser, "as of generate")
    engine(parser)
    sampling(parser)
    saved = parser.add_argument_group("saved prompts")
    saved.add_argument("--load-cache", metavar="FILE", help="reuse what the KV cache in FILE has of the prompt")
    parser.add_argument_group("output").add_argument("--json", action="store_true", help="print one JSON object")


def _chat(parser: argparse.ArgumentParser) -> None:
    model(parser, "a Hugging Face folder or name of a model that has a chat template")
    parser.add_argument("--file", metavar="DOC", help="a UTF-8 document to talk about")
    parser.add_argument("--system", metavar="TEXT", default="", help="what the model is to be, told before all else")
    engine(parser)
    ranks(parser.add_argument_group("several processes"))
    sampling(parser, whole=False)
    output = parser.add_argument_group("output")
    quiet(output)
    color(output)


def _serve(parser: argparse.ArgumentParser) -> None:
    model(parser)
    add = parser.add_argument
    add("--host", default="127.0.0.1", help=described("address to listen on; any but this machine's own needs a key"))
    add("--port", type=int, default=8000, metavar="N", help=described("0: any free one"))
    add("--name", help="what clients call the model (default: as its hub or folder calls it)")
    _guard(parser.add_argument_group("security"))
    _bounds(parser.add_argument_group("limits"))
    replicas(parser.add_argument_group("several engines"))
    engine(parser)
    ranks(parser.add_argument_group("several processes"))


def _guard(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
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
    add(
        "--cors-origin",
        action="append",
        default=[],
        metavar="ORIGIN",
        help="pages of this origin, such as https://example.org, may use the server (CORS); *: all; may be repeated",
    )


def _bounds(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--max-connections",
        type=int,
        metavar="N",
        help="connections that are open at a time (default: 1024, or three quarters of `ulimit -n` if that is less)",
    )
    add(
        "--max-connections-per-address",
        type=int,
        metavar="N",
        help="of these, from one address, or one /64 of IPv6; behind a proxy all clients have its address: give "
        "what --max-connections is (default: half of that)",
    )
    add(
        "--max-queue",
        type=int,
        default=64,
        metavar="N",
        help=described("prompts that may wait, beside as many as rows"),
    )
    add("--max-body", type=float, default=16, metavar="MIB", help=described("largest request"))
    add(
        "--max-kv-tokens",
        type=int,
        metavar="N",
        help="KV tokens that there is room for, of all texts together (default: the context, or 65536)",
    )
    add("--max-num-seqs", type=int, default=8, metavar="N", help=described("texts made at a time"))
    text = "inter-token latency in milliseconds, up to which a text waits while prompts of others are read"
    add("--max-itl", type=float, default=200, metavar="MS", help=described(text))
    add(
        "--timeout",
        type=float,
        default=600,
        metavar="S",
        help=described("seconds that a request may take, waiting included"),
    )
    add(
        "--shutdown-timeout",
        type=float,
        default=30,
        metavar="S",
        help=described("seconds that requests may still run after SIGTERM"),
    )


def _batch(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="requests in OpenAI's batch format, one JSON object a line")
    model(parser)
    add = parser.add_argument
    add(
        "-o",
        "--output",
        metavar="OUT",
        help="answers, one a line; what OUT has answered is not asked again, what it refused is "
        "(default: FILE with .out.jsonl)",
    )
    add("--name", help="what the requests call the model (default: as its hub or folder calls it)")
    quiet(parser)
    replicas(parser.add_argument_group("several engines"))
    engine(parser)
    ranks(parser.add_argument_group("several processes"))


def _info(parser: argparse.ArgumentParser) -> None:
    model(parser)
    lower_tiers(parser)
    kv(parser)
    placement(parser)


def _demo(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--prompt-tokens", type=int, default=16_384, metavar="N", help=described("length of the prompt")
    )
    parser.add_argument("--max-tokens", type=int, default=96, metavar="N", help=described("new tokens of each text"))
    parser.add_argument("--seed", type=int, default=1, metavar="N", help=described("seed of the sampled text"))
    placement(parser, context=False)


def _eval(parser: argparse.ArgumentParser) -> None:
    model(parser)
    add = parser.add_argument
    draft(parser)
    add("--texts", nargs="+", metavar="PATH", help="UTF-8 files or folders of them (default: the book of the demo)")
    add("--only", metavar="NAME,...", help="some measurements, such as needle,copy; a wrong name lists them all")
    add(
        "--quick",
        action="store_true",
        help="readings so few and short that they take a minute once the model is loaded: its speed is measured first, "
        "and what is shortened or left out is said. A rough picture; the slower the model, the rougher",
    )
    add("--max-context", type=int, default=32_768, metavar="N", help=described("longest readings, in tokens"))
    json_file(parser)
    quiet(parser)
    placement(parser, context=False)


COMMANDS = (
    ("generate", "continue a text", _generate),
    (
        "explain",
        "continue a text, and say what each tier cost and gave, what was chosen, and what may be better",
        _explain,
    ),
    ("chat", "talk, about a document if you like; the KV cache is kept between turns", _chat),
    ("serve", "answer OpenAI's HTTP interface", _serve),
    ("batch", "answer a file of requests, as the server would", _batch),
    ("info", "say what a model is, its KV bytes per token, and what fits in memory", _info),
    ("demo", "continue a book from a long prompt, plainly and with TriForce: the same text", _demo),
    ("bench", "measure speed and acceptance, certify texts, compare with other engines", bench),
    ("eval", "measure a model on texts: loss, use of far context, agreement with its draft", _eval),
)
