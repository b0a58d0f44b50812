"""Writes the job that `rljob plan --search` found: a copy of the job file with some values changed.

Comments and the order of fields are kept. Before the file is written, its text is parsed again: the result must be the
job that was planned.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from pathlib import Path

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq

from rljob.differences import named_entries
from rljob_api.errors import JobFileError
from rljob_api.job_file import load_job_text
from rljob_api.v1alpha1.spec import RLJobSpec
from rljob_cli.errors import CliError
from rljob_cli.new_file import write_new_file

_WIDTH = 4096
"""Columns of a line: a number so large that ruamel.yaml never wraps a line."""
_FIRST_ENTRY = re.compile(r"^( *)[^\s#-][^\n]*:[ \t]*(?:#[^\n]*)?\n(?: *(?:#[^\n]*)?\n)*( *)- ", re.MULTILINE)
"""Matches a key and the first `- ` of its list, with empty lines and comments between them. The groups are the
spaces before the key and the spaces before the entry."""

Wire = dict[str, object]
"""A block of a job file in its JSON form."""


def write_changed(source: str, target: Path, old: RLJobSpec, new: RLJobSpec) -> None:
    """Writes a new file `target`: the text `source` of a job file, with its spec `old` changed to `new`.

    Raises CliError if `target` exists or cannot be written, or if the new text would not be the job `new`."""
    text = changed_text(source, old, new, str(target))
    try:
        write_new_file(target, text)
    except FileExistsError:
        raise CliError(f"--write: {target} already exists; choose another name") from None
    except OSError as error:
        raise CliError(f"--write: {target} cannot be written ({error.strerror}); check the path") from None


def changed_text(text: str, old: RLJobSpec, new: RLJobSpec, target: str = "job") -> str:
    """The text of a job file with its spec `old` changed to `new`. A field whose new value is the default is removed.
    `target`: the name of the new file, for messages.

    Raises CliError if the new text would not be the job `new`."""
    yaml = YAML()
    yaml.preserve_quotes = True
    yaml.width = _WIDTH
    yaml.brace_single_entry_mapping_in_flow_sequence = True
    offset = _offset_of_entries(text)
    yaml.indent(mapping=2, sequence=offset + 2, offset=offset)
    document = yaml.load(text)
    _change_block(document["spec"], _wire(old), _wire(new))
    stream = io.StringIO()
    yaml.dump(document, stream)
    written = stream.getvalue()
    try:
        found = load_job_text(written, target).spec
    except JobFileError as error:
        raise CliError(f"--write: nothing was written, because the changed job file is not valid:\n{error}") from None
    if _wire(found) != _wire(new):
        raise CliError(
            "--write: nothing was written, because the job file's pools and roles cannot be changed automatically"
            " (perhaps they use YAML aliases); write them without aliases, or change them by hand"
        )
    return written


def _offset_of_entries(text: str) -> int:
    """The number of columns by which this text indents the first entry of its first list below the list's key."""
    found = _FIRST_ENTRY.search(text)
    return max(0, len(found[2]) - len(found[1])) if found else 0


def _wire(spec: RLJobSpec) -> Wire:
    """The fields of a job whose values are not the defaults."""
    fields = _without_unset(spec.to_wire_without_defaults())
    assert isinstance(fields, dict), "some fields of a job have no default"
    return fields


def _without_unset(value: object) -> object:
    """The value without unset fields, and without blocks that have only unset fields."""
    if isinstance(value, list):
        return [_without_unset(entry) for entry in value]
    if not isinstance(value, dict):
        return value
    return {key: kept for key, each in value.items() if (kept := _without_unset(each)) is not None} or None


def _change_block(block: CommentedMap, old: Mapping[str, object], new: Mapping[str, object]) -> None:
    """Changes those fields of a block that differ between `old` and `new`. Other fields are not touched."""
    for key in old.keys() - new.keys():
        block.pop(key, None)
    for index, (key, value) in enumerate(new.items()):
        before, in_file = old.get(key), block.get(key)
        if value == before:
            continue
        named = named_entries(value)
        if isinstance(value, dict) and isinstance(in_file, CommentedMap):
            _change_block(in_file, before if isinstance(before, dict) else {}, value)
        elif named is not None and isinstance(in_file, CommentedSeq):
            _change_entries(in_file, named_entries(before) or {}, named)
        elif key in block:
            block[key] = _new_block(value)
        else:
            # A new field goes after the fields that precede it in the schema.
            preceding = [list(block).index(other) for other in list(new)[:index] if other in block]
            block.insert(max(preceding, default=-1) + 1, key, _new_block(value))


def _change_entries(entries: CommentedSeq, old: Mapping[str, Wire], new: Mapping[str, Wire]) -> None:
    """Changes a list of named entries. If the entries already have the new order, they stay in place, together with the
    comments between them."""
    for index in reversed(range(len(entries))):
        if entries[index]["name"] not in new:
            del entries[index]
    by_name = {entry["name"]: entry for entry in entries}
    is_flow = bool(by_name) and all(entry.fa.flow_style() for entry in by_name.values())
    for name, value in new.items():
        if name in by_name:
            _change_block(by_name[name], old[name], value)
            continue
        entry = by_name[name] = CommentedMap(value)
        if is_flow:
            entry.fa.set_flow_style()
        entries.append(entry)
    if [entry["name"] for entry in entries] != list(new):
        for index, name in enumerate(new):
            entries[index] = by_name[name]


def _new_block(value: object) -> object:
    """The value as a new YAML block if it is a dictionary. A block without inner blocks is written on one line."""
    if not isinstance(value, dict):
        return value
    block = CommentedMap({key: _new_block(each) for key, each in value.items()})
    if not any(isinstance(each, dict) for each in value.values()):
        block.fa.set_flow_style()
    return block
