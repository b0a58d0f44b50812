"""`rljob plan --search --write FILE`: the job file with other values, everything else as it was written.

Comments and the order of fields stay. What is written is read again before, and must be the job that was planned.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from pathlib import Path

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq

from rljob_api.errors import JobFileError
from rljob_api.job_file import load_job_text
from rljob_api.v1alpha1.spec import RLJobSpec
from rljob_cli.differences import named_entries
from rljob_cli.errors import CliError

_WIDTH = 4096
"""Of lines: none is broken that was not broken before."""
_FIRST_ENTRY = re.compile(r"^( *)[^\s#-][^\n]*:[ \t]*(?:#[^\n]*)?\n(?: *(?:#[^\n]*)?\n)*( *)- ", re.MULTILINE)

Wire = dict[str, object]


def write_changed(source: str, target: Path, old: RLJobSpec, new: RLJobSpec) -> None:
    """Writes `target`, a new file: the job file `source`, whose spec is `old`, with the spec `new`.

    Raises CliError where `target` exists or cannot be written, and where what would be written is no valid job."""
    text = changed_text(source, old, new, str(target))
    try:
        with target.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise CliError(f"--write: {target} exists already; give another name") from None
    except OSError as error:
        raise CliError(f"--write: {target} cannot be written ({error.strerror}); check the path") from None


def changed_text(text: str, old: RLJobSpec, new: RLJobSpec, target: str = "job") -> str:
    """The text of a job file, whose spec is `old`, with the spec `new`; what equals its default is left out. Raises
    CliError where that is no valid job."""
    yaml = YAML()
    yaml.preserve_quotes = True
    yaml.width = _WIDTH
    yaml.brace_single_entry_mapping_in_flow_sequence = True
    offset = _offset_of_entries(text)
    yaml.indent(mapping=2, sequence=offset + 2, offset=offset)
    document = yaml.load(text)
    _put(document["spec"], _wire(old), _wire(new))
    stream = io.StringIO()
    yaml.dump(document, stream)
    written = stream.getvalue()
    try:
        found = load_job_text(written, target).spec
    except JobFileError as error:
        raise CliError(f"--write: the mapping breaks a rule of job files, and nothing is written:\n{error}") from None
    if _wire(found) != _wire(new):
        raise CliError(
            "--write: the file's pools and roles are written in a way that cannot be changed here (an alias, perhaps);"
            " write them out, or change them by hand"
        )
    return written


def _offset_of_entries(text: str) -> int:
    """How far the entries of lists are indented in this file."""
    found = _FIRST_ENTRY.search(text)
    return max(0, len(found[2]) - len(found[1])) if found else 0


def _wire(spec: RLJobSpec) -> Wire:
    """What the job says beyond the defaults."""
    said = _said(spec.to_wire_without_defaults())
    assert isinstance(said, dict), "a job says something"
    return said


def _said(value: object) -> object:
    """Without what is unset, and blocks that hold nothing else."""
    if isinstance(value, list):
        return [_said(entry) for entry in value]
    if not isinstance(value, dict):
        return value
    return {key: said for key, each in value.items() if (said := _said(each)) is not None} or None


def _put(place: CommentedMap, old: Mapping[str, object], new: Mapping[str, object]) -> None:
    """Changes a block of the file where `new` differs from `old`, and nothing else in it."""
    for key in old.keys() - new.keys():
        place.pop(key, None)
    for at, (key, value) in enumerate(new.items()):
        before, there = old.get(key), place.get(key)
        if value == before:
            continue
        named = named_entries(value)
        if isinstance(value, dict) and isinstance(there, CommentedMap):
            _put(there, before if isinstance(before, dict) else {}, value)
        elif named is not None and isinstance(there, CommentedSeq):
            _put_entries(there, named_entries(before) or {}, named)
        elif key in place:
            place[key] = _fresh(value)
        else:
            before_it = [list(place).index(other) for other in list(new)[:at] if other in place]
            place.insert(max(before_it, default=-1) + 1, key, _fresh(value))


def _put_entries(entries: CommentedSeq, old: Mapping[str, Wire], new: Mapping[str, Wire]) -> None:
    """In place where the entries have their order already, so that comments between them stay."""
    for at in reversed(range(len(entries))):
        if entries[at]["name"] not in new:
            del entries[at]
    there = {entry["name"]: entry for entry in entries}
    is_flow = bool(there) and all(entry.fa.flow_style() for entry in there.values())
    for name, value in new.items():
        if name in there:
            _put(there[name], old[name], value)
            continue
        entry = there[name] = CommentedMap(value)
        if is_flow:
            entry.fa.set_flow_style()
        entries.append(entry)
    if [entry["name"] for entry in entries] != list(new):
        for at, name in enumerate(new):
            entries[at] = there[name]


def _fresh(value: object) -> object:
    """A block that is new; on one line where it holds no other."""
    if not isinstance(value, dict):
        return value
    block = CommentedMap({key: _fresh(each) for key, each in value.items()})
    if not any(isinstance(each, dict) for each in value.values()):
        block.fa.set_flow_style()
    return block
