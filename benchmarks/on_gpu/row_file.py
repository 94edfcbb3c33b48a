"""A file of rows, which is whole after every row, so that a run that is cut off goes on where it was."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.on_gpu.piece import Piece, Row


class RowFile:
    """Rows of pieces, those of earlier runs among them."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._rows: list[Row] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []

    def find(self, piece: Piece) -> Row | None:
        """Return the row of a piece, if there is one."""
        return next((row for row in self._rows if (row["what"], row["shape"], row["context"]) == piece.key), None)

    def put(self, piece: Piece, row: Row) -> None:
        """Write a row, in the place of the one that the piece had."""
        old_row = self.find(piece)
        if old_row is None:
            self._rows.append(row)
        else:
            self._rows[self._rows.index(old_row)] = row
        self._path.parent.mkdir(parents=True, exist_ok=True)
        new_file = self._path.with_suffix(".new")
        new_file.write_text(json.dumps(self._rows, indent=1) + "\n", encoding="utf-8")
        new_file.replace(self._path)
