"""Prints the registry: python -m tests.helpers.mutants"""

from tests.helpers.mutants.registry import table

rows = list(table())
for name, target, test in rows:
    print(f"{name}\n    changes  {target}\n    noticed  {test}")
print(f"{len(rows)} mutants")
