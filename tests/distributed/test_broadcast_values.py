"""Values that ranks broadcast: they arrive as they were, and bytes from elsewhere run no code."""

from __future__ import annotations

import os
import pickle
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from triforce.distributed.broadcast_values import dump, load
from triforce.interface.grammar import Grammar
from triforce.interface.sampling_params import SamplingParams
from triforce.planner.controller import Cadence, RegretAccount
from triforce.planner.forecast import Cause, Choice, State
from triforce.planner.plan import PLAIN
from triforce.server.engine_client import GenerationRequest
from triforce.server.engine_thread import StepCommands

SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}
PARAMS = SamplingParams(
    seed=3, logit_bias={7: 0.5}, stop=["end"], stop_token_ids=[1, 2], grammar=Grammar.json(SCHEMA), max_tokens=9
)


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        -(2**70),
        0.1,
        float("inf"),
        "text \N{SNOWMAN}\0",
        b"bytes",
        (1, [2, (3,)], {"a": {4}, 5: None}, frozenset({6})),
        np.float64(0.1),
        np.float32(0.1),
        np.int64(-7),
        np.bool_(True),
        PARAMS,
        PLAIN,
        (Choice(rate=np.float64(2.5), state=State.PLAIN), RegretAccount(0.5), Cadence(1.0, _ngram_hits=2)),
        State.GUARDED,
        Cause.LOSS,
        StepCommands([1, 2], [(3, GenerationRequest([4, 5], PARAMS, "ar", None))]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_values_arrive_as_they_were(value: Any) -> None:
    received = load(dump(value))
    assert received == value and type(received) is type(value)


def test_shared_parts_stay_shared() -> None:
    part = [1]
    first_part, second_part = load(dump((part, part)))
    assert first_part is second_part


class Command:
    """A value that runs a command where it is unpickled."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize("function", [os.system, eval, exec, open, getattr, __import__, Path.unlink])
def test_bytes_of_a_stranger_run_nothing(function: Any, tmp_path: Path) -> None:
    data = pickle.dumps(Command(function, "touch " + str(tmp_path / "made")))
    with pytest.raises(pickle.UnpicklingError, match="is not a value that ranks broadcast"):
        load(data)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "name",
    [
        "triforce.distributed.spawn start",  # a function
        "triforce.distributed.spawn subprocess.Popen",  # a name within a name
        "triforce.distributed.spawn Path",  # imported there
        "triforce.distributed.socket_group SocketGroup",  # no dataclass
        "triforce.distributed.spawn nothing",
    ],
)
def test_other_names_of_triforce_are_refused(name: str) -> None:
    module, _, attribute = name.partition(" ")
    encoded = b"".join(pickle.SHORT_BINUNICODE + bytes([len(part)]) + part.encode() for part in (module, attribute))
    with pytest.raises(pickle.UnpicklingError, match="is not a value that ranks broadcast"):
        load(pickle.PROTO + bytes([4]) + encoded + pickle.STACK_GLOBAL + pickle.STOP)


def test_numbers_of_numpy_are_no_way_to_objects() -> None:
    """An object of numpy may be anything."""
    data = dump(np.float64(0.5)).replace(b"<f8", b"|O8")
    with pytest.raises((pickle.UnpicklingError, TypeError)):
        load(data)


@pytest.mark.parametrize("value", [Fraction(1, 2), np.zeros(2), Path("a"), os.system, RuntimeError("x"), object(), int])
def test_other_types_are_refused_by_their_sender(value: Any) -> None:
    with pytest.raises(pickle.PicklingError, match="is not broadcast"):
        dump([value])
