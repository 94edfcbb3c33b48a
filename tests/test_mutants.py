"""The registry of planted faults: each still fits the code, and is noticed by the test that it names."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.helpers.mutants.mutation import Edit, Mutant, Swap, resolve
from tests.helpers.mutants.registry import MUTANTS, NATIVE, SLOW

ROOT = Path(__file__).parents[1]
PLANTED = (ROOT / "tests/helpers/mutants/planted.cpp").read_text(encoding="utf-8")
SANITIZE = (ROOT / "scripts/sanitize.sh").read_text(encoding="utf-8")


def test_mutant_names_are_unique() -> None:
    names = [mutant.name for mutant in MUTANTS]
    assert len(names) == len({*names}) > 80 and {*names} > SLOW


@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_mutant_edits_fit_the_source(mutant: Mutant) -> None:
    for edit in mutant.edits:
        edit.check()


@pytest.mark.parametrize("test", sorted({mutant.test for mutant in MUTANTS}))
def test_mutants_are_taken_by_the_test_they_name(test: str) -> None:
    """A test takes them with `caught_in(its own name)`, in its decorators or its body."""
    path, _, name = test.partition("::")
    code = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    (function,) = (node for node in code.body if isinstance(node, ast.FunctionDef) and node.name == name)
    calls = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
    assert any(ast.unparse(call) == f"caught_in({name!r})" for call in calls)


def test_edit_of_changed_source_is_refused() -> None:
    with pytest.raises(AssertionError, match="not once"):
        Edit("triforce.speculation.verification:rejection", ("no such line", "pass")).check()
    with pytest.raises(AttributeError):
        Swap("triforce.speculation.verification:no_such_function", lambda original: original).check()


def test_mutant_is_undone_after_its_test() -> None:
    target = "triforce.speculation.verification:rejection"
    owner, name = resolve(target)
    original = getattr(owner, name)
    with pytest.MonkeyPatch.context() as patch:
        Swap(target, lambda _: None).apply(patch, None)
        assert getattr(owner, name) is None
    assert getattr(owner, name) is original


def test_planted_native_bugs_are_those_registered() -> None:
    """`nothing` is the control that no sanitizer may find."""
    assert {*re.findall(r"^int (\w+)\(", PLANTED, re.M)} == {*NATIVE, "nothing"}
    assert {*re.findall(r"(?:must_find|call_planted) (\w+)", SANITIZE)} - {"nothing"} == {*NATIVE}
