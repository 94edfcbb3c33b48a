"""A plain small draft of the bytes of one that reads hidden states, trained on the same texts for as many minutes.

    python -m benchmarks.plain_draft smollm2 --draft DRAFT --train TEXTS --minutes 15 --texts FOLDER --json OUT

It is a Llama with the target's tokens. Its embedding starts as the leading directions of the target's head; all else is
as in `triforce train-draft`: texts and answers, what is taught, optimizers, clock. Both drafts then continue windows of
texts that neither was trained on, below the target, and tokens for each verification are counted.
"""

from __future__ import annotations

import sys
import tempfile
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks import study
from benchmarks.draft_acceptance import windows
from triforce.backends import dispatch
from triforce.backends.torch.tensors import as_tensor
from triforce.cli.bench import parts, setup
from triforce.cli.bench.setup import machine, show
from triforce.cli.options import described, draft, json_file, model, quiet
from triforce.cli.text_files import read_texts
from triforce.errors import RequestError
from triforce.interface.sampling_params import SamplingParams
from triforce.llm import LLM
from triforce.tables import Table
from triforce.training.distillation import SLICE, OutputHead
from triforce.training.episodes import EpisodeReader, Episodes, Texts
from triforce.training.initial_weights import last_norm
from triforce.training.trainer import optimizers, step, torch_threads
from triforce.training.training_config import TrainingConfig

Row = dict[str, Any]
LAYERS, HEAD, MLP = 2, 16, 8 / 3
"""Of the plain draft: layers, size of a head, and of its MLP beside its hidden size."""
TEMPERATURES = (0.0, 0.8)
OPENED = 512
"""Tokens of a window before the decoded ones."""


def add_arguments(parser: ArgumentParser) -> None:
    model(parser)
    draft(parser)
    parts.texts(parser)
    add = parser.add_argument
    add("--train", nargs="+", metavar="PATH", required=True, help="texts that the plain draft is trained on")
    add(
        "--minutes",
        type=float,
        default=15.0,
        metavar="N",
        help=described("of its training, as the clock of train-draft"),
    )
    add("--windows", type=int, default=2, metavar="N", help=described("windows of each text that are continued"))
    add("--tokens", type=int, default=128, metavar="N", help=described("new tokens behind each of them"))
    add("--speculative-tokens", type=int, default=4, metavar="N", help=described("draft tokens for each verification"))
    quiet(parser)
    json_file(parser)


def measure(options: Namespace) -> None:
    """Train the plain draft, and print tokens for each verification of both. Raises TriforceError."""
    threads = torch.get_num_threads()  # before native kernels claim all but one
    llm = setup.load(options)
    if llm.eagle_head is None:
        raise RequestError("this draft reads no hidden states; name one that does with --draft")
    bytes_of = sum(file.stat().st_size for file in llm.eagle_head.path.glob("*.safetensors"))
    print(machine())
    rows = decoded("reads hidden states", llm, options)
    with tempfile.TemporaryDirectory() as folder, torch_threads(threads):
        plain = PlainTraining(llm, read_texts(options.train), bytes_of, threads)
        plain.run(options.minutes * 60)
        plain.model.bfloat16().save_pretrained(folder)
        options.draft = folder
        rows += decoded("plain", setup.load(options), options)
    row_head = {"bytes": bytes_of, "plain_parameters": plain.parameters, "updates": plain.updates}
    study.write(options, {"rows": rows} | row_head)
    show(tables(rows))


