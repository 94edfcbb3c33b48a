"""Options that several commands share: their names, values and defaults. Imports nothing heavy."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import fields
from typing import Any

from triforce.checkpoint.named_templates import TEMPLATE_NAMES
from triforce.errors import RequestError
from triforce.interface.quantities import user_path
from triforce.interface.sampling_params import CHAT_DEFAULTS, MODEL_DEFAULTS, SamplingParams

MOST_MINUTES = 365 * 24 * 60
EMPTY_NAME = "an empty name"
"""Words for an empty name in messages. A shell passes one for a quoted variable that is not set."""

STANDARD_STREAM = "-"
"""Name that stands for stdin as an input, and for stdout as an output."""


def path(text: str) -> str:
    """Return the name of a file or a folder. Raises ArgumentTypeError for `-` and for an impossible name."""
    if text == STANDARD_STREAM:
        raise argparse.ArgumentTypeError("'-' is stdin or stdout, and this takes a name; ./- names a file called -")
    return path_or_standard(text)


def path_or_standard(text: str) -> str:
    """Return the name of a file, or `-`. `~` is expanded, as shells do not expand it behind `=`.

    Raises ArgumentTypeError for an impossible name.
    """
    try:
        return str(user_path(name(text))) if text == "~" or (text.startswith("~") and "/" in text) else name(text)
    except RequestError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def name(text: str) -> str:
    """Return the name of a model, a file or a folder. Raises ArgumentTypeError for an impossible name."""
    if not text or "\0" in text:
        raise argparse.ArgumentTypeError(f"{ascii(text) if text else EMPTY_NAME} names no file and no folder")
    return text


def some_text(text: str) -> str:
    """Return a text. Raises ArgumentTypeError for an empty one."""
    if not text:
        raise argparse.ArgumentTypeError("the text is empty; give at least one character")
    return text


def minutes(text: str) -> float:
    """Return a number of minutes. Raises ValueError for no number, ArgumentTypeError for one out of range."""
    number = float(text)
    if not 0 < number <= MOST_MINUTES:
        raise argparse.ArgumentTypeError(f"{number:g}: give more than 0, and {MOST_MINUTES:,} (a year) at most")
    return number


def grammar(parser: argparse._ActionsContainer) -> None:
    """Add the options that constrain a text; they exclude one another."""
    add = parser.add_mutually_exclusive_group().add_argument
    text = "the text is JSON that a schema describes; SCHEMA is the schema itself if it begins with {, else its file"
    add("--json-schema", type=path, metavar="SCHEMA", help=text)
    text = "the whole text matches this regular expression, without look-around"
    add("--regex", type=some_text, metavar="PATTERN", help=text)
    text = "the text is exactly TEXT; repeat it to allow several"
    add("--choice", type=some_text, action="append", metavar="TEXT", help=text)


MODES = ("ar", "draft", "retrieval", "streaming", "triforce", "ngram", "draft-ngram", "auto")
POLICIES = ("observed", "mean_key", "quest")
COUPLINGS = ("seeded", "rejection", "block")
LOWER_TIERS = ("same", "int8", "int4")
KV_OFFLOAD = ("none", "host", "file")
DTYPES = ("auto", "float32", "bfloat16", "float16")
KV_DTYPES = ("auto", "bfloat16", "int8")
WEIGHT_INPUTS = ("int16", "int8")
NO_DRAFT = "none"
DISK_CACHE_SIZE = "20GiB"
MODEL = "a Hugging Face folder or name, a GGUF file, user/repo:Q4_K_M on the hub, or smollm2"
CHAT_TOKENS = 2048
"""New tokens at most of an answer in a chat."""
DEFAULTS = {field.name: field.default for field in fields(SamplingParams)}


def number(
    parser: argparse._ActionsContainer,
    flag: str,
    text: str,
    default: float | None = None,
    kind: Callable[[str], Any] = int,
    metavar: str = "N",
) -> None:
    """Add an option that takes one number; its help ends with the default, if there is one."""
    text = text if default is None else described(text)
    parser.add_argument(flag, type=kind, default=default, metavar=metavar, help=text)


def json_file(parser: argparse._ActionsContainer) -> None:
    parser.add_argument("--json", type=path, metavar="FILE", help="write all figures to FILE")


def several(kind: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    """Return a parser of values separated by commas. It raises ArgumentTypeError for a value that is not of `kind`."""

    def values(text: str) -> list[Any]:
        try:
            return [kind(part) for part in text.split(",")]
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r}: give values with commas between them, as 1,2") from None

    return values


def model(
    parser: argparse.ArgumentParser,
    text: str = f"{MODEL}; without one, the pair of models that comes with triforce",
) -> None:
    parser.add_argument("model", nargs="?", metavar="MODEL", help=text)
    parser.add_argument("-m", "--model", dest="named_model", metavar="MODEL", help="MODEL as an option")
    offline(parser)


def offline(parser: argparse.ArgumentParser) -> None:
    text = "fetch nothing: only models on this machine are used; HF_HUB_OFFLINE=1 is the same"
    parser.add_argument("--offline", action="store_true", help=text)


class StoreOnce(argparse.Action):
    """Store a value, and refuse a second one."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        if getattr(namespace, self.dest) is not None:
            raise argparse.ArgumentError(self, "it is given twice, and one prompt is read; leave one of them out")
        setattr(namespace, self.dest, values)


