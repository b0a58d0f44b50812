"""Reads and writes profiles: JSON files with constants of the planner that were fitted to runs on one GPU type.

    {"formatVersion": 1, "kind": "H100", "constants": {...}, "runs": ["runs/x"], "writtenAt": "2026-01-31T12:00:00Z"}

A profile with another version or an invalid value is rejected, because a plan with a part of a profile would be worse
than a plan with the defaults.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field, TypeAdapter, ValidationError

from rljob.plain_text import one_line
from rljob_cli import settings
from rljob_cli.errors import CliError
from rljob_page.replaced_file import replace_file
from rljob_planner.advice.calibration import cpu_constants
from rljob_planner.constants import Constants
from rljob_planner.gpus import CPU_NAME

_ADVICE = "write the file again with rljob plan --calibrate"


@dataclass(frozen=True)
class Profile:
    """Constants for one GPU type, fitted to runs on it."""

    kind: Annotated[str, Field(min_length=1)]
    """The GPU type, or `cpu`."""
    constants: Constants
    runs: tuple[str, ...]
    """Folders of the runs, as they were passed to --calibrate."""
    written_at: Annotated[str, Field(alias="writtenAt")]
    """UTC, such as `2026-01-31T12:00:00Z`."""
    format_version: Annotated[int, Field(ge=1, le=1, alias="formatVersion")] = 1


_PROFILE = TypeAdapter(Profile)


def constants_for(gpu_types: Collection[str], file: Path | None) -> Constants:
    """The constants for a plan. They come from the first of these that exists: the profile `file`, the user's profile
    for the GPU type (if all pools have the same type), the defaults.

    Raises CliError if the profile cannot be read, or is for another GPU type."""
    found = file
    if found is None and len(set(gpu_types)) == 1:
        of_user = default_file(next(iter(gpu_types)))
        found = of_user if of_user.is_file() else None
    if found is None:
        return default_constants(gpu_types)
    profile = read_profile(found)
    if set(gpu_types) != {profile.kind}:
        raise CliError(
            f"{found}: the profile is for {profile.kind}, but the job is planned for"
            f" {', '.join(sorted(set(gpu_types)))}; remove --profile, or use a profile from a run on the same GPU type"
        )
    return profile.constants


def default_constants(gpu_types: Collection[str]) -> Constants:
    """The constants for a plan without a profile: those for CPUs if all pools are on CPUs, else those for GPUs."""
    return cpu_constants() if set(gpu_types) == {CPU_NAME} else Constants()


def default_file(gpu_type: str) -> Path:
    """The path of the user's profile for a GPU type. --calibrate writes it, and later plans read it."""
    name = "".join(letter if letter.isalnum() or letter in "-." else "-" for letter in gpu_type)
    return settings.profile_folder() / f"{name}.json"


def read_profile(file: Path) -> Profile:
    """Reads a profile. Raises CliError if it cannot be read or has an invalid value."""
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise CliError(f"{file}: cannot be read ({error.strerror}); check the path and its permissions") from None
    except (ValueError, RecursionError) as error:
        raise CliError(f"{file}: is not valid JSON ({one_line(error)}); {_ADVICE}") from None
    if isinstance(data, dict):
        # Constants that the file lacks have their defaults. A file without formatVersion is rejected.
        constants = data.get("constants")
        if isinstance(constants, dict):
            constants = vars(default_constants({str(data.get("kind"))})) | constants
        data = {"formatVersion": None, **data, "constants": constants}
    try:
        return _PROFILE.validate_json(json.dumps(data), strict=True)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        where = ": ".join((str(file), *filter(None, [".".join(map(str, problem["loc"]))])))
        bounds = {"ge": "must be at least", "le": "must be at most"}
        limits = [f"{bounds[name]} {limit:g}" for name, limit in problem.get("ctx", {}).items() if name in bounds]
        seen = one_line(json.dumps(problem["input"], default=str))[:60]
        raise CliError(f"{where}: {''.join(limits) or 'is not valid'} (seen {seen}); {_ADVICE}") from None


def write_profile(file: Path, profile: Profile) -> None:
    """Writes a profile, or replaces it atomically. Raises CliError if that fails.

    Constants that equal their default are not written, so that a plan with the profile uses later defaults for them.
    """
    defaults = vars(default_constants({profile.kind}))
    data = {"formatVersion": 1} | _PROFILE.dump_python(profile, mode="json", by_alias=True)
    data["constants"] = {name: each for name, each in data["constants"].items() if each != defaults[name]}
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_file(file, (json.dumps(data, indent=1) + "\n").encode())
    except OSError as error:
        raise CliError(f"{file}: cannot be written ({error.strerror}); choose another file with --profile") from error