class PlainTraining:
    """Distils the target into a Llama of at most `byte_limit` bytes in bfloat16."""

    def __init__(self, llm: LLM, texts: dict[str, str], byte_limit: int, threads: int) -> None:
        target = llm.target
        self.config = TrainingConfig()
        self.threads = threads
        episodes = Episodes(llm, Texts.of(llm, texts, self.config.width), self.config)
        self.episodes = EpisodeReader(target.decoder, (1,), episodes, self.config)
        rows_VC = as_tensor(target.decoder.head_rows(np.arange(target.config.vocab_size))).float()
        cap = target.config.architecture.logit_cap
        self.narrow = dispatch.native is not None and dispatch.native.level() == "avx512bf16"
        head_rows = rows_VC.bfloat16() if self.narrow else rows_VC
        self.head = OutputHead(last_norm(target), target.config.norm_eps, head_rows, cap, self.config.greedy)
        self.model = largest(target.config.vocab_size, byte_limit, self.config.seed)
        self.parameters = self.model.num_parameters()
        self.updates = 0
        embedding_VC = self.model.model.embed_tokens.weight
        directions_CC = torch.linalg.eigh(rows_VC.T @ rows_VC).eigenvectors
        with torch.no_grad():
            drawn = rows_VC @ directions_CC[:, -embedding_VC.shape[1] :]
            embedding_VC.copy_(drawn * (embedding_VC.std() / drawn.std()))
        matrices: list[Tensor] = [
            weight for layer in self.model.model.layers for weight in layer.parameters() if weight.ndim == 2
        ]
        vectors: list[Tensor] = [
            weight for weight in self.model.parameters() if not any(weight is matrix for matrix in matrices)
        ]
        self.optimizers = optimizers(matrices, vectors)

    def run(self, seconds: float) -> None:
        """Train for `seconds` seconds of the process's time, divided by its threads."""
        began = time.process_time()
        spent = 0.0
        with tqdm(total=round(seconds), desc="training", unit=" s", disable=None, leave=False) as bar:
            for ids_BT, final_BTC in self._chunks():
                value = self._update(ids_BT, final_BTC, min(spent / seconds, 1.0))
                spent = (time.process_time() - began) / self.threads
                bar.update(round(min(spent, seconds)) - bar.n)
                bar.set_postfix_str(f"{value:.2f} nats")
                if spent >= seconds:
                    return

    def _chunks(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield tokens, and the target's states behind the last layer: those of each episode again as trainings do."""
        number = 0
        while True:
            for due in self.config.due(number):
                for chunk in (chunk for text in self.episodes(due) for chunk in text):
                    yield chunk.ids_BT, chunk.final_BTC.float()
            number += 1

    def _update(self, ids_BT: Tensor, final_BTC: Tensor, done: float) -> float:
        total = 0.0
        final_NC = final_BTC.flatten(0, 1)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.narrow):
            out_NC = self.model.model(ids_BT).last_hidden_state.flatten(0, 1)
        detached_NC = out_NC.detach().requires_grad_()
        for some_N in torch.split(torch.arange(len(out_NC)), SLICE):  # logits of a slice exist at once
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.narrow):
                logits_NV = self.model.lm_head(detached_NC[some_N])
            nats = -(self.head.training_probs(final_NC[some_N]) * logits_NV.float().log_softmax(-1)).sum() / len(out_NC)
            nats.backward()
            total += float(nats.detach())
        out_NC.backward(detached_NC.grad)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        step(self.optimizers, self.config.rate(self.updates, done))
        self.updates += 1
        return total


def largest(vocab_size: int, byte_limit: int, seed: int) -> LlamaForCausalLM:
    """Return the widest Llama of at most `byte_limit` bytes in bfloat16. Raises RequestError if there is none."""
    torch.manual_seed(seed)
    hidden = HEAD
    largest_fit = None
    while (candidate := llama(vocab_size, hidden)).num_parameters() * 2 <= byte_limit:
        hidden = hidden + HEAD
        largest_fit = candidate
    if largest_fit is None:
        raise RequestError(f"no plain draft of {vocab_size:,} tokens has as few bytes as this draft")
    return largest_fit


def llama(vocab_size: int, hidden: int) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=vocab_size, hidden_size=hidden, intermediate_size=round(hidden * MLP / 8) * 8,
        num_hidden_layers=LAYERS, num_attention_heads=hidden // HEAD, num_key_value_heads=hidden // HEAD, head_dim=HEAD,
        max_position_embeddings=32_768, tie_word_embeddings=True,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def decoded(name: str, llm: LLM, options: Namespace) -> list[Row]:
    """Continue windows of texts in mode draft; a row for each kind of text and temperature."""
    texts = windows(setup.sources(llm, options.texts).texts, OPENED, options.windows)
    rows = []
    for kind in dict.fromkeys(text.kind for text in texts):
        prompts = [text.ids_N.tolist() for text in texts if text.kind == kind]
        for temperature in TEMPERATURES:
            params = [
                SamplingParams(temperature=temperature, seed=b, max_tokens=options.tokens, ignore_eos=True)
                for b in range(len(prompts))
            ]
            tiers = [output.tiers for output in llm.generate(prompts, params, mode="draft")]
            passes = sum(stats[-1].passes for stats in tiers)
            tokens = len(prompts) * options.tokens
            rows.append({"draft": name, "kind": kind, "temperature": temperature, "tokens": tokens / passes})
    return rows


def tables(rows: Sequence[Row]) -> list[Table]:
    """Return tokens for each verification of both drafts, beside each other."""
    draft_tokens: dict[tuple[str, float], dict[str, float]] = {}
    for row in rows:
        draft_tokens.setdefault((row["kind"], row["temperature"]), {})[row["draft"]] = row["tokens"]
    names = list(dict.fromkeys(row["draft"] for row in rows))
    lines = [
        [f"{kind}, T = {temperature:g}", *(f"{of[name]:.2f}" for name in names), f"{of[names[0]] / of[names[-1]]:.2f}"]
        for (kind, temperature), of in draft_tokens.items()
    ]
    note = "Tokens for each verification by the target; both drafts have as many bytes, and were trained as long."
    return [Table("A plain draft", note, ["", *names, "times"], lines)]


main = study.command("plain_draft", __doc__, add_arguments, measure)

if __name__ == "__main__":
    sys.exit(main())
