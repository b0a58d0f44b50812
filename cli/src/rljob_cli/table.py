"""Formats tables for the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text


def table(head: Sequence[str], rows: Sequence[Sequence[str | Text]], indent: str = "") -> list[Text]:
    """The lines of a table. Each column is as wide as its widest cell, and no line is wrapped."""
    widths = [max(len(name), *(len(row[index]) for row in rows), 0) for index, name in enumerate(head)]
    lines = []
    for cells in ([Text(name, "dim") for name in head], *rows):
        line = Text(indent)
        for cell, width in zip(cells, widths, strict=True):
            line.append(cell)
            line.append(" " * (width - len(cell) + 2))
        line.rstrip()
        lines.append(line)
    return lines
