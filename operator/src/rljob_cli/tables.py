"""Columns of text."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text


def table(head: Sequence[str], rows: Sequence[Sequence[Text]], indent: str = "") -> list[Text]:
    """Columns as wide as their widest cell; the last one has no width, so that it can be long."""
    widths = [max(len(name), *(len(row[at]) for row in rows), 0) for at, name in enumerate(head)]
    lines = []
    for cells in ([Text(name, "dim") for name in head], *rows):
        line = Text(indent)
        for cell, width in zip(cells, widths, strict=True):
            line.append_text(cell)
            line.append(" " * (width - len(cell) + 2))
        line.rstrip()
        lines.append(line)
    return lines
