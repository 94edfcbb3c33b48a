"""Other engines on the same checkpoint and prompts, each in a process of its own: `command` asks, `workers` answer.

The workers run with interpreters that may know nothing of triforce's dependencies, so they, and this file, import
nothing but the standard library, and the engine that they are for.
"""