def prompt(parser: argparse.ArgumentParser, text: str) -> None:
    add = parser.add_argument
    add("prompt", nargs="?", metavar="PROMPT", help=text)
    add("-p", "--prompt", action=StoreOnce, dest="named_prompt", metavar="PROMPT", help="PROMPT as an option")
    text = (
        "read the prompt from a file, UTF-8 or with a byte order mark, or a folder of them (-: stdin); "
        "one line end behind the text is dropped"
    )
    add("--prompt-file", action=StoreOnce, type=path_or_standard, metavar="FILE", help=text)


def quiet(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "-q", "--quiet", action="store_true", help="print results and errors only, no progress and no statistics"
    )


def draft(parser: argparse._ActionsContainer) -> None:
    text = (
        f"small model with the vocabulary of MODEL, or a draft of train-draft or EAGLE-3; finetune:FOLDER is the draft "
        f"of the model that MODEL is a finetune of; {NO_DRAFT}: no draft (default: auto)"
    )
    parser.add_argument("--draft", type=name, default="auto", metavar="MODEL", help=text)


def draft_named(options: argparse.Namespace) -> str | None:
    """Return the value of --draft for `LLM`."""
    return None if options.draft == NO_DRAFT else options.draft


def lower_tiers(parser: argparse._ActionsContainer) -> None:
    text = (
        "what the tiers below the full tier read: the same weights and KV, int8 copies, or int4 weights with int8 KV. "
        "With --kv-dtype int8 they read four bits of each number in place of a copy"
    )
    parser.add_argument("--lower-tiers", choices=LOWER_TIERS, default="same", help=described(text))


def searched_layers(parser: argparse._ActionsContainer) -> None:
    text = "numbers of layers that read the whole context, or none; auto: layers search it if needed (default: auto)"
    parser.add_argument("--searched-layers", default="auto", metavar="N,...", help=text)


def kv(parser: argparse._ActionsContainer) -> None:
    add = parser.add_argument
    text = described("where KV beyond --kv-memory is stored")
    add("--kv-offload", choices=KV_OFFLOAD, default="none", help=text)
    text = "KV that stays in memory, or on a GPU, such as 512MiB (default: auto, what half of the free memory holds)"
    add("--kv-memory", default="auto", metavar="SIZE", help=text)
    text = "layers whose whole KV stays in memory (default: as many as fit)"
    add("--kv-resident-layers", default="auto", metavar="N", help=text)


def coupling(parser: argparse._ActionsContainer) -> None:
    text = "how drafts are verified. Except under seeded, a seed's text depends on the mode, and in mode auto on timing"
    parser.add_argument("--coupling", choices=COUPLINGS, default="seeded", help=described(text))


def placement(parser: argparse._ActionsContainer, *, context: bool = True) -> None:
    add = parser.add_argument
    add("--device", default="auto", help="cpu, cuda, cuda:1, ... (default: cuda where present)")
    text = "of the weights (default: bfloat16; float16 on a GPU before Ampere, float32 on a CPU without native kernels)"
    add("--dtype", choices=DTYPES, default="auto", help=text)
    kv_dtype(parser)
    weight_inputs(parser)
    if context:
        number(parser, "--context", "positions to use (default: all the model has)")


def kv_dtype(parser: argparse._ActionsContainer) -> None:
    text = "of keys and values; int8 halves the bytes of KV, and changes the output (default: that of the weights)"
    parser.add_argument("--kv-dtype", choices=KV_DTYPES, default="auto", help=text)


def weight_inputs(parser: argparse._ActionsContainer) -> None:
    text = (
        "rounding of the inputs of products with packed weights; int8 is faster, and changes the output. Draft models "
        "always take int8"
    )
    parser.add_argument("--weight-inputs", choices=WEIGHT_INPUTS, default="int16", help=described(text))


def speculation_lengths(parser: argparse._ActionsContainer) -> None:
    number(parser, "--draft-tokens", "tokens the draft proposes at a time", 2)
    number(parser, "--speculative-tokens", "tokens the retrieval tier proposes at a time", 6)


def retrieval_budget(parser: argparse._ActionsContainer, text: str) -> None:
    parser.add_argument("--retrieval-budget", default="auto", metavar="N|P%", help=text)


