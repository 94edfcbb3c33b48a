"""One stage of training, resumable at any step from a checkpoint of model, optimizers, step and held-out history."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaForCausalLM

from recipes.pair import files, heldout, losses, model, optim, tokenizer
from recipes.pair.batches import IGNORED, Batches
from recipes.pair.config import Config, Machine, Stage

Deadline = Callable[[], bool]


class Trainer:
    """Training of one stage."""

    def __init__(self, config: Config, stage: Stage, work: Path) -> None:
        """Load the model from the last checkpoint of this stage, or else from the previous stage."""
        self.config = config
        self.stage = stage
        self.work = work
        self.model = start(config, stage, work)
        model.sharpen(self.model, stage.sharpen)
        self.teacher = load_model(config, stage.teacher, work) if stage.teacher else None
        self.optimizers = optim.build(self.model, stage)
        self.batches = Batches(work / "tokens", tokenizer.load(work / "tokenizer"), stage, config.seed)
        self.step = 0
        self.seconds = 0.0
        self.history: list[list[float]] = []
        self.hidden = torch.compile(model.hidden) if config.machine.compile else model.hidden
        if self.checkpoint.exists():
            self._restore(files.read_state(self.checkpoint))

    @property
    def checkpoint(self) -> Path:
        """File with the state of an unfinished stage."""
        return self.work / f"{self.stage.name}.checkpoint.pt"

    def run(self, out_of_time: Deadline) -> bool:
        """Train to the last step and write the final weights. If time runs out, write a checkpoint and return False."""
        stage = self.stage
        while self.step < stage.steps and not heldout.stalled(self.history, stage.patience):
            if out_of_time():
                self._save()
                return False
            began = time.monotonic()
            loss = self._train_step()
            self.seconds += time.monotonic() - began
            self._after_step(loss)
        files.write_state(weights_path(self.work, stage.name), self.model.state_dict())
        self.checkpoint.unlink(missing_ok=True)
        return True

    def _train_step(self) -> torch.Tensor:
        """Make one update. Returns the mean loss per labelled token in nats, as a tensor on the device."""
        device = self.config.machine.device
        rows = self.stage.micro_rows
        batch = self.batches(self.step)
        label_count = int((batch[-1] != IGNORED).sum())
        total = torch.zeros((), device=device)
        for parts in zip(*(tensor.split(rows) for tensor in batch), strict=True):
            total += self._backward(*(part.to(device) for part in parts), label_count)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.stage.clip)
        optim.update(self.optimizers, optim.rate(self.stage, self.step))
        self.step += 1
        return total

    def _backward(
        self, inputs_RT: torch.Tensor, positions_RT: torch.Tensor, labels_RT: torch.Tensor, label_count: int
    ) -> torch.Tensor:
        with autocast(self.config.machine):
            hidden_ND = self.hidden(self.model, inputs_RT, positions_RT).flatten(0, 1)
            head_loss = self._head_loss(inputs_RT, positions_RT, labels_RT.flatten())
            return losses.backward_in_slices(
                hidden_ND, lambda hidden, where: head_loss(hidden, where) / label_count, self.config.machine.slice
            )

    def _head_loss(
        self, inputs_RT: torch.Tensor, positions_RT: torch.Tensor, labels_N: torch.Tensor
    ) -> losses.HeadLoss:
        if self.teacher is None:
            return losses.cross_entropy(self.model.lm_head, labels_N)
        with torch.no_grad():
            teacher_ND = self.hidden(self.teacher, inputs_RT, positions_RT).flatten(0, 1)
        return losses.distillation(self.model.lm_head, labels_N, self.teacher.lm_head, teacher_ND, self.stage.kl_share)

    def _after_step(self, loss: torch.Tensor) -> None:
        stage = self.stage
        is_last = self.step == self.stage.steps
        if is_last or self.step % stage.check_every == 0:
            nats = heldout.losses(self.model, self.config, stage, self.work / "tokens")
            self.history.append([self.step, sum(nats.values()) / len(nats)])
            self._log(heldout=nats)
        if is_last or self.step % 10 == 0:
            self._log(loss=loss.item())  # the only synchronisation with the device
        if self.step % stage.save_every == 0:
            self._save()

    def _log(self, **values: Any) -> None:
        tokens = self.stage.rows * self.stage.length * self.step
        line = {"stage": self.stage.name, "step": self.step, "tokens": tokens, "seconds": round(self.seconds), **values}
        print(json.dumps(line), flush=True)
        with (self.work / "training.jsonl").open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(line) + "\n")

    def _save(self) -> None:
        optimizers = [optimizer.state_dict() for optimizer in self.optimizers]
        state = {"model": self.model.state_dict(), "optimizers": optimizers}
        progress = {"step": self.step, "history": self.history, "seconds": self.seconds}
        files.write_state(self.checkpoint, state | progress)

    def _restore(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.step = state["step"]
        self.history = state["history"]
        self.seconds = state["seconds"]


def weights_path(work: Path, stage: str) -> Path:
    """Return the file of a stage's final weights. The stage is done if the file exists."""
    return work / f"{stage}.weights.pt"


def autocast(machine: Machine) -> AbstractContextManager[Any]:
    """Return autocast to the machine's dtype, without the cast cache, which slices of one graph cannot share."""
    enabled = machine.torch_dtype != torch.float32
    return torch.autocast(machine.device, dtype=machine.torch_dtype, enabled=enabled, cache_enabled=False)


def start(config: Config, stage: Stage, work: Path) -> LlamaForCausalLM:
    """Return the model after the last finished stage of the same model, or a new one."""
    earlier_stages = config.stages[: config.stages.index(stage)]
    if any(earlier.model == stage.model for earlier in earlier_stages):
        return load_model(config, stage.model, work, earlier_stages)
    new_model = model.build(config.shapes[stage.model], config.corpus.vocab, config.seed)
    if stage.teacher:
        model.borrow_embedding(new_model, load_model(config, stage.teacher, work))
    return new_model.to(config.machine.device)


def load_model(config: Config, name: str, work: Path, stages: list[Stage] | None = None) -> LlamaForCausalLM:
    """Return the model `name` after the last finished stage of `stages`, by default of all stages."""
    candidates = [stage for stage in (stages or config.stages) if stage.model == name]
    done = [stage for stage in candidates if weights_path(work, stage.name).exists()]
    loaded = model.build(config.shapes[name], config.corpus.vocab, config.seed)
    loaded.load_state_dict(files.read_state(weights_path(work, done[-1].name)))
    return loaded.to(config.machine.device)
