"""`triforce demo`: a book continued plainly and with TriForce. Exit code 1 unless the texts are the same."""

from __future__ import annotations

import sys
import tempfile
from argparse import Namespace
from importlib import resources
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

from triforce.cli.answer_output import Painter, legend, passes_per_token, show
from triforce.cli.progress import Prefill
from triforce.errors import RequestError
from triforce.interface.outputs import RequestOutput
from triforce.interface.sampling_params import SamplingParams

if TYPE_CHECKING:
    from triforce.llm import LLM

BOOK, TITLE = "dracula.txt", "Dracula, by Bram Stoker"
TEMPERATURE = 0.8
TAIL = 48  # tokens of the prompt that are shown


def run(options: Namespace) -> int:
    """Each text once by plain decoding and once by TriForce, from the same saved prompt."""
    began = perf_counter()
    common = {"max_tokens": options.max_tokens, "seed": options.seed, "ignore_eos": True}
    settings = {
        "Greedy": SamplingParams(temperature=0, **common),
        f"Sampled at temperature {TEMPERATURE}, seed {options.seed}": SamplingParams(temperature=TEMPERATURE, **common),
    }
    from triforce.llm import LLM

    llm = LLM(None, device=options.device, dtype=options.dtype)
    prompt = _prompt(llm, options.prompt_tokens)
    with tempfile.TemporaryDirectory() as folder:
        saved = Path(folder) / "prompt.safetensors"
        same = [_compare(llm, prompt, title, params, saved) for title, params in settings.items()]
    print(f"\nIn all {perf_counter() - began:.1f} s.")
    return 0 if all(same) else 1


def _prompt(llm: LLM, tokens: int) -> list[int]:
    """The first `tokens` tokens of the book. Raises RequestError if it has fewer."""
    text = (resources.files("triforce") / "assets" / BOOK).read_text(encoding="utf-8")
    assert llm.tokenizer is not None, "the shipped pair has one"
    ids = llm.tokenizer.encode(text)
    if not 0 < tokens <= len(ids):
        raise RequestError(f"--prompt-tokens {tokens}: the book has {len(ids):,} tokens; give 1 to {len(ids)}")
    print(f"{TITLE}: the first {tokens:,} tokens. They end:\n\n... {llm.tokenizer.decode(ids[:tokens][-TAIL:])}")
    return ids[:tokens]


def _compare(llm: LLM, prompt: list[int], title: str, params: SamplingParams, saved: Path) -> bool:
    print(f"\n== {title} ==")
    plain = _continue(llm, prompt, params, "ar", saved)
    fast = _continue(llm, prompt, params, "triforce", saved)
    same = plain.outputs[0].token_ids == fast.outputs[0].token_ids and plain.outputs[0].text == fast.outputs[0].text
    print(f"\ntexts       {'identical' if same else 'NOT IDENTICAL'}")
    print(f"plain       {_speed(plain)}")
    print(f"triforce    {_speed(fast)}, {plain.decode_seconds / fast.decode_seconds:.2f} times as fast")
    guesses = fast.outputs[0].tiers[:-1]
    shares = [f"{tier.name} {tier.acceptance or 0:.0%} of {tier.proposed:,}" for tier in guesses]
    print(f"accepted    {', '.join(shares)}")
    print(f"full passes {passes_per_token(fast):.2f} per new token (plain decoding: {passes_per_token(plain):.2f})")
    return same


def _continue(llm: LLM, prompt: list[int], params: SamplingParams, mode: str, saved: Path) -> RequestOutput:
    """Stream one text to stdout; the first run of all writes the prompt's KV cache, and the others read it."""
    first = not saved.exists()
    save, load = (saved, None) if first else (None, saved)
    color = sys.stdout.isatty() and mode != "ar"
    print(f"\n[{mode}] ", end="", flush=True)
    progress = Prefill()
    pieces = llm.stream(prompt, params, mode=mode, save_cache=save, load_cache=load, on_prefill=progress)
    _, output = show(pieces, Painter(llm.tokenizer, prompt) if color else None, progress)
    assert output is not None, "a stream ends with the whole answer"
    if color:
        print(legend(output.outputs[0].tiers))
    if first:
        print(f"(the prompt was read in {output.prefill_seconds:.1f} s)")
    return output


def _speed(output: RequestOutput) -> str:
    return (
        f"{output.completion_tokens} tokens in {output.decode_seconds:.2f} s: {output.tokens_per_second:.1f} tokens/s"
    )
