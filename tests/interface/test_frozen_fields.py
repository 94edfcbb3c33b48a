"""Public records refuse every change in the same words."""

from __future__ import annotations

import copy
import pickle
from dataclasses import FrozenInstanceError, fields, is_dataclass
from typing import Any

import pytest

import triforce
from triforce.interface.explain import BreakEvenPoint

PUBLIC = [getattr(triforce, name) for name in triforce.__all__]
FROZEN: list[Any] = [BreakEvenPoint, *(kind for kind in PUBLIC if is_dataclass(kind) and kind.__hash__)]


@pytest.mark.parametrize("kind", FROZEN)
def test_frozen_record_refuses_changes(kind: Any) -> None:
    record = object.__new__(kind)
    for name in (fields(kind)[0].name, "words"):
        with pytest.raises(FrozenInstanceError, match=f"^cannot assign to field '{name}'$"):
            setattr(record, name, 1)
        with pytest.raises(FrozenInstanceError, match=f"^cannot delete field '{name}'$"):
            delattr(record, name)


def test_frozen_record_is_copied_and_pickled() -> None:
    params = triforce.SamplingParams(top_k=3)
    assert copy.deepcopy(params) == params == pickle.loads(pickle.dumps(params))
