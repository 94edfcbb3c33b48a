"""Frozen dataclasses with slots that raise one error for every assignment."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from typing import NoReturn, TypeVar

T = TypeVar("T")


def fields_frozen(kind: type[T]) -> type[T]:
    """Make a frozen dataclass with slots raise FrozenInstanceError for names that are no fields, too.

    The methods that `dataclass` generates raise a TypeError about `super` for such names. Their `super` refers to the
    class as it was before `dataclass` replaced it by one with slots.
    """

    def assign(self: T, name: str, value: object) -> NoReturn:
        raise FrozenInstanceError(f"cannot assign to field {name!r}")

    def delete(self: T, name: str) -> NoReturn:
        raise FrozenInstanceError(f"cannot delete field {name!r}")

    type.__setattr__(kind, "__setattr__", assign)
    type.__setattr__(kind, "__delattr__", delete)
    return kind
