"""Reads YAML into plain values with their lines and columns, and rejects text that YAML parsers interpret differently;
writes such text in quotes.

`rljob` reads YAML 1.2. kubectl and PyYAML read YAML 1.1, in which `no` is false and `010` is eight; in PyYAML `1:30` is
also ninety. The same file must mean the same everywhere, so such plain scalars are rejected; in quotes they are
strings.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError
from ruamel.yaml.events import (
    AliasEvent,
    DocumentStartEvent,
    Event,
    MappingEndEvent,
    MappingStartEvent,
    ScalarEvent,
    SequenceEndEvent,
    SequenceStartEvent,
    StreamEndEvent,
)
from ruamel.yaml.scalarstring import DoubleQuotedScalarString
from ruamel.yaml.scanner import Scanner, ScannerError

from rljob_api.errors import Problem
from rljob_api.yaml_faults import AmbiguousScalarProblem, Path, YamlProblem, disagreement, syntax_problem

Plain = None | bool | int | float | str | list["Plain"] | dict[str, "Plain"]

MAX_TEXT_CHARACTERS = 1024 * 1024
TOO_LONG = Problem("", f"the file must have at most {MAX_TEXT_CHARACTERS} characters; shorten it", 1, 1)
MAX_VALUES = 20_000
"""Largest number of values after the expansion of all aliases."""
MAX_DEPTH = 64
MAX_INTEGER = 2**63 - 1
"""Largest absolute value of an integer. The API server reads larger ones as floating-point numbers."""

_MAX_DIGITS = 100
_INTEGER = re.compile(r"[-+]?(0|[1-9][0-9]*)")
_HEXADECIMAL = re.compile(r"0x[0-9a-fA-F]+")
_NUMBER = re.compile(r"[-+]?(\.[0-9]+|(0|[1-9][0-9]*)(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_NOT_FINITE = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_YAML_1_1_LINE_BREAK = re.compile(r"[\x85\u2028\u2029]")
_SURROGATE = re.compile(r"[\ud800-\udfff]")
_CONSTANTS: dict[str, Plain] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL")),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
}


@dataclass
class Document:
    """A YAML document as plain values, with their lines and columns."""

    value: Plain = None
    value_positions: dict[Path, tuple[int, int]] = field(default_factory=dict)
    """Line and column of each value, both from 1."""
    key_positions: dict[Path, tuple[int, int]] = field(default_factory=dict)
    """Line and column of the key of each value; entries of lists have none."""
    options: dict[Path, str] = field(default_factory=dict)
    """The option of the command line that has set a value. Such a value, and those in it, have line and column 0."""

    def at(self, path: Path) -> Plain:
        """The value at a path in `value_positions`."""
        found = self.value
        for part in path:
            assert isinstance(found, dict | list), "there is a value at every path"
            found = found[str(part)] if isinstance(found, dict) else found[int(part)]
        return found


def read_yaml(text: str) -> Document:
    """Reads the only document in the text. Empty documents (a last `---`, comments only) are ignored, as by kubectl.
    Raises YamlProblem at the first fault."""
    if len(text) > MAX_TEXT_CHARACTERS:
        raise YamlProblem(TOO_LONG)
    if found := _YAML_1_1_LINE_BREAK.search(text):
        before = text[: found.start()]
        message = (
            f"must not contain the character U+{ord(found[0]):04X}, which ends a line for some YAML parsers; remove it,"
            f" or write \\u{ord(found[0]):04x} in double quotes"
        )
        column = len(before) - (before.rfind("\n") + 1) + 1
        raise YamlProblem(Problem("", message, before.count("\n") + 1, column))
    try:
        return _Reader(text).document()
    except YAMLError as error:
        raise YamlProblem(syntax_problem(error, text, _parser().scan(text))) from None


def to_yaml(value: object) -> str:
    """Writes a JSON value as YAML. Strings that a YAML parser could interpret as another value are quoted."""
    writer = YAML()
    writer.default_flow_style = False
    writer.width = 120
    stream = io.StringIO()
    writer.dump(_quoted(value), stream)
    return stream.getvalue()


@dataclass(frozen=True)
class _Node:
    """A parsed value with its line and column: a mapping, a list or a scalar."""

    line: int
    column: int
    scalar: Plain = None
    entries: tuple[tuple[str, _Node, _Node], ...] | None = None
    """Entries of a mapping, in order: key, node of the key, node of the value."""
    items: tuple[_Node, ...] | None = None
    """Entries of a list."""


class _TabScanner(Scanner):
    """Accepts tabs where kubectl's parser does (go-yaml, `yaml_parser_scan_to_next_token` and
    `yaml_parser_scan_plain_scalar`): after a key's colon, within and after a value, after the indentation of a value's
    next line, and after the `|` or `>` of a block; but never as indentation or after `- `."""

    def scan_to_next_token(self) -> None:
        """Moves to the next token, past white space, comments and line breaks."""
        reader = self.reader
        if reader.index == 0 and reader.peek() == "\ufeff":
            reader.forward()
        while True:
            may_be_tab = self.flow_level > 0 or not self.allow_simple_key
            while reader.peek() == " " or (may_be_tab and reader.peek() == "\t"):
                reader.forward()
            if reader.peek() == "#":
                while reader.peek() not in _END_OF_LINE:
                    reader.forward()
            if not self.scan_line_break():
                return
            if not self.flow_level:
                self.allow_simple_key = True

    def scan_plain_spaces(self, indent: int, start_mark: object) -> list[str] | None:
        """Reads the white space within a plain scalar, as parts of its text; nothing if the scalar ends here."""
        reader, blanks, num_breaks = self.reader, "", 0
        while (character := reader.peek()) in _BLANKS_AND_BREAKS:
            if character in "\r\n":
                self.scan_line_break()
                num_breaks += 1
                self.allow_simple_key = True
                if reader.prefix(3) in ("---", "...") and reader.peek(3) in _BLANKS_AND_BREAKS + "\0":
                    return None
                continue
            if num_breaks and character == "\t" and reader.column < indent:
                raise ScannerError("in a value", start_mark, _TAB, reader.get_mark())
            blanks += character
            reader.forward()
        if num_breaks:
            return ["\n"] * (num_breaks - 1) or [" "]
        return [blanks] if blanks else []

    def scan_block_scalar_indicators(self, _start_mark: object) -> tuple[bool | None, int | None]:
        """Reads the indicators after `|` or `>`: whether trailing line breaks are kept (`+`) or dropped (`-`), and the
        indentation. The original requires a space or the end of the line after them; here
        `scan_block_scalar_ignored_line` checks the rest of the line."""
        keeps: bool | None = None
        indentation: int | None = None
        for _ in range(2):
            character = self.reader.peek()
            if keeps is None and character in ("+", "-"):
                keeps = character == "+"
                self.reader.forward()
            elif indentation is None and character in "123456789":
                indentation = int(character)
                self.reader.forward()
        return keeps, indentation

    def scan_block_scalar_indentation(self) -> object:
        """Moves to a block's first character, which determines the indentation of the block."""
        found: object = super().scan_block_scalar_indentation()
        if self.reader.peek() == "\t":
            problem = "found a tab at the start of a block; use spaces"
            raise ScannerError("in a block", None, problem, self.reader.get_mark())
        return found

    def scan_block_scalar_ignored_line(self, start_mark: object) -> object:
        """Skips the rest of a block's first line, after `|` or `>`."""
        while self.reader.peek() in (" ", "\t"):
            self.reader.forward()
        return super().scan_block_scalar_ignored_line(start_mark)


