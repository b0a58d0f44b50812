"""A job to submit: from a file or from an object, with changed values."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rljob.errors import RejectedError
from rljob_api.errors import JobFileError, Problem
from rljob_api.job_changes import Change
from rljob_api.job_file import job_text_warnings, load_job_text_to_run, read_job_text
from rljob_api.v1alpha1.job import RLJob


@dataclass(frozen=True)
class JobSource:
    """A valid job, and where it comes from."""

    job: RLJob
    text: str
    """The text of the file, without `changes`."""
    name: str
    """The path of the file for messages; `job` for a job that is not from a file."""
    changes: tuple[Change, ...] = ()

    def warnings(self) -> list[Problem]:
        """Warnings about the job, in the order of their lines."""
        return job_text_warnings(self.text, self.job, self.changes)


def job_in_file(file: Path, changes: Sequence[Change] = ()) -> JobSource:
    """The job in a file, with changes. Raises JobFileError if it is not valid."""
    text = read_job_text(file)
    return JobSource(load_job_text_to_run(text, str(file), changes), text, str(file), tuple(changes))


def job_of_values(values: RLJob | Mapping[str, object], changes: Sequence[Change] = ()) -> JobSource:
    """A job that is given as an object or in its wire form, with changes. Raises RejectedError if it is not valid."""
    try:
        wire = values.to_wire() if isinstance(values, RLJob) else dict(values)
        _check_keys(wire)
        text = json.dumps(wire, ensure_ascii=False, allow_nan=False)
        return JobSource(load_job_text_to_run(text, "job", changes), text, "job", tuple(changes))
    except JobFileError as error:
        # Lines and columns would be those of the text above.
        problems = [replace(each, line=None, column=None) for each in error.problems]
        raise RejectedError("\n".join(map(_described, problems)), problems) from None
    except (TypeError, ValueError, RecursionError) as error:
        kinds = "mappings with strings as keys, lists, strings, finite numbers and booleans"
        raise RejectedError(
            f"the job must consist of {kinds} ({error}); remove the value that is none of these"
        ) from None


def _check_keys(value: object) -> None:
    """Raises TypeError for a key that is no string: `json` would turn it into one."""
    if isinstance(value, Mapping):
        for key, entry in value.items():
            if not isinstance(key, str):
                raise TypeError(f"seen: the key {key!r}")
            _check_keys(entry)
    elif isinstance(value, list | tuple):
        for entry in value:
            _check_keys(entry)


def _described(problem: Problem) -> str:
    return f"{problem.option}: {problem}" if problem.option else str(problem)
