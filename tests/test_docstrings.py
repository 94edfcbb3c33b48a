"""Docstrings begin with a verb or with the noun that the thing is; shapes and errors are stated.

Only what can be decided from code is: see tests/helpers/docstrings.py.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.helpers import docstrings, house

ROOT = Path(__file__).parents[1]
ERRORS = frozenset({"ApiError", "CacheError", "ModelError", "RankError", "RequestError"})


def found(text: str) -> set[str]:
    """Kinds of fault in a module of this text."""
    return {kind for kind, _ in docstrings.faults({"t": ast.parse(text)}, ERRORS)}


def test_docstrings_of_package_have_no_fault() -> None:
    assert list(docstrings.faults(house.modules(ROOT / "src" / "triforce"), ERRORS)) == []


@pytest.mark.parametrize("word", ["What", "Those", "And", "It", "Of", "How", "`where`"])
def test_refused_first_word_is_found_wherever_it_stands(word: str) -> None:
    docstring = f'"""{word} it is."""'
    for text in (
        docstring,
        f"class C:\n    {docstring}",
        f"def _f():\n    {docstring}",
        f"class _C:\n    async def f(self):\n        {docstring}",
    ):
        assert found(text) == {"first word"}
    for good in ("Whether it is.", "Return it.", "The pages of a row.", "A pool.", "One row."):
        assert found(f'"""{good}"""') == set()


@pytest.mark.parametrize("kind", ["Array", "Tensor"])
def test_shape_is_asked_of_public_functions_that_return_a_tensor(kind: str) -> None:
    head = f"def f(x) -> {kind}:\n    "
    assert found(f'{head}"""Return logits."""\n    return x') == {"shape"}
    for text in (
        f'{head}"""Return logits (B, J, V)."""\n    return x',
        f'{head}"""Return lengths, int64 (B)."""\n    return x',
        f'{head}"""Return logits."""\n    ...',
        f'def _f(x) -> {kind}:\n    """Return logits."""\n    return x',
        'def f(x) -> int:\n    """Return logits."""\n    return x',
    ):
        assert found(text) == set(), text


def test_errors_that_a_public_function_raises_are_asked_for() -> None:
    head = 'def f(x):\n    """Check it.'
    body = "\n    raise CacheError(x)"
    assert found(f'{head}"""{body}') == {"raises"}
    assert found(f'{head} Raises RequestError."""{body}') == {"raises"}
    for text in (
        f'{head} Raises CacheError."""{body}',
        f'{head} Raises TriforceError."""{body}',
        f'{head}"""\n    raise ValueError(x)',
        f'{head}"""\n    raise',
    ):
        assert found(text) == set(), text
