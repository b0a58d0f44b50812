"""The pages of the documentation as data: code blocks, and commands with the output that the page shows.

A `console` block has commands after `$`, each followed by its output. `...` stands for lines that are omitted. A block
after a line with "save this as `NAME`" is a file.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).parents[3]
OMITTED = "..."
_FENCE = "```"
_HEADING = re.compile(r"#+ (.*)")
_SAVED_AS = re.compile(r"[Ss]ave this as `([\w.]+)`")
_VARYING = (
    (re.compile(r"^\d\d:\d\d:\d\d "), ""),
    (re.compile(r"\S*\bruns/"), "runs/"),
    (re.compile(r"\bteam-\w+"), "NAMESPACE"),
    (re.compile(r"\d{4}-\d\d-\d\dT[\d:]+Z"), "TIME"),
    (re.compile(r"\d+ min \d+ s|\b(\d+[dhms])+\b"), "AGE"),
    (re.compile(r"\d[\d,.]*"), "N"),
    (re.compile(r"[━─ ]+"), " "),
)
"""Patterns of text that differs between runs of the same command, or between terminals."""


@dataclass(frozen=True)
class Block:
    """A block of code. `section` is the heading above it, `file` the name under which a reader saves it."""

    language: str
    section: str
    file: str | None
    text: str


@dataclass(frozen=True)
class ShownCommand:
    """A command of a page and the output that the page shows."""

    command: str
    output: tuple[str, ...]


def all_pages() -> list[Path]:
    """All pages: at the top of the repository, in docs/, and next to programs."""
    folders = ("docs", "e2e", "examples", "bench", "charts", "images")
    below = (path for name in folders for path in sorted((REPOSITORY / name).rglob("*.md")))
    return [*sorted(REPOSITORY.glob("*.md")), *below]


def blocks(page: Path, language: str) -> list[Block]:
    """The code blocks of a page in one language, in order."""
    found: list[Block] = []
    section, file, language_of_block = "", None, None
    lines: list[str] = []
    for line in page.read_text().splitlines(keepends=True):
        if language_of_block is not None and line.rstrip() == _FENCE:
            found.append(Block(language_of_block, section, file, "".join(lines)))
            file, language_of_block, lines = None, None, []
        elif language_of_block is not None:
            lines.append(line)
        elif line.startswith(_FENCE):
            language_of_block = line.strip().removeprefix(_FENCE)
        elif heading := _HEADING.match(line):
            section, file = heading[1], None
        elif saved_as := _SAVED_AS.search(line):
            file = saved_as[1]
    return [block for block in found if block.language == language]


def saved_files(page: Path) -> dict[str, str]:
    """The files that a page asks its reader to save, by name."""
    return {block.file: block.text for name in ("python", "yaml") for block in blocks(page, name) if block.file}


def shown_commands(page: Path, section: str) -> list[ShownCommand]:
    """The commands in the console blocks of a section, in order."""
    found = []
    for block in blocks(page, "console"):
        if block.section == section:
            for part in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
                command, *output = part.rstrip("\n").split("\n")
                found.append(ShownCommand(command, tuple(output)))
    return found


def shape(line: str) -> str:
    """A line without numbers, times, folders and column widths."""
    for pattern, replacement in _VARYING:
        line = pattern.sub(replacement, line)
    return line.strip()


def first_line_not_printed(shown: ShownCommand, printed: str) -> str | None:
    """The first line on the page that the command did not print after the lines before it; None if all were printed.

    Lines must follow each other as on the page; other lines may come between two of them only at `...`.
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
    return None if not rest or may_skip else f"(the end; the command also printed: {rest[0]})"


def update_output(page: Path, shown: ShownCommand, printed: str) -> None:
    """Writes the current output of a command into the page. Lines that differ only in numbers, times or folders
    stay."""
    known = {shape(line): line for line in shown.output}
    now = re.sub(r"\bteam-\w+", "team-a", printed).rstrip("\n").split("\n")
    lines = [known.get(shape(line), line.rstrip()) for line in now]
    old, new = ("\n".join([f"$ {shown.command}", *output, ""]) for output in (shown.output, lines))
    text = page.read_text()
    assert old in text, shown.command
    page.write_text(text.replace(old, new))
