"""The pages of the documentation as data: their links, their code, and their commands with what these print.

A block of the language `console` holds commands after `$` and below each what it prints. `...` stands for lines that are
left out. A block after "Save this as `NAME`" is a file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).parents[3]
OMITTED = "..."
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_FILE = re.compile(r"ave this as `([\w.]+)`[^`]*\n\n```\w+\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_VARYING = (
    (re.compile(r"^\d\d:\d\d:\d\d "), ""),
    (re.compile(r"\S*\bruns/"), "runs/"),
    (re.compile(r"\d{4}-\d\d-\d\dT[\d:]+Z"), "TIME"),
    (re.compile(r"\d+ min \d+ s|\b(\d+[dhms])+\b"), "AGE"),
    (re.compile(r"\d[\d,.]*"), "N"),
    (re.compile(r"[━─ ]+"), " "),
)
"""What differs between two runs of the same command, or between two terminals."""


@dataclass(frozen=True)
class Shown:
    """A command of a page, and what the page says that it prints."""

    command: str
    output: tuple[str, ...]

    @property
    def words(self) -> list[str]:
        """The command's words; none of the pages' commands quotes a blank."""
        return self.command.split()


def pages() -> list[Path]:
    """All pages that people read: those of the repository's top, of docs/, and beside programs."""
    folders = ("docs", "e2e", "examples", "bench", "charts", "images")
    return [*sorted(REPOSITORY.glob("*.md")), *(path for name in folders for path in sorted((REPOSITORY / name).rglob("*.md")))]


def blocks(page: Path, language: str) -> list[str]:
    """The code of a page in one language."""
    return [text for name, text in _BLOCK.findall(page.read_text()) if name == language]


def saved_files(page: Path) -> dict[str, str]:
    """The files that a page asks its reader to save, by name."""
    return dict(_FILE.findall(page.read_text()))


def shown_commands(page: Path) -> Iterator[Shown]:
    """The commands of a page's console blocks, in order."""
    for block in blocks(page, "console"):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, *output = part.rstrip("\n").split("\n")
            yield Shown(command, tuple(output))


def shape(line: str) -> str:
    """A line without numbers, times, folders and widths of columns."""
    for pattern, replacement in _VARYING:
        line = pattern.sub(replacement, line)
    return line.strip()


def first_missing(shown: Shown, printed: str) -> str | None:
    """The first line of the page that the command did not print, after those before it; None if all are there.

    Lines follow each other as on the page, and others may stand between two of them only where the page says `...`.
    """
    rest = [shape(line) for line in printed.splitlines() if line.strip()]
    may_skip = False
    for line in shown.output:
        if line == OMITTED:
            may_skip = True
        elif line.strip():
            places = [index for index, text in enumerate(rest) if text == shape(line)]
            if not places or (places[0] > 0 and not may_skip):
                return line
            rest, may_skip = rest[places[0] + 1 :], False
    return None if not rest or may_skip else f"(the end; but the command goes on: {rest[0]})"
