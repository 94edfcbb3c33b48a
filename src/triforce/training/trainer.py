"""Trainer: distils a target into an EAGLE head for a given time. A training can be interrupted and resumed.

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

from triforce.arrays import to_host
from triforce.backends.torch.tensors import as_tensor
from triforce.eagle.head import EagleHeadWeights, shapes
from triforce.eagle.head_files import new_config, write_atomically
from triforce.eagle.torch_passes import EagleHeadLayer
from triforce.errors import ModelError
from triforce.llm import LLM
from triforce.training.distillation import Heldout, OutputHead, PastEntries, Subject, loss
from triforce.training.episodes import Chunk, EpisodeReader, Episodes, Texts
from triforce.training.initial_weights import Sample, add_induction, initial_weights, last_norm
from triforce.training.training_config import TrainingConfig

FILE = "training.pt"


@dataclass
class TrainingState:
    """Weights by field, the state of each optimizer, and the progress of a training.

    facts: must be equal when the training is resumed. episode: number of the next episode. seconds: time spent.
    history: shares of draft tokens accepted on held-out texts, with the updates and seconds of each evaluation.
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
        """Write the state's file in a folder. Raises RequestError if the disk is full; the old file stays intact."""
        data = io.BytesIO()
        torch.save({name: getattr(self, name) for name in self.__dataclass_fields__}, data)
        write_atomically(folder / FILE, data.getbuffer())

    @staticmethod
    def load(folder: Path, facts: dict[str, Any]) -> TrainingState | None:
        """Read a folder's state file; None if there is none. Raises ModelError for a damaged file, or other facts."""
        file = folder / FILE
        if not file.exists():
            return None
        try:
            state = TrainingState(**torch.load(file, map_location="cpu", weights_only=True))
        except Exception as error:  # a damaged file raises nearly any exception
            raise ModelError(f"{file} is damaged; remove it to begin anew") from error
        if state.facts != facts:
            changed = ", ".join(name for name in facts if state.facts.get(name) != facts[name])
            raise ModelError(f"{file} is of a training with other {changed}; name another folder, or remove the file")
        return state


Clock = Callable[[], float]
"""Clock in seconds, with any zero."""
Report = Callable[[TrainingState], None]
"""Callback that receives the state after each update."""