_END_OF_LINE = "\0\r\n"
_BLANKS_AND_BREAKS = " \t\r\n"
_TAB = "found character '\\t' that cannot start any token"


def _parser() -> YAML:
    yaml = YAML(typ="safe", pure=True)
    yaml.Scanner = _TabScanner
    return yaml


class _Reader:
    """One pass over the parser's events."""

    def __init__(self, text: str) -> None:
        self._events: Iterator[Event] = iter(_parser().parse(text))
        self._anchors: dict[str, _Node] = {}
        self._num_values = 0

    def document(self) -> Document:
        next(self._events)  # start of the stream
        root = None
        while not isinstance(start := next(self._events), StreamEndEvent):
            assert isinstance(start, DocumentStartEvent)
            if start.version is not None or start.tags:
                message = "directives such as %YAML are not supported by kubectl; remove the lines that start with %"
                raise _problem_at(start, (), message)
            content = next(self._events)
            if not _is_empty(content):
                if root is not None:
                    raise _problem_at(start, (), "a second document starts here; write one job per file")
                root = self._node(content, (), 0)
            next(self._events)  # end of the document
        if root is None:
            raise YamlProblem(Problem("", "the file is empty; create a job with `rljob init`", 1, 1))
        document = Document()
        document.value = self._plain(root, (), document)
        return document

    def _node(self, event: Event, path: Path, depth: int) -> _Node:
        if depth > MAX_DEPTH:
            raise _problem_at(event, path, f"must have at most {MAX_DEPTH} nested levels; remove levels")
        if isinstance(event, AliasEvent):
            if event.anchor not in self._anchors:
                message = f"the alias *{event.anchor} has no anchor before it; define &{event.anchor} first"
                raise _problem_at(event, path, message)
            return self._anchors[event.anchor]
        assert isinstance(event, ScalarEvent | SequenceStartEvent | MappingStartEvent)
        if event.tag is not None:
            raise _problem_at(event, path, f"tags are not supported (seen: {event.tag}); remove the tag")
        node = self._content(event, path, depth)
        if event.anchor is not None:
            self._anchors[event.anchor] = node
        return node

    def _content(self, event: Event, path: Path, depth: int) -> _Node:
        line, column = event.start_mark.line + 1, event.start_mark.column + 1
        if isinstance(event, MappingStartEvent):
            return _Node(line, column, entries=tuple(self._entries(path, depth)))
        if isinstance(event, SequenceStartEvent):
            return _Node(line, column, items=tuple(self._list_items(path, depth)))
        assert isinstance(event, ScalarEvent)
        return _Node(line, column, scalar=_scalar(event, path))

    def _entries(self, path: Path, depth: int) -> Iterator[tuple[str, _Node, _Node]]:
        seen = set()
        while not isinstance(event := next(self._events), MappingEndEvent):
            if (
                isinstance(event, ScalarEvent)
                and event.style is None
                and (wrong := disagreement(event.value)) is not None
            ):
                message = f"a key must be a string, but {wrong} (seen: {event.value}); put the key in quotes"
                raise _problem_at(event, path, message)
            key = self._node(event, path, depth + 1)
            if not isinstance(key.scalar, str):
                message = f"a key must be a string (seen: {_shown(event)}); write a string, in quotes if necessary"
                raise _problem_at(event, path, message)
            if key.scalar == "<<" and isinstance(event, ScalarEvent) and event.style is None:
                raise _problem_at(event, path, "merge keys (<<) are not supported (YAML 1.2); write all fields out")
            if key.scalar in seen:
                raise _problem_at(event, (*path, key.scalar), "duplicate key in this mapping; remove one of them")
            seen.add(key.scalar)
            yield key.scalar, key, self._node(next(self._events), (*path, key.scalar), depth + 1)

    def _list_items(self, path: Path, depth: int) -> Iterator[_Node]:
        index = 0
        while not isinstance(event := next(self._events), SequenceEndEvent):
            yield self._node(event, (*path, index), depth + 1)
            index += 1

    def _plain(self, node: _Node, path: Path, document: Document) -> Plain:
        """The node's value, with aliases expanded. The number of values is limited here, because aliases can multiply
        them."""
        self._num_values += 1
        if self._num_values > MAX_VALUES or len(path) > MAX_DEPTH:
            message = f"must have at most {MAX_VALUES} values and {MAX_DEPTH} levels with aliases expanded; use fewer"
            raise YamlProblem(Problem(wire_path(path[:4]), message, node.line, node.column))
        document.value_positions[path] = (node.line, node.column)
        if node.entries is not None:
            for key, key_node, _ in node.entries:
                document.key_positions[(*path, key)] = (key_node.line, key_node.column)
            return {key: self._plain(value, (*path, key), document) for key, _, value in node.entries}
        if node.items is not None:
            return [self._plain(item, (*path, index), document) for index, item in enumerate(node.items)]
        return node.scalar


