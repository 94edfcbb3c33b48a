"""The arguments of `triforce`. Imports nothing heavy: the help answers at once."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from functools import partial

from triforce import __version__
from triforce.cli import options
from triforce.cli.arguments import Parser, is_option
from triforce.cli.asked_prompt import reads_as_prompt
from triforce.cli.bench.parts import bench
from triforce.cli.options import EMPTY_NAME, minutes, path, path_or_standard


def _generate(parser: argparse.ArgumentParser) -> None:
    options.model(parser)
    options.prompt(
        parser,
        "the text to continue; without one, and without --prompt-file, it is read from stdin. "
        "A single argument is the MODEL if it has the shape of a path or of a name on the hub, else the PROMPT",
    )
    parser.add_argument(
        "--chat", action="store_true", help="send the prompt as a chat message, in the model's chat template"
    )
    options.chat_template(parser)
    options.engine(parser)
    options.disk_cache(parser)
    options.ranks(parser)
    options.sampling(parser)
    saved = parser.add_argument_group("saved prompts")
    saved.add_argument("--save-cache", type=path, metavar="FILE", help="write the KV cache of the prompt to FILE")
    options.load_cache(saved)
    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="print one JSON object instead of text and statistics")
    options.quiet(output)
    options.color(output)


def _explain(parser: argparse.ArgumentParser) -> None:
    options.model(parser)
    options.prompt(parser, "the text to continue, as for generate")
    options.engine(parser)
    options.sampling(parser, with_logprobs=False)
    options.load_cache(parser.add_argument_group("saved prompts"))
    parser.add_argument_group("output").add_argument("--json", action="store_true", help="print one JSON object")


def _chat(parser: argparse.ArgumentParser) -> None:
    options.model(parser, f"{options.MODEL}: a model that has a chat template")
    text = "a text to talk about, or a folder of them"
    parser.add_argument("--file", type=path, metavar="DOC", help=text)
    parser.add_argument("--system", metavar="TEXT", default="", help="system message: what the model is to be")
    options.chat_template(parser)
    options.engine(parser)
    options.disk_cache(parser)
    options.ranks(parser)
    options.sampling(parser, several=False, with_logprobs=False)
    output = parser.add_argument_group("output")
    options.quiet(output)
    options.color(output)


def _serve(parser: argparse.ArgumentParser) -> None:
    options.model(parser)
    add = parser.add_argument
    text = "address to listen on; any but this machine's own needs a key"
    add("--host", default="127.0.0.1", help=options.described(text))
    options.number(parser, "--port", "0: any free one", 8000)
    add("--name", help="name of the model for clients (default: its name on the hub, or its folder)")
    add("--only-name", action="store_true", help="refuse requests for a model of another name, which are answered else")
    _security(parser.add_argument_group("security"))
    _limits(parser.add_argument_group("limits"))
    options.replicas(parser)
    options.chat_template(parser)
    options.engine(parser)
    options.disk_cache(parser)
    text = "show on the page the documents that triforce watch has read; every client of the server can read them"
    add("--show-watched", action="store_true", help=text)
    options.ranks(parser)


def _launch(parser: argparse.ArgumentParser) -> None:
    text = "the agent to run: claude (Claude Code), codex or opencode. Its own arguments come last, behind --"
    parser.add_argument("agent", choices=("claude", "codex", "opencode"), metavar="AGENT", help=text)
    _serve(parser)


def _security(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    text = "API keys, one per line; more may be in TRIFORCE_API_KEYS, with commas between"
    add("--api-key-file", type=path, metavar="FILE", help=text)
    text = "a name that clients reach this server by; addresses and localhost are allowed anyway; may be repeated"
    add("--allowed-host", action="append", default=[], metavar="NAME", help=text)
    text = "pages of this origin, such as https://example.org, may use the server (CORS); *: all; may be repeated"
    add("--cors-origin", action="append", default=[], metavar="ORIGIN", help=text)


def _limits(group: argparse._ArgumentGroup) -> None:
    add = partial(options.number, group)
    text = "connections that are open at a time (default: 1024, or three quarters of `ulimit -n` if that is less)"
    add("--max-connections", text)
    text = (
        "connections that are open at a time from one address, or one /64 of IPv6 (default: half of "
        "--max-connections); behind a proxy, where all clients have one address, give as much as --max-connections"
    )
    add("--max-connections-per-address", text)
    add("--max-queue", "prompts that may wait, beside the running ones", 64)
    add("--max-body", "largest request", 16, float, "MIB")
    text = "capacity of the KV cache in tokens, for all texts together (default: the context, but at least 65536)"
    add("--max-kv-tokens", text)
    add("--max-num-seqs", "texts generated at a time", 8)
    text = "limit of the inter-token latency in milliseconds, while prompts of other requests are read"
    add("--max-itl", text, 200, float, "MS")
    add(
        "--timeout",
        "seconds in the queue, between two pieces of a stream, and of a whole answer from its first token on",
        600,
        float,
        "S",
    )
    add("--shutdown-timeout", "seconds that requests may still run after SIGTERM or SIGHUP", 30, float, "S")


def _batch(parser: argparse.ArgumentParser) -> None:
    text = "requests in OpenAI's batch format, one JSON object per line (-: stdin)"
    parser.add_argument("file", type=path_or_standard, metavar="FILE", help=text)
    options.model(parser)
    add = parser.add_argument
    text = "answers, one per line (-: stdout). Lines with an answer in OUT are skipped; refused lines are retried"
    default_output = "FILE with .out.jsonl; stdout for stdin"
    add("-o", "--output", type=path_or_standard, metavar="OUT", help=options.described(text, default_output))
    text = "replace answers in OUT that belong to another request, model or setting"
    add("--again", action="store_true", help=text)
    add("--name", help="name of the model in requests (default: its name on the hub, or its folder)")
    options.quiet(parser)
    options.replicas(parser)
    options.chat_template(parser)
    options.engine(parser)
    options.disk_cache(parser)
    options.ranks(parser)


def _info(parser: argparse.ArgumentParser) -> None:
    options.model(parser)
    options.lower_tiers(parser)
    options.kv(parser)
    options.placement(parser)


def _doctor(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--gpu", action="store_true", help="check the GPU and its kernels, in place of the processor's")
    text = options.described("file for the figures, and for an error")
    add("--out", type=path, metavar="FILE", default="triforce-doctor.json", help=text)


def _demo(parser: argparse.ArgumentParser) -> None:
    text = (
        "tokens of a book, which the pair that comes with triforce continues. Without this option smollm2 answers "
        "questions; where it cannot be fetched, the pair continues 16384 tokens"
    )
    options.number(parser, "--prompt-tokens", text)
    options.number(parser, "--max-tokens", "new tokens of each text at most", 96)
    options.number(parser, "--seed", "seed of the sampled text", 1)
    options.offline(parser)
    options.placement(parser, context=False)


def _eval(parser: argparse.ArgumentParser) -> None:
    options.model(parser)
    add = parser.add_argument
    options.draft(parser)
    text = "texts, or folders of them (default: the book of the demo)"
    add("--texts", type=path_or_standard, nargs="+", metavar="PATH", help=text)
    add(
        "--only",
        metavar="NAME,...",
        help="measurements, such as needle,copy (default: all; an unknown name lists them)",
    )
    text = (
        "measure for about a minute after the model is loaded. The speed of the model is measured first; then the "
        "command tells which measurements it shortens or leaves out. Figures are rough, more so for a slow model"
    )
    add("--quick", action="store_true", help=text)
    options.number(parser, "--max-context", "length of the longest texts that are read, in tokens", 32_768)
    options.json_file(parser)
    options.quiet(parser)
    options.placement(parser, context=False)


def _train_draft(parser: argparse.ArgumentParser) -> None:
    options.model(parser, f"{options.MODEL}: the target; without one, the target of the pair that comes with triforce")
    add = parser.add_argument
    text = "the folder that the draft is written to"
    add("-o", "--output", type=path, metavar="DRAFT", required=True, help=text)
    text = "a text, or a folder of them, of the kind that is to be continued (default: the book of the demo)"
    add("--texts", type=path, metavar="FOLDER", help=text)
    text = "minutes of training by the clock, without loading the model and measuring the draft at the end"
    options.number(parser, "--minutes", text, 30, minutes)
    add("--device", default="cpu", help="cpu, as no other device trains drafts yet (default: cpu)")


def _models(parser: argparse.ArgumentParser) -> None:
    subparsers = parser.add_subparsers(dest="models", metavar="list|remove")
    for name, summary in (("list", "what is kept: names, sizes, licences, files"), ("remove", "remove a model")):
        part = subparsers.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
        if name == "remove":
            part.add_argument("name", metavar="NAME", help="a name that `triforce models list` shows")


def _cache(parser: argparse.ArgumentParser) -> None:
    subparsers = parser.add_subparsers(dest="cache", metavar="list|verify|clear")
    for name, summary in (
        ("list", "models and profiles that have KV in the cache, with the number of prompts of each"),
        ("verify", "check every entry, and remove what is damaged"),
        ("clear", "remove all entries; servers that use the folder go on"),
    ):
        part = subparsers.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
        part.add_argument("folder", type=path, metavar="FOLDER", help="the folder of --disk-cache")


def _watch(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    text = (
        "a folder of texts; in a git repository its files that git does not ignore. "
        "Texts are read in the form that chat --file uses"
    )
    add("folder", type=path, metavar="FOLDER", help=text)
    options.model(parser)
    text = "every file is a document of its own, such as a book; else all of them together are one"
    add("--each", action="store_true", help=text)
    add("--once", action="store_true", help="end once all is read, in place of waiting for changes")
    options.engine(parser)
    options.disk_cache(parser, required=True)


COMMANDS = (
    ("generate", "continue a text", _generate),
    (
        "explain",
        "continue a text; report time and acceptance of each tier, the plans chosen, and advice",
        _explain,
    ),
    ("chat", "talk with a model, about a document if one is named; turns share a KV cache", _chat),
    ("serve", "answer the HTTP interfaces of OpenAI, Anthropic and Ollama", _serve),
    ("launch", "run a coding agent on a model: the server is started for it, or the running one is used", _launch),
    ("batch", "answer a file of requests, as the server would", _batch),
    (
        "info",
        "report a model's properties, its KV bytes per token, the tokens that fit, and where speculation begins to pay",
        _info,
    ),
    (
        "doctor",
        "report this machine's hardware, and check its kernels and texts in a minute; --gpu checks a GPU instead",
        _doctor,
    ),
    ("models", "list or remove models that were fetched by a short name, such as smollm2", _models),
    ("cache", "list, verify or clear a disk cache", _cache),
    ("watch", "read a folder's texts into a disk cache in the background, and read changed texts again", _watch),
    (
        "demo",
        "ask smollm2 (98 MB, fetched once) about a part of a book, by plain decoding and in mode auto, and compare; "
        "where it cannot be fetched, the shipped pair continues the book in mode triforce",
        _demo,
    ),
    ("bench", "measure speed, certify texts, compare with other engines", bench),
    (
        "train-draft",
        "train a draft for a model: it reads the model's hidden states, and learns from what the model computes",
        _train_draft,
    ),
    ("eval", "measure a model on texts: loss, use of far context, agreement with its draft", _eval),
)


CANNOT_CHAT = "the pair that comes with triforce cannot chat, as it has no chat template"
CHAT_ADVICE = (
    "give a MODEL that has one: smollm2, which is small (98 MB are fetched once), or the folder, GGUF file or hub name "
    "of an instruct model"
)


def build_parser() -> Parser:
    """Return the parser of all commands; `command` in its namespace names the module of triforce.cli to run."""
    parser = Parser(
        prog="triforce",
        description="Lossless long-context speculative decoding: three tiers, and the text of plain decoding.",
    )
    parser.add_argument("--version", action="version", version=f"triforce {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, summary, add in COMMANDS:
        add(commands.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}."))
    return parser


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the arguments. Options may stand between MODEL and PROMPT, which argparse alone does not allow.

    Without any argument, print help and exit.
    """
    parser = build_parser()
    if "_ARGCOMPLETE" in os.environ:  # a shell asks for completions
        import argcomplete

        argcomplete.autocomplete(parser)
    arguments, agent_arguments = _split_agent_arguments(sys.argv[1:] if argv is None else argv)
    options, leaf = read(parser, arguments)
    options.arguments = arguments
    options.agent_arguments = agent_arguments
    if options.command is None:
        parser.print_help()
        parser.exit()
    if leaf.commands:
        leaf.error(f"{leaf.prog} needs a subcommand: {', '.join(leaf.commands)}")
    if options.command == "chat" and options.model is None:
        leaf.error(f"{CANNOT_CHAT}; {CHAT_ADVICE}")
    return options


