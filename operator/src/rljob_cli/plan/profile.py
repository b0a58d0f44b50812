"""What a machine has shown: a JSON file with the constants that its runs were fitted to, which later plans use.

    {"formatVersion": 1, "kind": "H100", "constants": {...}, "runs": ["runs/x"], "writtenAt": "2026-01-31T12:00:00Z"}

A file of another version, or with something that is not understood, is refused: a plan by half a profile is worse than
one by defaults.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from dataclasses import dataclass, fields
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from rljob_cli import settings
from rljob_cli.errors import CliError
from rljob_cli.plain_text import one_line
from rljob_planner.advice.calibrated_machine import cpu_constants
from rljob_planner.constants import Constants
from rljob_planner.known_gpus import CPU_NAME

FORMAT_VERSION = 1
_CONSTANTS = TypeAdapter(Constants)
_NAMES = frozenset(each.name for each in fields(Constants))
_LIMITS = (
    ("expert_efficiency_factor", 1e-6, 100.0),
    ("allocator_factor", 1.0, 10.0),
    ("spread", 0.0, 0.9),
    ("efficiency", 1e-6, 1.0),
    ("_bandwidth", 1e3, 1e15),
    ("_seconds", 0.0, 1e6),
    ("_bytes", 0.0, 1e15),
)
"""What can be of the constants whose names have this in them, the first that is true."""


@dataclass(frozen=True)
class Profile:
    """One kind of device, as some runs have shown it."""

    kind: str
    """Name of the kind of GPU, or `cpu`."""
    constants: Constants
    runs: tuple[str, ...]
    written_at: str
    """In UTC."""


def constants_for(kinds: Collection[str], file: Path | None) -> Constants:
    """Those of the file; without one of the profile of this kind that this user has, where all pools are of one kind;
    else the defaults.

    Raises CliError for a file that cannot be read, or is of another kind."""
    found = file
    if found is None and len(set(kinds)) == 1:
        own = default_file(next(iter(kinds)))
        found = own if own.is_file() else None
    if found is None:
        return default_constants(kinds)
    profile = read_profile(found)
    if set(kinds) != {profile.kind}:
        raise CliError(
            f"{found}: is of {profile.kind}, and the job is planned for {', '.join(sorted(set(kinds)))}; leave"
            " --profile out, or calibrate by a run on those"
        )
    return profile.constants


def default_constants(kinds: Collection[str]) -> Constants:
    """Where no run has shown more."""
    return cpu_constants() if set(kinds) == {CPU_NAME} else Constants()


def default_file(kind: str) -> Path:
    """Where the profile of a kind is kept, and looked for."""
    name = "".join(letter if letter.isalnum() or letter in "-." else "-" for letter in kind)
    return settings.profile_folder() / f"{name}.json"


def read_profile(file: Path) -> Profile:
    """Raises CliError where it cannot be read, or says something that is not understood."""
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise CliError(f"{file}: cannot be read ({error.strerror}); check --profile") from None
    except (ValueError, RecursionError) as error:
        raise CliError(f"{file}: is no JSON ({one_line(error)}); write it anew with rljob plan --calibrate") from None
    if not isinstance(data, dict):
        raise _not_understood(file, "", data)
    version = data.get("formatVersion")
    if type(version) is not int or version != FORMAT_VERSION:
        raise CliError(
            f"{file}: formatVersion: this version reads {FORMAT_VERSION} (seen {_seen(version)}); write it anew with"
            " rljob plan --calibrate"
        )
    kind, runs, written_at = data.get("kind"), data.get("runs"), data.get("writtenAt")
    if not isinstance(kind, str) or not kind:
        raise _not_understood(file, "kind", kind)
    if not isinstance(runs, list) or not all(isinstance(each, str) for each in runs):
        raise _not_understood(file, "runs", runs)
    if not isinstance(written_at, str):
        raise _not_understood(file, "writtenAt", written_at)
    return Profile(kind, _constants(file, kind, data.get("constants")), tuple(runs), written_at)


def write_profile(file: Path, profile: Profile) -> None:
    """Replaced in one piece; only what differs from the defaults is in it, so that these may change. Raises
    CliError."""
    defaults = _CONSTANTS.dump_python(default_constants({profile.kind}), mode="json")
    constants = _CONSTANTS.dump_python(profile.constants, mode="json")
    data = {
        "formatVersion": FORMAT_VERSION,
        "kind": profile.kind,
        "constants": {name: value for name, value in constants.items() if value != defaults[name]},
        "runs": list(profile.runs),
        "writtenAt": profile.written_at,
    }
    unfinished = file.with_name(file.name + ".unfinished")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        unfinished.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
        unfinished.replace(file)
    except OSError as error:
        raise CliError(f"{file}: cannot be written ({error.strerror}); name another file with --profile") from error


def _constants(file: Path, kind: str, data: object) -> Constants:
    if not isinstance(data, dict):
        raise _not_understood(file, "constants", data)
    for name in data:
        if name not in _NAMES:
            raise _not_understood(file, f"constants.{name}", data[name])
    try:
        values = {**_CONSTANTS.dump_python(default_constants({kind})), **data}
        found = _CONSTANTS.validate_json(json.dumps(values), strict=True)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        name = ".".join(str(part) for part in ("constants", *problem["loc"]))
        raise _not_understood(file, name, problem["input"]) from None
    for field, each in _CONSTANTS.dump_python(found).items():
        for name, value in _numbers(each, f"constants.{field}"):
            low, high = next((low, high) for part, low, high in _LIMITS if part in field)
            if not low <= value <= high:
                raise CliError(
                    f"{file}: {name}: must be at least {low:g} and at most {high:g} (seen {value:g}); write the file"
                    " anew with rljob plan --calibrate"
                )
    return found


def _numbers(value: object, name: str) -> Iterator[tuple[str, float]]:
    if isinstance(value, dict):
        for key, each in value.items():
            yield from _numbers(each, f"{name}.{key}")
    elif isinstance(value, int | float):
        yield name, float(value)


def _not_understood(file: Path, name: str, value: object) -> CliError:
    where = f"{file}: {name}" if name else str(file)
    return CliError(
        f"{where}: is not understood (seen {_seen(value)}); write the file anew with rljob plan --calibrate"
    )


def _seen(value: object) -> str:
    return one_line(json.dumps(value, default=str))[:60]
