"""Workers, a file for each engine: `load` reads a model, and returns a function that makes a text of a turn.

Each runs by itself, in a process and perhaps with an interpreter of its own, so that neither threads nor versions of
one engine meet those of another. They import the engine that they are for, and but for that engine nothing of
triforce's dependencies.
"""