def _is_empty(content: Event) -> bool:
    """Whether a document has no value, only comments. An explicit value, also `null`, is not empty."""
    empty = (None, "", None, None)
    return isinstance(content, ScalarEvent) and (content.style, content.value, content.tag, content.anchor) == empty


def _scalar(event: ScalarEvent, path: Path) -> Plain:
    """The value of a scalar by the core schema of YAML 1.2 (section 10.3.2)."""
    text = str(event.value)
    if found := _SURROGATE.search(text):
        code = f"\\u{ord(found[0]):04x}"
        raise _problem_at(
            event, path, f"must not contain an unpaired surrogate (seen: {code}); write the character itself"
        )
    if event.style is not None:
        return text
    if text in _CONSTANTS:
        return _CONSTANTS[text]
    if (wrong := disagreement(text)) is not None:
        line, column = event.start_mark.line + 1, event.start_mark.column + 1
        raise AmbiguousScalarProblem(Problem(wire_path(path), f"{wrong} (seen: {text})", line, column), path)
    if _INTEGER.fullmatch(text):
        return _integer(event, path, 10)
    if _HEXADECIMAL.fullmatch(text):
        return _integer(event, path, 16)
    if _NOT_FINITE.fullmatch(text) or (_NUMBER.fullmatch(text) and math.isinf(float(text))):
        raise _problem_at(
            event, path, f"must be a finite number (seen: {_shown(event)}); use a number that JSON supports"
        )
    return float(text) if _NUMBER.fullmatch(text) else text