def engine(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("engine")
    add = group.add_argument
    draft(group)
    add(
        "--mode",
        choices=MODES,
        default="auto",
        help=described("the tiers to use; auto chooses them while it generates"),
    )
    speculation_lengths(group)
    text = "tokens the retrieval tier sees, or a share such as 3%% (default: auto: 2048, or what mode auto chooses)"
    retrieval_budget(group, text)
    number(group, "--retrieval-chunk", "tokens selected together", 16)
    add(
        "--retrieval-policy",
        choices=POLICIES,
        default="observed",
        help=described("how the retrieval tier selects tokens"),
    )
    text = "select anew every N verifications; 0: once; auto: after a rejection (default: 1)"
    add("--retrieval-refresh", default="1", metavar="N|auto", help=text)
    searched_layers(group)
    lower_tiers(group)
    kv(group)
    coupling(group)
    placement(group)


def chat_template(parser: argparse.ArgumentParser) -> None:
    text = f"a chat template in place of the model's own: a file, or one of {', '.join(TEMPLATE_NAMES)}"
    parser.add_argument("--chat-template", metavar="FILE|NAME", help=text)


def disk_cache(parser: argparse.ArgumentParser, *, required: bool = False) -> None:
    group = parser.add_argument_group(
        "disk cache",
        "The KV of prompts and answers is kept on disk, so that they are read only once, after a restart too. Each "
        "user who can read the folder can reconstruct the texts. So a new folder is open to its owner alone, and a "
        "folder that is open to others is refused.",
    )
    add = group.add_argument
    text = "keep the KV of prompts and answers in FOLDER" + ("" if required else " (default: nothing is kept)")
    add("--disk-cache", type=path, metavar="FOLDER", required=required, help=text)
    text = "limit of the folder's size; the least recently used entries are removed first"
    add("--disk-cache-size", default=DISK_CACHE_SIZE, metavar="SIZE", help=described(text))
    add("--disk-cache-network", action="store_true", help="accept a FOLDER on NFS, CIFS or FUSE")


def replicas(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("several engines")
    number(group, "--replicas", "engines, on Ray (default: one, in this process, without Ray)")
    text = "the Ray cluster for the replicas, such as HOST:6379 or auto (default: a cluster of this machine alone)"
    group.add_argument("--ray-address", metavar="ADDRESS", help=text)


def ranks(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("several processes")
    number(group, "--tp", "processes of an engine, which share the target's heads and weights (default: 1)")
    text = "add up partial sums of the processes: less to send, but sums differ in their last bits"
    group.add_argument("--tp-all-reduce", action="store_true", help=text)


def sampling(parser: argparse.ArgumentParser, *, several: bool = True, with_logprobs: bool = True) -> None:
    """Add the sampling options.

    several: whether a request may have several texts; False for a chat. with_logprobs: whether the
    command can list log-probabilities.
    """
    group = parser.add_argument_group("sampling")
    option = group.add_argument

    def add(name: str, kind: type, text: str, *short: str) -> None:
        default = DEFAULTS[name]
        if name in MODEL_DEFAULTS:
            chats = f", in chats {CHAT_DEFAULTS[name]:g}" if name in CHAT_DEFAULTS else ""
            default = f"as the model's files have it, or {default:g}{chats}"
        metavar = "X" if kind is float else "N"
        option(*short, f"--{name.replace('_', '-')}", type=kind, metavar=metavar, help=described(text, default))

    add("temperature", float, "0 is greedy")
    add("top_k", int, "keep the K most probable tokens; 0: off")
    add("top_p", float, "keep the most probable tokens up to this mass; 1: off")
    add("min_p", float, "drop tokens less probable than this share of the most probable one; 0: off")
    add("repetition_penalty", float, "over prompt and output; 1: off")
    add("presence_penalty", float, "over the output; 0: off")
    add("frequency_penalty", float, "over the output; 0: off")
    option(
        "--logit-bias",
        type=_bias,
        action="append",
        default=[],
        metavar="ID=BIAS",
        help="add BIAS to the logit of token ID; may be repeated",
    )
    grammar(group)
    add(
        "seed",
        int,
        "the same seed gives the same text, but see --coupling; -1: a random seed, which is printed (default: -1)",
    )
    if several:
        add("n", int, "continuations of the prompt")
        add("max_tokens", int, "new tokens at most", "-n")
    else:
        text = described("new tokens of an answer at most, where the context has room for them")
        option("-n", "--max-tokens", type=int, metavar="N", default=CHAT_TOKENS, help=text)
    text = "end before this text; may be repeated"
    option("--stop", type=some_text, action="append", default=[], metavar="TEXT", help=text)
    option(
        "--stop-token-id",
        type=int,
        action="append",
        default=[],
        metavar="ID",
        help="end at this token; may be repeated",
    )
    option("--ignore-eos", action="store_true", help="go on after the end-of-sequence token")
    if with_logprobs:
        add("logprobs", int, "list this many alternatives at each new token, in the JSON")
        add("prompt_logprobs", int, "the same at each prompt token")


def load_cache(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--load-cache", type=path, metavar="FILE", help="reuse what the KV cache in FILE has of the prompt"
    )


def color(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--color", action="store_true", help="colour each token by the tier that proposed it")


def described(text: str, default: Any = "%(default)s") -> str:
    return text if default is None else f"{text} (default: {default})"


def _bias(text: str) -> tuple[int, float]:
    token, _, bias = text.partition("=")
    try:
        return int(token), float(bias)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not ID=BIAS, such as 42=-1.5") from None
