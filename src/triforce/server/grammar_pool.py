"""GrammarPool: grammars of requests are compiled in turns, apart from the engine, and given up with their requests."""

from __future__ import annotations

from functools import partial

from triforce.interface.grammar import Grammar
from triforce.server.shared_slots import SharedSlots
from triforce.structured_output.compiler import CompiledGrammar, GrammarCompiler, GrammarTrial

PORTION = 1 / 4
"""Of the processors."""


class GrammarPool:
    """Compiles grammars for one model. share: grammars of one key that are compiled or wait at a time."""

    def __init__(self, compiler: GrammarCompiler, share: int) -> None:
        self._compiler, self._slots = compiler, SharedSlots("grammars", PORTION, share)

    async def compile(self, grammar: Grammar, key: str) -> CompiledGrammar:
        """Return a grammar compiled, at once if it was before. Raises RequestError, or ApiError beyond the share."""
        if known := self._compiler.known(grammar):
            return known
        trial = GrammarTrial(grammar)
        return await self._slots.run(key, partial(self._compiler.compile, grammar, trial), trial.cancel)