def _split_agent_arguments(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the arguments of triforce, and those behind `--` for the agent of `triforce launch`."""
    arguments = list(argv)
    if arguments[:1] != ["launch"] or "--" not in arguments:
        return arguments, []
    end = arguments.index("--")
    return arguments[:end], arguments[end + 1 :]


def read(parser: Parser, argv: Sequence[str] | None) -> tuple[argparse.Namespace, Parser]:
    """Return the arguments and the parser of their command. A mistake ends the process with code 2."""
    options, unread_arguments = parser.parse_known_args(argv)
    leaf: Parser = vars(options).pop("leaf")
    for slot in ("model", "prompt"):
        if unread_arguments and not is_option(unread_arguments[0]) and getattr(options, slot, "") is None:
            setattr(options, slot, unread_arguments.pop(0))
    if unread_arguments:
        leaf.refuse(unread_arguments, parser)
    _take_named(options, leaf)
    return options, leaf


def _take_named(options: argparse.Namespace, leaf: Parser) -> None:
    """Store -m and -p as MODEL and PROMPT.

    A single argument is the PROMPT if -m is given, or if the argument reads as a prompt (see `reads_as_prompt`).
    """
    options.prompt_alone = False
    model, prompt = (vars(options).pop(f"named_{slot}", None) for slot in ("model", "prompt"))
    lacks_prompt = getattr(options, "prompt", "") is None and prompt is None
    options.two_words = model is None and prompt is None and getattr(options, "prompt", None) is not None
    if model is None and lacks_prompt and options.model is not None and reads_as_prompt(options):
        options.model, options.prompt, options.prompt_alone = None, options.model, True
    elif model is not None and options.model is not None:
        if getattr(options, "prompt", "") is not None:
            leaf.error(f"there are two models, {options.model!r} and -m {model!r}; leave one out")
        options.prompt = options.model
    if prompt is not None and options.prompt is not None:
        leaf.error(f"there are two prompts, {options.prompt!r} and -p {prompt!r}; leave one out")
    for slot, value in (("model", model), ("prompt", prompt)):
        if value is not None:
            setattr(options, slot, value)
    if getattr(options, "model", None) == "":
        leaf.error(f"argument MODEL: {EMPTY_NAME} names no file and no folder")
