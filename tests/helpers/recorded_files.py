"""Files in the history of this checkout, read from git in a few calls."""

from __future__ import annotations

import subprocess
from functools import cache
from io import BytesIO
from pathlib import Path

ROOT = Path(__file__).parents[2]


def git(*arguments: str, stdin: str = "") -> bytes:
    """Return git's output. Raises CalledProcessError if git fails."""
    command = ["git", "--no-optional-locks", "-C", str(ROOT), *arguments]
    return subprocess.run(command, input=stdin.encode(), capture_output=True, check=True).stdout


def lacking(commit: str) -> str | None:
    """Return why the history up to a commit cannot be read here, None if it can."""
    try:
        if git("rev-parse", "--is-shallow-repository").strip() != b"false":
            return "the history of this checkout is cut off"
        git("merge-base", "--is-ancestor", commit, "HEAD")
    except OSError:
        return "there is no git here"
    except subprocess.CalledProcessError:
        return f"this is no checkout with {commit} in its history"
    return None


def versions(folder: str) -> dict[str, dict[str, str]]:
    """Return the texts of each file in a folder by the commits that changed it, the first one first."""
    log = git("log", "--full-history", "--topo-order", "--reverse", "--no-renames", "--format=commit %H",
              "--name-only", "--diff-filter=AM", "HEAD", "--", folder)  # fmt: skip
    changes = list[tuple[str, str]]()
    commit = ""
    for line in filter(None, log.decode().splitlines()):
        if line.startswith("commit "):
            commit = line.split()[1][:8]
        else:
            changes.append((commit, line))
    texts_by_path: dict[str, dict[str, str]] = {}
    for (commit, path), text in zip(changes, contents([f"{commit}:{path}" for commit, path in changes]), strict=True):
        texts_by_path.setdefault(path, {})[commit] = text or ""
    return texts_by_path


def contents(names: list[str]) -> list[str | None]:
    """Return the text of each `commit:path`, None if it does not exist."""
    printed = BytesIO(git("cat-file", "--batch", stdin="".join(f"{name}\n" for name in names)))
    texts = []
    for _ in names:
        *_, size = printed.readline().split()
        texts.append(None if size == b"missing" else printed.read(int(size)).decode())
        if size != b"missing":
            printed.readline()
    return texts


class History:
    """Commits that led to HEAD, by eight digits of their hashes."""

    def __init__(self, parents: dict[str, list[str]]) -> None:
        self.head = next(iter(parents), "")
        self._parents = parents
        self.before, self.text = cache(self._before), cache(self._text)

    @classmethod
    def read(cls) -> History:
        """Return the history of this checkout."""
        lines = git("log", "--format=%H %P", "HEAD").decode().splitlines()
        return cls({line[:8]: [name[:8] for name in line.split()[1:]] for line in lines})

    def _before(self, commit: str) -> frozenset[str]:
        """Return a commit and its ancestors, an empty set if it is no ancestor of HEAD."""
        ancestors = set[str]()
        pending = [commit] if commit in self._parents else []
        while pending:
            if (name := pending.pop()) not in ancestors:
                ancestors.add(name)
                pending += self._parents.get(name, [])
        return frozenset(ancestors)

    def _text(self, commit: str, path: str) -> str | None:
        """Return the text of a file at a commit, None if it did not exist."""
        return contents([f"{commit}:{path}"])[0]