def _integer(event: ScalarEvent, path: Path, base: int) -> int:
    """The integer in the text. The number of digits is checked first, because Python limits the length of integers that
    it parses."""
    text = str(event.value)
    if len(text) > _MAX_DIGITS or abs(number := int(text, base)) > MAX_INTEGER:
        bound, change = (f"least -{MAX_INTEGER}", "increase") if text[0] == "-" else (f"most {MAX_INTEGER}", "reduce")
        raise _problem_at(event, path, f"must be at {bound} (seen: {_shown(event)}); {change} it")
    return number


def _problem_at(event: Event, path: Path, message: str) -> YamlProblem:
    return YamlProblem(Problem(wire_path(path), message, event.start_mark.line + 1, event.start_mark.column + 1))


def _shown(event: Event) -> str:
    return str(event.value)[:40] if isinstance(event, ScalarEvent) else "a mapping or list"


def _quoted(value: object) -> object:
    """The value with double quotes requested for strings that `_scalar` rejects as plain scalars, and for strings with
    line breaks or other characters to escape. The YAML writer quotes all other strings that need it."""
    if isinstance(value, dict):
        return {_quoted(key): _quoted(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_quoted(item) for item in value]
    if isinstance(value, str):
        is_ambiguous = disagreement(value) is not None
        return DoubleQuotedScalarString(value) if is_ambiguous or not value.isprintable() else value
    return value


def wire_path(path: Path) -> str:
    """The path as text: `spec.pools[0].name`."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return text.removeprefix(".")
