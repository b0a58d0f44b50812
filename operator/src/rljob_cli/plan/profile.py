"""What a machine has shown: a JSON file with the constants that its runs were fitted to, which later plans use.

    {"formatVersion": 1, "kind": "H100", "constants": {...}, "runs": ["runs/x"], "writtenAt": "2026-01-31T12:00:00Z"}

A file of another version, or with something that is not understood, is refused: a plan by half a profile is worse than
one by defaults.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field, TypeAdapter, ValidationError

from rljob_cli import settings
from rljob_cli.errors import CliError
from rljob_cli.plain_text import one_line
from rljob_planner.advice.calibration import cpu_constants
from rljob_planner.constants import Constants
from rljob_planner.gpus import CPU_NAME

_AGAIN = "write the file anew with rljob plan --calibrate"


@dataclass(frozen=True)
class Profile:
    """One kind of device, as some runs have shown it."""

    kind: Annotated[str, Field(min_length=1)]
    """Name of the kind of GPU, or `cpu`."""
    constants: Constants
    runs: tuple[str, ...]
    written_at: Annotated[str, Field(alias="writtenAt")]
    """In UTC."""
    format_version: Annotated[int, Field(ge=1, le=1, alias="formatVersion")] = 1


_PROFILE = TypeAdapter(Profile)


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
    if isinstance(data, dict):
        given = data.get("constants")
        if isinstance(given, dict):
            given = vars(default_constants({str(data.get("kind"))})) | given
        data = {"formatVersion": None, **data, "constants": given}
    try:
        return _PROFILE.validate_json(json.dumps(data), strict=True)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        where = ": ".join((str(file), *filter(None, [".".join(map(str, problem["loc"]))])))
        bounds = {"ge": "must be at least", "le": "must be at most"}
        limits = [f"{bounds[name]} {limit:g}" for name, limit in problem.get("ctx", {}).items() if name in bounds]
        seen = one_line(json.dumps(problem["input"], default=str))[:60]
        raise CliError(f"{where}: {''.join(limits) or 'is not understood'} (seen {seen}); {_AGAIN}") from None


def write_profile(file: Path, profile: Profile) -> None:
    """Replaced in one piece; only what differs from the defaults is in it, so that these may change. Raises
    CliError."""
    defaults = vars(default_constants({profile.kind}))
    data = {"formatVersion": 1} | _PROFILE.dump_python(profile, mode="json", by_alias=True)
    data["constants"] = {name: each for name, each in data["constants"].items() if each != defaults[name]}
    unfinished = file.with_name(file.name + ".unfinished")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        unfinished.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
        unfinished.replace(file)
    except OSError as error:
        raise CliError(f"{file}: cannot be written ({error.strerror}); name another file with --profile") from error
