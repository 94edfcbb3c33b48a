"""Where the time of a token of plain decoding goes: device, sampler, host; and what an EAGLE head's states cost.

A GPU's kernels are asked for by name, so that a CPU rehearses all of it in Triton's interpreter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from unittest import mock

import numpy as np
from torch import Tensor

from benchmarks.on_gpu.piece import Names, Piece, Row, Setup
from triforce.backends import dispatch
from triforce.backends.cuda.graphs import GraphInputs, Graphs, Replay, shape_of
from triforce.backends.cuda.kv import TritonKV
from triforce.backends.cuda.model import DraftInputs, DraftShape, DrawnTokens, TritonModel, run_draft, run_pass
from triforce.backends.cuda.sampler import TritonSampling
from triforce.backends.decoder import Decoder
from triforce.backends.kernel_api import ForwardBatch, ForwardOutput, pages_for
from triforce.backends.token_sampler import make_noise
from triforce.bench.kernels import ids
from triforce.bench.synthetic import decode, fill, prefilled_batch
from triforce.eagle.head_files import default_state_layers
from triforce.engine.tier_builder import SpeculativeConfig
from triforce.interface.sampling_params import SamplingParams
from triforce.kvcache import FullView, PagePool
from triforce.ragged import ints
from triforce.speculation import Draft, Seeded, SequenceState

PARAMS = SamplingParams(temperature=0.6, top_p=0.9)
PASSES = 8
"""Passes that are timed together, and tokens of one graph."""
STATE_WIDTHS = (1, 8)


def parts(setup: Setup, names: Names, context: int) -> Iterator[Piece]:
    """A token in more and more of what the engine does, and several tokens in one graph."""
    for what, run in (
        ("token: replays back to back", _replays), ("token: replay, sampler, read-back", _drawn),
        ("token: pass of the decoder, sampler, read-back", _decoded), ("token: engine", _engine),
        ("token: several in one graph", _one_graph),
    ):  # fmt: skip
        yield Piece(what, names[0], context, partial(_by_kernels, run, setup, names, context))


def states(setup: Setup, names: Names, context: int) -> Iterator[Piece]:
    """Passes that keep no hidden states, and those of an EAGLE head: captured, and as the engine makes them."""
    for width in STATE_WIDTHS:
        for what, run in (
            ("no states", partial(_pass, width, False)), ("states, captured", partial(_pass, width, True)),
            ("states, as the engine makes them", partial(_noted, width)),
        ):  # fmt: skip
            yield Piece(
                f"full pass, width {width}, {what}", names[0], context,
                partial(_by_kernels, run, setup, names, context),
            )  # fmt: skip


def _by_kernels(run: Callable[[Setup, Names, int], Row], setup: Setup, names: Names, context: int) -> Row:
    """Measure with the kernels of a GPU, wherever that is."""
    with _interpreted(setup):
        return run(setup, names, context)


def _interpreted(setup: Setup) -> AbstractContextManager[object]:
    """As TRIFORCE_KERNELS=triton has it, where there is no GPU."""
    if setup.on_gpu:
        return nullcontext()
    return mock.patch.multiple(dispatch, native=None, requested="triton")


class PlainDecoding:
    """A text of random KV behind which one token after another could come: its view is never advanced."""

    def __init__(self, setup: Setup, names: Names, context: int) -> None:
        self.decoder = setup.models(names, context).target
        assert isinstance(self.decoder.model, TritonModel), "its kernels are those that are measured"
        self.model, self.device, self.graphs = self.decoder.model, setup.device, Graphs(setup.device)
        pool = PagePool(self.decoder.config, 1, pages_for(context + 64), self.decoder.dtype, setup.device)
        pool.reserve(0, context + 64)
        fill(pool, context - 16)
        self.view = FullView(pool, grain=0)
        assert isinstance(pool.kv, TritonKV)
        self.kv, vocabulary = pool.kv, self.decoder.config.vocab_size
        noise = Seeded(make_noise([1], [0], setup.device))
        self.sampling = TritonSampling([PARAMS], [0], vocabulary, noise, setup.device)
        self.live_B = np.ones(1, np.bool_)
        self.prefix = SequenceState(np.zeros((1, context), np.int64), ints([context - 15]))

    def pass_of(self, width: int, layers: tuple[int, ...] = ()) -> Callable[[], Tensor]:
        """Return a pass that is captured when it is first called; what its host fills in stays as it is."""
        batch, at_BJ = self._batch(width), np.arange(width)[None]
        inputs = GraphInputs(shape_of(1, width, width, batch, padded=True), self.device)
        inputs.fill(ids(width), at_BJ, batch)
        run = partial(run_pass, self.model, self.kv, inputs, None, layers)
        replay: Replay[GraphInputs, ForwardOutput] = Replay(inputs)
        return lambda: self.graphs.run(replay, run).logits_BJV

    def tokens_of(self, count: int) -> Callable[[], Tensor]:
        """Return `count` tokens of plain decoding in one graph, like a draft's: its outcome stays on the device."""
        batch = self._batch(count)
        (layers, lists), *_ = batch.views
        batch = replace(batch, views=[(layers, replace(lists, counts=[1]))], observe=False)
        draws = self.sampling.draws(0, count, self.live_B)
        assert draws, "nothing changes its logits"
        inputs = DraftInputs(DraftShape(shape_of(1, 1, 1, batch, padded=True), count, True, 0), self.device)
        inputs.fill(batch, (self.prefix.ids_BS, self.prefix.lengths_B, self.live_B), draws)
        run = partial(run_draft, self.model, self.kv, inputs)
        replay: Replay[DraftInputs, DrawnTokens] = Replay(inputs)
        return lambda: self.graphs.run(replay, run).drawn_2KB

    def draw(self, logits_BJV: Tensor) -> None:
        """Draw a token as the engine does, for which the host waits."""
        self.sampling.verify(Draft.empty(1, 0), logits_BJV, self.prefix, self.live_B, 0)

    def logits(self) -> Tensor:
        """Compute logits behind the next token; its pass can be made again."""
        logits_BJV: Tensor = self.decoder.run(ids(1), self.kv, self.view.begin(ints([1]), 1), None).logits_BJV
        return logits_BJV

    def recorded(self, width: int) -> None:
        """Make a pass that the view keeps what it observed of, and forget its tokens."""
        before_B = self.view.lengths_B.copy()
        self.decoder.observe(ids(width), ints([width]), self.view, None, _layers(self.decoder))
        self.view.rewind(before_B)

    def _batch(self, width: int) -> ForwardBatch:
        batch = self.view.begin(ints([width]), width)
        self.kv.prepare(batch, width)
        return batch


