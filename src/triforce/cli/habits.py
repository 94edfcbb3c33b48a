"""Advice for users of llama.cpp, Ollama or vLLM: what an option or a command is called here."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable

THREADS = (
    "one thread runs on each processor that the process may use; `taskset -c 0-3 triforce ...` allows four processors, "
    "and a container's limit counts, too"
)

_HABITS: tuple[tuple[str, str, str], ...] = (
    ("-t", "", f"for the temperature use --temperature X with generate, explain or chat; for threads: {THREADS}"),
    ("--threads -tb --threads-batch --n-threads --num-threads", "", THREADS),
    ("--temp", "", "use --temperature X with generate, explain or chat"),
    (
        "-c --ctx-size --n-ctx --num-ctx --max-model-len --context-length",
        "--context",
        "--context N, in tokens",
    ),
    ("-hf -hfr --hf --hf-repo", "", "a model of the hub is the MODEL itself, such as: triforce chat user/repo"),
    ("--n-predict --predict --num-predict --max-new-tokens", "--max-tokens", "--max-tokens N, or -n N"),
    ("--repeat-penalty", "--repetition-penalty", "--repetition-penalty X"),
    ("-s", "--seed", "--seed N"),
    (
        "--grammar --grammar-file",
        "--regex",
        "to constrain the text use --json-schema SCHEMA, --regex PATTERN or --choice TEXT",
    ),
    ("-f", "--prompt-file", "--prompt-file FILE"),
    ("-sys --system-prompt", "--system", "--system TEXT"),
    ("-md --model-draft --draft-model --speculative-model", "--draft", "--draft MODEL"),
    (
        "-ctk -ctv --cache-type-k --cache-type-v --kv-cache-dtype",
        "--kv-dtype",
        "--kv-dtype int8 halves both",
    ),
    ("-ngl --gpu-layers --n-gpu-layers", "--device", "--device cuda puts all layers on the GPU"),
    ("-tp --tensor-parallel-size", "--tp", "--tp N"),
    ("-np --parallel", "--max-num-seqs", "--max-num-seqs N, the number of texts generated at a time"),
    ("-a --alias --served-model-name", "--name", "--name NAME"),
    (
        "--api-key",
        "--api-key-file",
        "--api-key-file FILE, or TRIFORCE_API_KEYS; other users can see a command line",
    ),
    ("--speculative-config", "--draft", "--draft MODEL names a draft, and --mode the tiers to use"),
    ("--num-speculative-tokens", "--draft-tokens", "--draft-tokens N, of a --draft MODEL"),
    ("--draft-max --draft-n --spec-draft-n-max", "--draft-tokens", "--draft-tokens N"),
    ("--swap-space --cpu-offload-gb", "--kv-offload", "--kv-offload host keeps KV in the machine's memory"),
    (
        "--gpu-memory-utilization --gpu-memory-fraction",
        "",
        "KV takes memory as it grows, in serve up to --max-kv-tokens N; in every command --kv-memory SIZE with "
        "--kv-offload bounds it",
    ),
    (
        "--max-num-batched-tokens --ubatch-size -ub --batch-size",
        "",
        "the size of prefill chunks is chosen for the machine; --max-itl MS of serve limits the pause of other texts",
    ),
    ("--enable-prefix-caching --enable-chunked-prefill", "", "it is always on; leave it out"),
    ("--jinja --flash-attn -fa", "", "it is always on; leave it out"),
    ("--trust-remote-code", "", "code of a model's files is never run; leave it out"),
    ("--no-color", "--color", "colours are off without --color; leave it out"),
    ("--enforce-eager", "", "CUDA graphs do not change the text; leave it out"),
    (
        "--quantization",
        "",
        "a model's files say how it is quantised; name a GGUF file, or user/repo:Q4_K_M, as the MODEL",
    ),
    ("--tokenizer --tokenizer-mode", "", "the tokenizer is that of the model's own files; leave it out"),
    ("--chat-template-file", "--chat-template", "is called --chat-template here"),
    ("--chat-template", "", "generate --chat, chat, serve and batch take it; other commands format no conversations"),
    (
        "--ssl-keyfile --ssl-certfile --ssl-key-file --ssl-cert-file",
        "",
        "there is no TLS here; put a proxy that has it in front of triforce serve",
    ),
)
"""Options of other programs, the option that a command must have for the advice to fit (or empty), and the advice."""

ADVICE = {option: (our_option, advice) for options, our_option, advice in _HABITS for option in options.split()}

LIST_ADVICE = "triforce models list shows models fetched by a short name, and `hf cache ls` shows those of the hub"
COMMANDS = {
    "run": "triforce chat MODEL talks with a model, and triforce generate MODEL PROMPT continues a text",
    "pull": "a model is fetched when it is first named: triforce chat MODEL, or triforce info MODEL",
    "list": LIST_ADVICE,
    "ls": LIST_ADVICE,
    "rm": "triforce models remove NAME removes a model that was fetched by a short name",
    "ps": "no model stays loaded after a command; /health and /metrics at a server's address tell what it does",
    "stop": "no model stays loaded after a command; Ctrl-C or SIGTERM ends a server",
    "show": "triforce info MODEL says what a model is",
    "help": "triforce --help lists the commands, and triforce COMMAND --help its options",
}
"""Commands of other programs, and their replacement here."""


def option_advice(arguments: Iterable[str], options: Container[str]) -> tuple[str, str] | None:
    """Return the first argument that is another program's option, and its advice, if that fits `options`."""
    for argument in arguments:
        if argument == "--":
            return None
        name = argument.partition("=")[0]
        name = name[:2] if re.fullmatch(r"-[a-z][\d.]+", name) else name
        our_option, advice = ADVICE.get(name, ("", ""))
        if advice and name not in options and (not our_option or our_option in options):
            return name, advice
    return None