class Trainer:
    """Trains one draft. folder: where the state is saved. threads: torch's threads during an update.

    use_bfloat16: products are computed in bfloat16. Raises RequestError for too few texts, and ModelError for a saved
    state of another training.
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
        use_bfloat16: bool = False,
    ) -> None:
        config = replace(config, width=min(config.width, llm.target.config.context))
        self.llm = llm
        self.folder = folder
        self.config = config
        self.clock = clock
        self.threads = threads
        self.use_bfloat16 = use_bfloat16
        self.decoder = llm.target.decoder
        target = llm.target.config
        self.texts = Texts.of(llm, texts, config.width)
        self.episodes = Episodes(llm, self.texts, config)
        self.draft = new_config(target, config.choices_of(target))
        self.reader = EpisodeReader(self.decoder, self.draft.state_layers, self.episodes, config)
        digest = hashlib.sha256(self.texts.trained_N.numpy().tobytes()).hexdigest()
        facts = {"target": llm.target.fingerprint, "texts": digest, "numbers": repr(asdict(config))}
        facts |= {"shapes": repr(shapes(self.draft))}
        saved_state = TrainingState.load(folder, facts)
        self.resumed = saved_state is not None
        self.state = saved_state or self._new_state(facts)
        self.weights = self._weights()
        self.optimizers = self._optimizers()
        rows_MC = as_tensor(self.decoder.head_rows(self.weights.tokens_M.numpy()))
        rows_MC = rows_MC.bfloat16() if use_bfloat16 else rows_MC
        norm_C = last_norm(llm.target)
        cap = target.architecture.logit_cap
        self.head = OutputHead(norm_C, target.norm_eps, rows_MC, cap, config.greedy)
        self._heldout: Heldout | None = None

    def run(self, seconds: float, report: Report = lambda state: None) -> None:
        """Train until `seconds` are spent in all, and take at least one update.

        The state is saved after each episode, and on KeyboardInterrupt.
        """
        try:
            while self.state.seconds < seconds or not self.state.updates:
                self._episode(seconds, report)
                self.save()
        except KeyboardInterrupt:
            self.save()
            raise

    def save(self) -> None:
        """Save the state in the folder. Raises RequestError if the disk is full."""
        self.state.optimizers = [optimizer.state_dict() for optimizer in self.optimizers]
        self.state.save(self.folder)

    @property
    def subject(self) -> Subject:
        """The draft with its current weights."""
        return Subject(EagleHeadLayer(self.draft, self.weights), self.head, self.weights.tokens_M)

    @property
    def heldout(self) -> Heldout:
        """The held-out texts, and the target's own answers to some of them, at temperature 0."""
        if self._heldout is None:
            config = self.config
            generator = torch.Generator().manual_seed(self.config.seed)
            ids_N = self.texts.heldout_N
            rows = config.heldout_rows
            texts = self.texts.windows(ids_N, rows, config.width, generator)
            answers = self.episodes.answers(ids_N, config.width, config.seed, (0.0,), rows, generator)
            texts_by_kind = {"texts": texts, "answers": answers}
            self._heldout = Heldout(self.decoder, self.draft.state_layers, texts_by_kind)
        return self._heldout

    def _new_state(self, facts: dict[str, Any]) -> TrainingState:
        start = self.clock()
        seed = self.config.seed
        tokens_M = self.texts.frequent(self.draft.draft_vocab_size, self.draft.vocab_size)
        weights = initial_weights(self.llm.target, self.draft, seed)
        sample = self._sample(tokens_M)
        with torch_threads(self.threads):
            add_induction(weights, self.draft, sample, seed)
        return TrainingState(facts, weights, tokens_M, seconds=self.clock() - start)

    def _sample(self, tokens_M: Tensor) -> Sample:
        config = self.config
        generator = torch.Generator().manual_seed(self.config.seed)
        ids_BT = self.texts.windows(self.texts.trained_N, config.rows * config.groups, config.width, generator)
        chunks = [chunk.to(torch.float32) for text in self.reader.texts(ids_BT) for chunk in text]
        states_NX = torch.cat([chunk.states_BTX[:, 1:].flatten(0, 1) for chunk in chunks])
        embeddings_NC = torch.cat([chunk.embeddings_BTC[:, :-1].flatten(0, 1) for chunk in chunks])
        choices_MC = as_tensor(self.decoder.model.embed(tokens_M.numpy())).float()
        head_MC = as_tensor(self.decoder.head_rows(tokens_M.numpy()))
        return Sample(states_NX, embeddings_NC, choices_MC, head_MC)

    def _weights(self) -> EagleHeadWeights:
        """Return the state's tensors as trainable weights. Updates change them in place."""
        trained_weights = {name: tensor.requires_grad_() for name, tensor in self.state.weights.items()}
        return EagleHeadWeights(**trained_weights, tokens_M=self.state.tokens_M)

    def _optimizers(self) -> list[torch.optim.Optimizer]:
        norms = [
            tensor for name, tensor in self.weights.trained_tensors() if name.endswith("norm_C") or "norm_S" in name
        ]
        matrices = [tensor for _, tensor in self.weights.trained_tensors() if not any(tensor is norm for norm in norms)]
        weight_optimizers = optimizers(matrices, norms)
        for optimizer, state in zip(weight_optimizers, self.state.optimizers, strict=False):
            optimizer.load_state_dict(state)
        return weight_optimizers

    def _episode(self, seconds: float, report: Report) -> None:
        """Train on the next episode and repeat earlier ones. Stop in the middle when the time is up."""
        state = self.state
        config = self.config
        number = state.episode
        earlier_seconds = state.seconds
        start = self.clock()
        state.episode += 1  # an interrupted episode is not restarted: its updates are kept
        try:
            for episode, text in ((due, text) for due in config.due(number) for text in self.reader(due)):
                past = PastEntries()
                for chunk in text:
                    self._update(chunk.to(torch.float32), past, min(state.seconds / seconds, 1.0))
                    state.tokens += chunk.ids_BT.numel() if episode == number else 0
                    if state.updates % config.check_every == 0:
                        self._evaluate()
                    state.seconds = earlier_seconds + self.clock() - start
                    report(state)
                    if state.seconds >= seconds:
                        return
        finally:
            state.seconds = earlier_seconds + self.clock() - start

    def _update(self, chunk: Chunk, past: PastEntries, time_share: float) -> None:
        state = self.state
        config = self.config
        generator = torch.Generator().manual_seed(config.seed * 1_000_003 + state.updates)
        position_count = chunk.ids_BT.shape[1] - config.steps + 1
        continued_N = (
            torch.randperm(position_count, generator=generator)[: max(1, int(position_count * config.anchors))]
            .sort()
            .values
        )
        with torch_threads(self.threads):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.use_bfloat16):
                value = loss(self.subject.layer, self.head, chunk, past, continued_N, config.steps, config.decay)
            value.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_([tensor for _, tensor in self.weights.trained_tensors()], 1.0)
            step(self.optimizers, config.rate(state.updates, time_share))
        state.updates += 1

    def _evaluate(self) -> None:
        """Evaluate on the held-out texts and append the shares to the history."""
        with torch_threads(self.threads):
            shares = self.heldout.greedy_shares(self.subject, self.config.steps)
        self.state.history.append({"updates": self.state.updates, "seconds": self.state.seconds, "kept": shares})

    def detached(self) -> EagleHeadWeights:
        """Return the current weights as host arrays, to be written to a file."""
        arrays = {name: to_host(tensor) for name, tensor in self.weights.trained_tensors()}
        return replace(self.weights, **arrays, tokens_M=to_host(self.weights.tokens_M))


def optimizers(matrices: list[Tensor], vectors: list[Tensor]) -> list[torch.optim.Optimizer]:
    """Return Muon for matrices, AdamW for vectors. One learning rate suits both (Liu et al. 2025, arXiv 2502.16982)."""
    return [
        torch.optim.Muon(matrices, lr=1.0, weight_decay=0.0, momentum=0.95, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(vectors, lr=1.0, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def step(weight_optimizers: list[torch.optim.Optimizer], rate: float) -> None:
    """Take one step of each optimizer at this learning rate, and clear the gradients."""
    for optimizer in weight_optimizers:
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Give torch `count` threads inside the context.

    Outside it torch has one thread, because the threads of native kernels alternate with those of torch.
    """
    earlier_count = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(earlier_count)
