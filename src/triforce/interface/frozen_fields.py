"""Frozen dataclasses with slots that refuse every change in the same words."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from typing import NoReturn, TypeVar

T = TypeVar("T")


def fields_frozen(kind: type[T]) -> type[T]:
    """Have a frozen dataclass with slots refuse names that are no fields, too, with FrozenInstanceError.

    What dataclasses make for these looks them up in the class without slots, and ends in a TypeError about `super`.
    """

    def assign(self: T, name: str, value: object) -> NoReturn:
        raise FrozenInstanceError(f"cannot assign to field {name!r}")

    def delete(self: T, name: str) -> NoReturn:
        raise FrozenInstanceError(f"cannot delete field {name!r}")

    type.__setattr__(kind, "__setattr__", assign)
    type.__setattr__(kind, "__delattr__", delete)
    return kind
