"""What a machine has shown: a JSON file with the constants that its runs were fitted to, which later plans use.

    {"formatVersion": 1, "kind": "H100", "constants": {...}, "runs": ["runs/x"], "writtenAt": "2026-01-31T12:00:00Z"}

A file of another version, or with something that is not understood, is refused: a plan by half a profile is worse than
one by defaults.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from rljob_cli import settings
from rljob_cli.errors import CliError
from rljob_cli.plain_text import one_line
from rljob_planner.advice.calibration import cpu_constants
from rljob_planner.constants import Constants
from rljob_planner.gpus import CPU_NAME

_CONSTANTS = TypeAdapter(Constants)
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
_AGAIN = "write the file anew with rljob plan --calibrate"


@dataclass(frozen=True)
class Profile:
    """One kind of device, as some runs have shown it."""

    kind: str
    """Name of the kind of GPU, or `cpu`."""
    constants: Constants
    runs: tuple[str, ...]
    written_at: str
    """In UTC."""


class _File(BaseModel):
    format_version: Annotated[int, Field(ge=1, le=1, alias="formatVersion")]
    kind: Annotated[str, Field(min_length=1)]
    constants: Constants
    runs: tuple[str, ...]
    written_at: Annotated[str, Field(alias="writtenAt")]


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
        raise CliError(f"{file}: is no JSON ({one_line(error)}); {_AGAIN}") from None
    given = data.get("constants") if isinstance(data, dict) else None
    if isinstance(given, dict):
        for name in given.keys() - {each.name for each in fields(Constants)}:
            raise _not_understood(file, f"constants.{name}", given[name])
        data["constants"] = {**_CONSTANTS.dump_python(default_constants({str(data.get("kind"))})), **given}
    try:
        found = _File.model_validate_json(json.dumps(data), strict=True)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        raise _not_understood(file, ".".join(map(str, problem["loc"])), problem["input"]) from None
    _refuse_unbelievable(file, found.constants)
    return Profile(found.kind, found.constants, found.runs, found.written_at)


def write_profile(file: Path, profile: Profile) -> None:
    """Replaced in one piece; only what differs from the defaults is in it, so that these may change. Raises
    CliError."""
    defaults = _CONSTANTS.dump_python(default_constants({profile.kind}), mode="json")
    constants = _CONSTANTS.dump_python(profile.constants, mode="json")
    data = {
        "formatVersion": 1,
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


def _refuse_unbelievable(file: Path, constants: Constants) -> None:
    for field, each in _CONSTANTS.dump_python(constants).items():
        numbers = (
            {f"{field}.{kind}": value for kind, value in each.items()} if isinstance(each, dict) else {field: each}
        )
        for name, value in numbers.items():
            if isinstance(value, str):
                continue
            low, high = next((low, high) for part, low, high in _LIMITS if part in field)
            if not low <= value <= high:
                bounds = f"at least {low:g} and at most {high:g}"
                raise CliError(f"{file}: constants.{name}: must be {bounds} (seen {value:g}); {_AGAIN}")


def _not_understood(file: Path, name: str, value: object) -> CliError:
    where = f"{file}: {name}" if name else str(file)
    return CliError(f"{where}: is not understood (seen {one_line(json.dumps(value, default=str))[:60]}); {_AGAIN}")