def _replays(setup: Setup, names: Names, context: int) -> Row:
    replay = PlainDecoding(setup, names, context).pass_of(1)
    replay()
    return _times(setup, lambda: [replay() for _ in range(_repeats(setup))], _repeats(setup))


def _drawn(setup: Setup, names: Names, context: int) -> Row:
    plain = PlainDecoding(setup, names, context)
    replay = plain.pass_of(1)
    return _waited(setup, lambda: plain.draw(replay()))


def _decoded(setup: Setup, names: Names, context: int) -> Row:
    plain = PlainDecoding(setup, names, context)
    return _waited(setup, lambda: plain.draw(plain.logits()))


def _engine(setup: Setup, names: Names, context: int) -> Row:
    """Steps of a batch of one text, by its own clock."""
    count = 2 * PASSES if setup.on_gpu else 2
    batch = prefilled_batch(setup.models(names, context), "ar", SpeculativeConfig(2, 6), context, count)
    made = decode(batch, {}, 0, count)
    return _row(made.seconds / made.tokens)


def _one_graph(setup: Setup, names: Names, context: int) -> Row:
    plain, count = PlainDecoding(setup, names, context), max(2, _repeats(setup))
    several = plain.tokens_of(count)
    several()
    took = setup.clock.seconds(lambda: several().cpu(), 5 if setup.on_gpu else 1) / count
    return _times(setup, several, count) | {"seconds": took, "tokens": count}


def _pass(width: int, kept: bool, setup: Setup, names: Names, context: int) -> Row:
    plain = PlainDecoding(setup, names, context)
    run = plain.pass_of(width, _layers(plain.decoder) if kept else ())
    run()
    return _times(setup, run, 1)


def _noted(width: int, setup: Setup, names: Names, context: int) -> Row:
    plain = PlainDecoding(setup, names, context)
    return _waited(
        setup,
        partial(plain.recorded, width),
    )


def _layers(decoder: Decoder) -> tuple[int, ...]:
    return default_state_layers(decoder.config.layers)


def _repeats(setup: Setup) -> int:
    return PASSES if setup.on_gpu else 1


def _times(setup: Setup, call: Callable[[], object], passes: int) -> Row:
    """Seconds of one of `passes` passes: time that the host waits, and time that the device is busy."""
    if not setup.on_gpu:
        return _row(setup.clock.seconds(call, 1) / passes) | {"device_seconds": None}
    return _row(setup.clock.seconds(call, 10) / passes) | {
        "device_seconds": setup.clock.device_seconds(call, 10) / passes
    }


def _waited(setup: Setup, call: Callable[[], object]) -> Row:
    """Seconds of a call, one behind the other, as the host waits for them."""
    repeats = _repeats(setup)
    return _row(setup.clock.seconds(lambda: [call() for _ in range(repeats)], 5 if setup.on_gpu else 1) / repeats)


def _row(took: float) -> Row:
    return {"seconds": took, "fraction_of_limit": None, "speedup": None}
