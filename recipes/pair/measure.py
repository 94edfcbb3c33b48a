"""The figures of a finished pair, on texts that neither model has seen.

Shapes: R windows, T positions (W = T + 1 tokens), N = R * T, D hidden, V vocabulary.
"""

from __future__ import annotations

import json
from math import log
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch.nn import functional as F
from transformers import LlamaForCausalLM

from recipes.pair import files, tokenizer
from recipes.pair.config import Config, Measure
from recipes.pair.model import count
from recipes.pair.train import autocast, load_model

POSITIONS_AT_ONCE = 16_384
SLICE = 1024


def run(config: Config, work: Path) -> None:
    """Writes `figures.json`, once."""
    if (work / "figures.json").exists():
        return
    target, draft = (load_model(config, name, work).eval() for name in ("target", "draft"))
    with torch.inference_mode(), autocast(config.machine):
        figures = {
            "parameters": {"target": count(target), "draft": count(draft)},
            "texts": {name: _text(config, work, name, target, draft) for name in config.measure.texts},
            "sample": _sample(config, tokenizer.load(work / "tokenizer"), target),
            "training": training(work),
        }
    files.write_json(work / "figures.json", figures)


def training(work: Path) -> dict[str, Any]:
    """Tokens, seconds and held-out nats per token by stage, from the log of the run; a repeated step counts once."""
    stages: dict[str, Any] = {}
    for text in (work / "training.jsonl").read_text(encoding="utf-8").splitlines():
        line = json.loads(text)
        stage = stages.setdefault(line["stage"], {"heldout": {}})
        stage |= {"tokens": line["tokens"], "seconds": line["seconds"]}
        if "heldout" in line:
            stage["heldout"][line["tokens"]] = line["heldout"]
    return stages


def _text(config: Config, work: Path, name: str, target: LlamaForCausalLM, draft: LlamaForCausalLM) -> dict[str, float]:
    machine, settings = config.machine, config.measure
    tokens = torch.from_numpy(np.load(work / "tokens" / "eval" / f"{name}.npy").astype(np.int64)).to(machine.device)
    size = json.loads((work / "tokens" / "eval" / "bytes.json").read_text())[name]
    bits = len(tokens) / size / log(2)  # per byte, from nats per token
    tokens = tokens[: settings.windows * settings.long + 1]
    long_RT = nats(target, tokens.unfold(0, settings.long + 1, settings.long))
    short_RT = nats(target, tokens.unfold(0, settings.short + 1, settings.short))
    draft_RT = nats(draft, tokens.unfold(0, settings.short + 1, settings.short))
    return {
        "target_bits_per_byte_short": short_RT.mean().item() * bits,
        "target_bits_per_byte_long": long_RT.mean().item() * bits,
        "draft_bits_per_byte_short": draft_RT.mean().item() * bits,
        "far_nats_full": long_RT[:, settings.long // 2 :].mean().item(),
        "far_nats_recent": _far_recent(target, tokens, settings),
        "agreement": _agreement(target, draft, tokens[: settings.long + 1], settings),
    }


def _far_recent(target: LlamaForCausalLM, tokens: torch.Tensor, settings: Measure) -> float:
    """Mean nats over the second half of each long window, each position seeing at most the `recent` tokens before."""
    stride = settings.recent // 4
    windows = tokens.unfold(0, settings.long + 1, settings.long)
    losses = [nats(target, recent_windows(window, settings.recent, stride))[:, -stride:] for window in windows]
    return torch.cat(losses).mean().item()


def recent_windows(window_W: torch.Tensor, recent: int, stride: int) -> torch.Tensor:
    """Windows of `recent` + 1 tokens whose last `stride` positions together cover the second half of `window_W`."""
    half = (len(window_W) - 1) // 2
    return window_W[half + stride - recent :].unfold(0, recent + 1, stride)


def _agreement(target: LlamaForCausalLM, draft: LlamaForCausalLM, window_W: torch.Tensor, settings: Measure) -> float:
    """Mean over the second half of one long window of sum(min(p, q)): p sees all of it, q the `short` last tokens."""
    stride = settings.short // 4
    target_ND = hidden(target, window_W[None, :-1])[:, settings.long // 2 :].flatten(0, 1)
    draft_ND = hidden(draft, recent_windows(window_W, settings.short, stride)[:, :-1])[:, -stride:].flatten(0, 1)
    total = 0.0
    for target_CD, draft_CD in zip(target_ND.split(SLICE), draft_ND.split(SLICE), strict=True):
        target_CV, draft_CV = target.lm_head(target_CD).float(), draft.lm_head(draft_CD).float()
        total += torch.minimum(target_CV.softmax(-1), draft_CV.softmax(-1)).sum().item()
    return total / len(target_ND)


def hidden(model: LlamaForCausalLM, inputs_RT: torch.Tensor) -> torch.Tensor:
    """Last hidden states, float [R, T, D]."""
    rows = max(1, POSITIONS_AT_ONCE // inputs_RT.shape[1])
    return torch.cat([model.model(inputs, use_cache=False).last_hidden_state for inputs in inputs_RT.split(rows)])


def nats(model: LlamaForCausalLM, windows_RW: torch.Tensor) -> torch.Tensor:
    """Loss of each token of each window but its first, in nats, float [R, T]."""
    hidden_ND = hidden(model, windows_RW[:, :-1]).flatten(0, 1)
    labels_N = windows_RW[:, 1:].flatten()
    slices = zip(hidden_ND.split(SLICE), labels_N.split(SLICE), strict=True)
    losses = [F.cross_entropy(model.lm_head(states).float(), labels, reduction="none") for states, labels in slices]
    return torch.cat(losses).view(len(windows_RW), -1)


def _sample(config: Config, words: Tokenizer, target: LlamaForCausalLM) -> str:
    """A continuation of the prompt at temperature 0.8."""
    torch.manual_seed(config.seed)
    settings = config.measure
    ids = torch.tensor([words.encode(settings.prompt).ids], device=config.machine.device)
    text = target.generate(
        ids, do_sample=True, temperature=0.8, top_k=0, max_new_tokens=settings.sample_tokens, pad_token_id=0
    )
    decoded: str = words.decode(text[0].tolist(), skip_special_tokens=False)
    return decoded
