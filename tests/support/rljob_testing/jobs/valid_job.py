"""A small valid job, copies of it with changed values, and jobs that break a rule."""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

Wire = dict[str, object]


class Remove(Enum):
    """Used in place of a value: the field is removed."""

    FIELD = "removed"


REMOVED = Remove.FIELD


@dataclass(frozen=True)
class Bad:
    """A job that breaks a rule, and the path at which the fault is reported."""

    path: str
    edits: Mapping[str, object]
    also: tuple[str, ...] = ()
    """Other rules that this job breaks as a consequence."""
    places: tuple[str, ...] = ()
    """Paths that pydantic reports, which can be more precise than the API server: one per list entry. If empty,
    `path`."""


def valid_job(edits: Mapping[str, object] | None = None) -> Wire:
    """The job that the examples change: one pool of 1 node with 2 GPUs, batches of 8 prompts in groups of 4.

    `edits` as in `edited`.
    """
    job: Wire = {
        "apiVersion": "rljob.dev/v1alpha1",
        "kind": "RLJob",
        "metadata": {"name": "example"},
        "spec": {
            "pools": [{"name": "main", "nodes": 1, "gpusPerNode": 2}],
            "training": {
                "model": {"source": "owner/model"},
                "dataset": {"type": "File", "file": {"path": "train.jsonl"}, "maxPromptTokens": 64},
                "rewards": [{"type": "MathAnswer"}],
                "rollout": {"groupSize": 4, "maxNewTokens": 64},
                "steps": 10,
                "batchSize": 8,
            },
        },
    }
    return edited(job, edits or {})


def edited(job: Wire, edits: Mapping[str, object]) -> Wire:
    """A copy of the job with values set (or REMOVED) at wire paths such as `spec.pools[0].name`.

    Missing mappings on the path are created. A list index may be at most one past the end.
    """
    result = copy.deepcopy(job)
    for path, value in edits.items():
        parts = [int(part[1:-1]) if part[0] == "[" else part for part in re.findall(r"\[\d+\]|[^.\[\]]+", path)]
        place: object = result
        for part, following in itertools.pairwise(parts):
            place = _entered(place, part, [] if isinstance(following, int) else {})
        _set(place, parts[-1], value)
    return result


def _entered(place: object, part: str | int, empty: object) -> object:
    if isinstance(place, dict):
        return place.setdefault(part, empty)
    assert isinstance(place, list)
    assert isinstance(part, int)
    if part == len(place):
        place.append(empty)
    return place[part]


def _set(place: object, part: str | int, value: object) -> None:
    if isinstance(place, dict):
        if value is REMOVED:
            del place[part]
        else:
            place[part] = value
        return
    assert isinstance(place, list)
    assert isinstance(part, int)
    place[part : part + 1] = [value]
