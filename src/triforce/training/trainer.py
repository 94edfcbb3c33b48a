"""Trainer: distils a target into an EAGLE head, minute by minute, and can be stopped and go on.

Shape suffixes as in distillation.py and initial_weights.py.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from triforce.eagle.head import EagleHeadWeights, shapes
from triforce.eagle.head_files import new_config, write_atomically
from triforce.eagle.torch_passes import EagleHeadLayer
from triforce.errors import ModelError
from triforce.llm import LLM
from triforce.training.distillation import Head, Heldout, Past, Subject, loss
from triforce.training.episodes import Chunk, Episodes, Readings, Texts
from triforce.training.initial_weights import Sample, add_induction, initial_weights, last_norm
from triforce.training.training_config import TrainingConfig

FILE = "training.pt"


@dataclass
class TrainingState:
    """Weights by field, the state of each optimizer, and how far it has come.

    facts: what must be the same when it goes on. episode: the number of the next one. seconds: those spent. history:
    held-out shares, with the updates and seconds of each look.
    """

    facts: dict[str, Any]
    weights: dict[str, Tensor]
    tokens_M: Tensor
    optimizers: list[dict[str, Any]] = field(default_factory=list)
    episode: int = 0
    updates: int = 0
    tokens: int = 0
    seconds: float = 0.0
    history: list[dict[str, Any]] = field(default_factory=list)

    def save(self, folder: Path) -> None:
        """Write the file of a folder. Raises RequestError where there is no room; the file is as it was then."""
        data = io.BytesIO()
        torch.save({name: getattr(self, name) for name in self.__dataclass_fields__}, data)
        write_atomically(folder / FILE, data.getbuffer())

    @staticmethod
    def load(folder: Path, facts: dict[str, Any]) -> TrainingState | None:
        """Read the file of a folder; None where there is none. Raises ModelError for a broken one, or other facts."""
        file = folder / FILE
        if not file.exists():
            return None
        try:
            state = TrainingState(**torch.load(file, map_location="cpu", weights_only=True))
        except Exception as error:  # a damaged file surfaces as nearly anything
            raise ModelError(f"{file} is damaged; remove it to begin anew") from error
        if state.facts != facts:
            changed = ", ".join(name for name in facts if state.facts.get(name) != facts[name])
            raise ModelError(f"{file} is a training with another {changed}; name another folder, or remove the file")
        return state


Clock = Callable[[], float]
"""Seconds that have passed, from any moment on."""
Report = Callable[[TrainingState], None]
"""Told the state after each update."""


class Trainer:
    """Trains one draft. folder: keeps the state. threads: those of torch, while it computes.

    narrow: its products are of bfloat16. Raises RequestError for too few texts, and ModelError for a state that does
    not belong to this training.
    """

    def __init__(
        self,
        llm: LLM,
        texts: Mapping[str, str],
        folder: Path,
        config: TrainingConfig,
        *,
        clock: Clock,
        threads: int = 1,
        narrow: bool = False,
    ) -> None:
        config = replace(config, width=min(config.width, llm.target.config.context))
        self.llm = llm
        self.folder = folder
        self.config = config
        self.clock = clock
        self.threads = threads
        self.narrow = narrow
        self.decoder = llm.target.decoder
        target = llm.target.config
        self.texts = Texts.of(llm, texts, config.width)
        self.episodes = Episodes(llm, self.texts, config)
        self.draft = new_config(target, config.choices_of(target))
        self.readings = Readings(self.decoder, self.draft.state_layers, self.episodes, config)
        digest = hashlib.sha256(self.texts.trained_N.numpy().tobytes()).hexdigest()
        facts = {"target": llm.target.fingerprint, "texts": digest, "numbers": repr(asdict(config))}
        facts |= {"shapes": repr(shapes(self.draft))}
        found = TrainingState.load(folder, facts)
        self.resumed = found is not None
        self.state = found or self._new(facts)
        self.weights = self._weights()
        self.optimizers = self._optimizers()
        rows_MC = self.decoder.head_rows(self.weights.tokens_M)
        rows_MC = rows_MC.bfloat16() if narrow else rows_MC
        norm_C = last_norm(llm.target)
        cap = target.architecture.logit_cap
        self.head = Head(norm_C, target.norm_eps, rows_MC, cap, config.greedy)
        self._heldout: Heldout | None = None

    def run(self, seconds: float, report: Report = lambda state: None) -> None:
        """Train until so many seconds are spent in all, and once at least.

        The state is kept after each episode, and when interrupted.
        """
        try:
            while self.state.seconds < seconds or not self.state.updates:
                self._episode(seconds, report)
                self.save()
        except KeyboardInterrupt:
            self.save()
            raise

    def save(self) -> None:
        """Keep the state in the folder. Raises RequestError where there is no room."""
        self.state.optimizers = [optimizer.state_dict() for optimizer in self.optimizers]
        self.state.save(self.folder)

    @property
    def subject(self) -> Subject:
        """The draft as it is now."""
        return Subject(EagleHeadLayer(self.draft, self.weights), self.head, self.weights.tokens_M)

    @property
    def heldout(self) -> Heldout:
        """The held-out texts, and the target's own answers to some of them, at temperature 0."""
        if self._heldout is None:
            config = self.config
            dice = torch.Generator().manual_seed(self.config.seed)
            ids_N = self.texts.heldout_N
            rows = config.heldout_rows
            texts = self.texts.windows(ids_N, rows, config.width, dice)
            answers = self.episodes.answers(ids_N, config.width, config.seed, (0.0,), rows, dice)
            read = {"texts": texts, "answers": answers}
            self._heldout = Heldout(self.decoder, self.draft.state_layers, read)
        return self._heldout

    def _new(self, facts: dict[str, Any]) -> TrainingState:
        began = self.clock()
        seed = self.config.seed
        tokens_M = self.texts.frequent(self.draft.choices, self.draft.vocab_size)
        weights = initial_weights(self.llm.target, self.draft, seed)
        sample = self._sample(tokens_M)
        with torch_threads(self.threads):
            add_induction(weights, self.draft, sample, seed)
        return TrainingState(facts, weights, tokens_M, seconds=self.clock() - began)

    def _sample(self, tokens_M: Tensor) -> Sample:
        config = self.config
        dice = torch.Generator().manual_seed(self.config.seed)
        ids_BT = self.texts.windows(self.texts.trained_N, config.rows * config.groups, config.width, dice)
        read = [chunk.to(torch.float32) for text in self.readings.texts(ids_BT) for chunk in text]
        states_NX = torch.cat([chunk.states_BTX[:, 1:].flatten(0, 1) for chunk in read])
        embeddings_NC = torch.cat([chunk.embeddings_BTC[:, :-1].flatten(0, 1) for chunk in read])
        choices_MC = self.decoder.model.embed(tokens_M).float()
        head_MC = self.decoder.head_rows(tokens_M).float()
        return Sample(states_NX, embeddings_NC, choices_MC, head_MC)

    def _weights(self) -> EagleHeadWeights:
        """The state's tensors, which are changed in place."""
        named = {name: tensor.requires_grad_() for name, tensor in self.state.weights.items()}
        return EagleHeadWeights(**named, tokens_M=self.state.tokens_M)

    def _optimizers(self) -> list[torch.optim.Optimizer]:
        norms = [tensor for name, tensor in self.weights.trained() if name.endswith("norm_C") or "norm_S" in name]
        matrices = [tensor for _, tensor in self.weights.trained() if not any(tensor is norm for norm in norms)]
        made = optimizers(matrices, norms)
        for optimizer, state in zip(made, self.state.optimizers, strict=False):
            optimizer.load_state_dict(state)
        return made

    def _episode(self, seconds: float, report: Report) -> None:
        """Train on the next episode, and on earlier ones again; on a part of them only where time runs out."""
        state = self.state
        config = self.config
        number = state.episode
        before = state.seconds
        began = self.clock()
        state.episode += 1  # an interrupted one is not begun again: what was learned from it is kept
        try:
            for episode, text in ((due, text) for due in config.due(number) for text in self.readings(due)):
                past = Past()
                for chunk in text:
                    self._update(chunk.to(torch.float32), past, min(state.seconds / seconds, 1.0))
                    state.tokens += chunk.ids_BT.numel() if episode == number else 0
                    if state.updates % config.check_every == 0:
                        self._check()
                    state.seconds = before + self.clock() - began
                    report(state)
                    if state.seconds >= seconds:
                        return
        finally:
            state.seconds = before + self.clock() - began

    def _update(self, chunk: Chunk, past: Past, done: float) -> None:
        state = self.state
        config = self.config
        dice = torch.Generator().manual_seed(config.seed * 1_000_003 + state.updates)
        places = chunk.ids_BT.shape[1] - config.steps + 1
        later_N = torch.randperm(places, generator=dice)[: max(1, int(places * config.anchors))].sort().values
        with torch_threads(self.threads):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.narrow):
                value = loss(self.subject.layer, self.head, chunk, past, later_N, config.steps, config.decay)
            value.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_([tensor for _, tensor in self.weights.trained()], 1.0)
            step(self.optimizers, config.rate(state.updates, done))
        state.updates += 1

    def _check(self) -> None:
        """Look at the held-out texts."""
        with torch_threads(self.threads):
            kept = self.heldout.greedy(self.subject, self.config.steps)
        self.state.history.append({"updates": self.state.updates, "seconds": self.state.seconds, "kept": kept})

    def detached(self) -> EagleHeadWeights:
        """Return the weights as they are now, for a file."""
        return replace(self.weights, **{name: tensor.detach() for name, tensor in self.weights.trained()})


def optimizers(matrices: list[Tensor], others: list[Tensor]) -> list[torch.optim.Optimizer]:
    """Return Muon for matrices, AdamW for others; one learning rate suits both (Liu et al. 2025, arXiv 2502.16982)."""
    return [
        torch.optim.Muon(matrices, lr=1.0, weight_decay=0.0, momentum=0.95, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=1.0, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def step(made: list[torch.optim.Optimizer], rate: float) -> None:
    """Take one step of all, at this learning rate, and forget the gradients."""
    for optimizer in made:
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Let torch have so many threads meanwhile: native kernels, with which it computes by turns, leave it one."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
