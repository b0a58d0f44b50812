"""`rljob plan --search --write FILE`: the job file with other pools and places, everything else as it was written.

Comments and the order of fields stay. What is written is read again before, and must be the job that was planned.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from pathlib import Path

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq

from rljob_api.errors import JobFileError
from rljob_api.job_file import load_job_text
from rljob_api.v1alpha1.spec import RLJobSpec
from rljob_cli.errors import CliError
from rljob_cli.plan.changes import role_values, roles_of
from rljob_cli.plan.mapping import change_path, change_value, put_value
from rljob_planner.memory.changes import Change

_WIDTH = 4096
"""Of lines: none is broken that was not broken before."""
_FIRST_ENTRY = re.compile(r"^( *)[^\s#-][^\n]*:[ \t]*(?:#[^\n]*)?\n(?: *(?:#[^\n]*)?\n)*( *)- ", re.MULTILINE)


def write_mapped(source: str, target: Path, spec: RLJobSpec, changes: Sequence[Change] = ()) -> None:
    """Writes `target`, a new file: the job of the text `source` with the pools and places of `spec`, which is that
    job with `changes` of its training.

    Raises CliError where `target` exists or cannot be written, and where what would be written is no valid job."""
    text = mapped_text(source, spec, changes, str(target))
    try:
        with target.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise CliError(f"--write: {target} exists already; give another name") from None
    except OSError as error:
        raise CliError(f"--write: {target} cannot be written ({error.strerror}); check the path") from None


def mapped_text(text: str, spec: RLJobSpec, changes: Sequence[Change] = (), target: str = "job") -> str:
    """The text of a job file with the pools and places of `spec`, and these changes. Raises CliError where that is no
    valid job."""
    yaml = YAML()
    yaml.preserve_quotes = True
    yaml.width = _WIDTH
    yaml.brace_single_entry_mapping_in_flow_sequence = True
    offset = _offset_of_entries(text)
    yaml.indent(mapping=2, sequence=offset + 2, offset=offset)
    document = yaml.load(text)
    wire = document["spec"]
    for change in changes:
        put_value(wire, change_path(change, spec), change_value(change))
    _put_pools(wire, spec)
    _put_roles(wire, spec)
    stream = io.StringIO()
    yaml.dump(document, stream)
    written = stream.getvalue()
    try:
        found = load_job_text(written, target).spec
    except JobFileError as error:
        raise CliError(f"--write: the mapping breaks a rule of job files, and nothing is written:\n{error}") from None
    if not _says(found, spec):
        raise CliError(
            "--write: the file's pools and roles are written in a way that cannot be changed here (an alias, perhaps);"
            " write them out, or change them by hand"
        )
    return written


def _says(found: RLJobSpec, spec: RLJobSpec) -> bool:
    """Whether a job has these pools and places, and all else as it was."""
    same_elsewhere = {name: value for name, value in found if name not in ("pools", "roles")}
    wanted_elsewhere = {name: value for name, value in spec if name not in ("pools", "roles")}
    if same_elsewhere != wanted_elsewhere or found.pools != spec.pools:
        return False
    return all(role_values(found, role) == role_values(spec, role) for role in roles_of(spec))


def _offset_of_entries(text: str) -> int:
    """How far the entries of lists are indented in this file."""
    found = _FIRST_ENTRY.search(text)
    return max(0, len(found[2]) - len(found[1])) if found else 0


def _put_pools(wire: CommentedMap, spec: RLJobSpec) -> None:
    """In place where the pools have their order already, so that comments between them stay."""
    entries: CommentedSeq = wire["pools"]
    wanted = [pool.name for pool in spec.pools]
    for at in reversed(range(len(entries))):
        if entries[at]["name"] not in wanted:
            del entries[at]
    there = {entry["name"]: entry for entry in entries}
    is_flow = all(entry.fa.flow_style() for entry in there.values()) if there else False
    for pool in spec.pools:
        entry = there.get(pool.name)
        if entry is None:
            entry = there[pool.name] = CommentedMap(name=pool.name)
            if is_flow:
                entry.fa.set_flow_style()
            entries.append(entry)
        for key, value in (("nodes", pool.nodes), ("gpusPerNode", pool.gpus_per_node)):
            if entry.get(key, 1) != value:
                entry[key] = value
        if dict(entry.get("template", {}).get("nodeSelector", {})) != pool.template.node_selector:
            put_value(entry, ("template", "nodeSelector"), dict(pool.template.node_selector))
    if [entry["name"] for entry in entries] != wanted:
        for at, name in enumerate(wanted):
            entries[at] = there[name]


def _put_roles(wire: CommentedMap, spec: RLJobSpec) -> None:
    for role in roles_of(spec):
        values = role_values(spec, role)
        places = wire.get("roles")
        place = None if places is None else places.get(role)
        for key, value in values.items():
            if value is None:
                if place is not None:
                    place.pop(key, None)
                continue
            if places is None:
                places = CommentedMap()
                wire.insert(list(wire).index("pools") + 1, "roles", places)
            if place is None:
                place = CommentedMap()
                place.fa.set_flow_style()
                places[role] = place
            place[key] = value
        if place is not None and not place:
            del places[role]
    if "roles" in wire and not wire["roles"]:
        del wire["roles"]
