"""Typed values of a JSON object. Errors for a wrong type or range name the field."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from reprlib import Repr
from typing import Any

from triforce.errors import ModelError

LARGEST_SIZE = 2**31 - 1
"""Largest integer that is accepted as a size."""
MOST_LAYERS = 10_000
"""Largest accepted number of layers."""
MOST_CHANNELS = 1 << 16
"""Largest accepted head size."""
LARGEST_NUMBER = 1e12
"""Largest number that is accepted as a factor."""
_SHORT = Repr()
_SHORT.maxlevel = 3
_SHORT.maxdict = 8
_SHORT.maxlist = 8
_SHORT.maxstring = _SHORT.maxlong = _SHORT.maxother = 80


class Fields:
    """Fields of one JSON object in a file. A `null` counts as a missing field.

    `source` names the file and `prefix` the object inside it, both for messages.
    """

    def __init__(self, values: Mapping[str, Any], source: str, prefix: str = "") -> None:
        self._values = values
        self._source = source
        self._prefix = prefix

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def get(self, name: str) -> Any:
        return self._values.get(name)

    def integer(self, name: str, default: int | None = None, minimum: int = 1, maximum: int = LARGEST_SIZE) -> int:
        """Return an integer from `minimum` to `maximum`. Raises ModelError, as all methods with a type or range do."""
        value = self._or(name, default)
        if type(value) is not int or not minimum <= value <= maximum:
            raise self.refusal(name, [f"whole numbers from {minimum} to {maximum}"])
        return value

    def number(
        self, name: str, default: float | None = None, minimum: float = 1.0, maximum: float = LARGEST_NUMBER
    ) -> float:
        """Return a number from `minimum` to `maximum`. Raises ModelError."""
        value = self._or(name, default)
        if type(value) not in (int, float) or not minimum <= value <= maximum:
            raise self.refusal(name, [f"numbers from {minimum:g} to {maximum:g}"])
        return float(value)

    def flag(self, name: str, default: bool | None = None) -> bool:
        value = self._or(name, default)
        if type(value) is not bool:
            raise self.refusal(name, ["true", "false"])
        return value

    def numbers(self, name: str, count: int) -> list[float]:
        """Return a list of `count` numbers above 0. Raises ModelError."""
        values = self.get(name)
        fits = isinstance(values, list) and len(values) == count
        if not fits or not all(type(value) in (int, float) and 0 < value <= LARGEST_NUMBER for value in values):
            raise self.refusal(name, [f"lists of {count} numbers above 0"])
        return [float(value) for value in values]

    def nested(self, name: str) -> Fields:
        """Return the fields of a nested object; no fields if it is missing. Raises ModelError."""
        value = self._or(name, {})
        if not isinstance(value, dict):
            raise self.refusal(name, ["objects"])
        return Fields(value, self._source, f"{self._prefix}{name}.")

    def with_values(self, **values: Any) -> Fields:
        """Return a copy where `values` that are not None replace fields."""
        specified_values = {name: value for name, value in values.items() if value is not None}
        return Fields({**self._values, **specified_values}, self._source, self._prefix)

    def with_defaults(self, defaults: Mapping[str, Any]) -> Fields:
        """Return a copy with `defaults` for missing fields. Fields that are `null` stay `null`."""
        return Fields({**defaults, **self._values}, self._source, self._prefix)

    def require(self, name: str, accepted: Iterable[object]) -> None:
        """Raise ModelError unless the field is missing or has a value in `accepted`."""
        if self.get(name) not in (None, *accepted):
            raise self.refusal(name, accepted)

    def refusal(self, name: str, accepted: Iterable[object], suffix: str = "") -> ModelError:
        """Return the error that names the field, its value and the accepted values."""
        choices = ", ".join(map(str, accepted)) or "none"
        value = _SHORT.repr(self.get(name))
        return ModelError(
            f"{self._source}: {self._prefix}{name} = {value} is not supported (supported: {choices}){suffix}"
        )

    def _or(self, name: str, default: Any) -> Any:
        value = self.get(name)
        return default if value is None else value
