"""`rljob plan --json`: for programs. Bytes are whole numbers and times are seconds. Names are those of the planner's
types, and values of enums are their names, which stay the same when the text for people changes.

`verdict` and the exit code agree: both are of the file's own pools, or with --search of the best placement that can run
today (with --write as it is written, else without changes of the job). With --search `verdictOfFile` is the verdict of
the file's own pools, null where they do not fit into the cluster, and `search` holds what was found.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import is_dataclass
from enum import Enum

from pydantic.alias_generators import to_camel
from rich.console import Console

from rljob_api.standard_streams import write_utf8
from rljob_cli.plan.text import PlanHead
from rljob_planner.plan import Plan

_SHOWN: Mapping[str, tuple[str, ...]] = {
    "Plan": (
        *("verdict", "workload", "placement", "phases", "worst", "step", "run_seconds", "gpu_hours"),
        *("sequences_at_once", "knobs", "nearest_miss", "notes"),
    ),
    "Workload": ("name", "batch_size", "group_size", "mini_batch_size", "num_updates", "num_steps", "lengths"),
    "Placement": ("schedule", "runs_today", "pools"),
    "TrainLayout": ("shard_size", "sequence_parallel"),
    "RolloutLayout": ("tensor_parallel", "num_engines"),
    "PhaseMemory": ("phase", "pool", "total", "limit", "spare", "lacks", "parts"),
    "Knob": ("changes", "verdict", "worst", "step_seconds"),
    "ModelShape": ("name", "num_parameters"),
    "SearchResult": ("candidates", "best_today", "advice", "changes"),
    "Candidate": ("plan", "is_tie", "reasons"),
}
"""By the name of a type the fields and properties that are shown; of other types all fields are."""
_BYTES = {"total", "limit", "spare", "lacks", "num_bytes", "memory_bytes"}


def printed(document: Mapping[str, object], console: Console) -> None:
    """As JSON, without the console's wrapping and colours. A reader refuses a `formatVersion` with another number
    before the point; behind it fields are added."""
    whole = {"formatVersion": "1.0", "kind": "Plan", **document}
    write_utf8(console.file, json.dumps(whole, indent=2, ensure_ascii=False) + "\n")


def plan_document(plan: Plan, head: PlanHead) -> dict[str, object]:
    """The plan of the job as its file has it, and where the shapes of its models are from."""
    return {**_fields(plan), "models": plain(head.shapes)}


def plain(value: object) -> object:
    """The value in JSON's types."""
    if is_dataclass(value) and not isinstance(value, type):
        return _fields(value)
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, tuple | list):
        return [plain(each) for each in value]
    return {str(key): plain(each) for key, each in value.items()} if isinstance(value, Mapping) else value


def _fields(value: object) -> dict[str, object]:
    names = _SHOWN.get(type(value).__name__) or tuple(vars(value))
    found = {name: getattr(value, name) for name in names}
    return {
        to_camel(name): round(each) if name in _BYTES and isinstance(each, float) else plain(each)
        for name, each in found.items()
    }
