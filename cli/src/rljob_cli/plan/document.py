"""Writes the plan of a job file as JSON, for programs (`rljob plan --json`). docs/planning.md lists its keys.

Memory is in bytes, as whole numbers; times are in seconds. Keys are the planner's names in camel case. An enum is
written as its name (`TOO_LARGE`), because the text that people see may change.

`verdict` agrees with the exit code. Without --search it is about the pools of the file. With --search it is about the
best supported placement: with --write, of the job that is written, otherwise of a job in which only pools and roles
differ from the file. It is `TOO_LARGE` if there is no such placement.

With --search there are two more keys: `verdictOfFile` is about the pools of the file (null if the cluster has no room
for them), and `search` has the results.
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

_WRITTEN_FIELDS: Mapping[str, tuple[str, ...]] = {
    "Plan": (
        *("verdict", "workload", "placement", "phases", "fullest_phase", "step", "run_seconds", "gpu_hours"),
        *("sequences_at_once", "proposals", "nearest_miss", "notes"),
    ),
    "Workload": ("name", "batch_size", "group_size", "mini_batch_size", "num_updates", "num_steps", "lengths"),
    "Placement": ("schedule", "is_supported", "pools"),
    "Gpu": (
        *("name", "memory_bytes", "flops", "bandwidth", "link_bandwidth", "network_bandwidth", "host_bandwidth"),
        "is_cpu",
    ),
    "TrainLayout": ("shard_size", "sequence_parallel"),
    "RolloutLayout": ("tensor_parallel", "num_engines"),
    "PhaseMemory": ("phase", "pool", "total", "limit", "spare", "kv_cache_shortage", "parts"),
    "Proposal": ("changes", "verdict", "fullest_phase", "step_seconds"),
    "ModelShape": ("name", "num_parameters"),
    "SearchResult": ("candidates", "best_supported", "advice", "changes"),
    "Candidate": ("plan", "is_tie", "reasons"),
}
"""By type: the fields and properties that are written. Of types that are missing here, all fields are written."""
_BYTE_FIELDS = {"total", "limit", "spare", "kv_cache_shortage", "num_bytes", "memory_bytes"}
"""Fields in bytes, which are rounded to whole numbers."""


def print_document(document: Mapping[str, object], console: Console) -> None:
    """Writes the document to the console's file as JSON, without colors or wrapped lines.

    Readers must reject a `formatVersion` with another major version. A new minor version only adds keys.
    """
    whole = {"formatVersion": "1.1", "kind": "Plan", **document}
    write_utf8(console.file, json.dumps(whole, indent=2, ensure_ascii=False) + "\n")


def plan_document(plan: Plan, head: PlanHead) -> dict[str, object]:
    """The plan of the job file's own pools, with the shape of each model and where the shape was found."""
    return {**_fields(plan), "models": as_json(head.shapes)}


def as_json(value: object) -> object:
    """Converts a value to JSON types."""
    if is_dataclass(value) and not isinstance(value, type):
        return _fields(value)
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, tuple | list):
        return [as_json(each) for each in value]
    return {str(key): as_json(each) for key, each in value.items()} if isinstance(value, Mapping) else value


def _fields(value: object) -> dict[str, object]:
    names = _WRITTEN_FIELDS.get(type(value).__name__) or tuple(vars(value))
    found = {name: getattr(value, name) for name in names}
    return {
        to_camel(name): round(each) if name in _BYTE_FIELDS and isinstance(each, float) else as_json(each)
        for name, each in found.items()
    }
