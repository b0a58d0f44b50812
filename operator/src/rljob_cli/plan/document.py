"""`rljob plan --json`: for programs. Whole bytes, and seconds; names as in the job file, and words of ours in capitals,
which stay when those for people change.

`verdict` is of what the exit code speaks of: the file's own pools, or with --search the best placement that can run
today (with --write as it is written, else without changes of the job); `verdictOfFile` is then that of the file's own
pools, null where they do not fit into the cluster. All else at the top is of the file's own pools, and what was found
is under `search`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum

from pydantic.alias_generators import to_camel
from rich.console import Console

from rljob_api.standard_streams import write_utf8
from rljob_cli.plan.text import PlanHead
from rljob_planner.memory.knobs import Knob
from rljob_planner.plan import Plan
from rljob_planner.plan_types import PhaseMemory, verdict_of
from rljob_planner.workload import Placement


def printed(document: Mapping[str, object], console: Console) -> None:
    """As JSON, without the console's wrapping and colours. A reader refuses a `formatVersion` with another number
    before the point; behind it fields are added."""
    whole = {"formatVersion": "1.0", "kind": "Plan", **document}
    write_utf8(console.file, json.dumps(whole, indent=2, ensure_ascii=False) + "\n")


def plain(value: object) -> object:
    """Plain types with their fields; words of ours by their names, and bytes as whole numbers."""
    if is_dataclass(value) and not isinstance(value, type):
        given = {each.name: vars(value)[each.name] for each in fields(value)}
        return {to_camel(name): round(it) if name.endswith("_bytes") else plain(it) for name, it in given.items()}
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, tuple | list):
        return [plain(each) for each in value]
    return {str(key): plain(each) for key, each in value.items()} if isinstance(value, Mapping) else value


def plan_document(plan: Plan, head: PlanHead) -> dict[str, object]:
    """Of the job as its file has it."""
    workload, lengths = plan.workload, plan.workload.lengths
    return {
        "job": head.job,
        "verdict": plan.verdict.name,
        "models": {
            role.value: {"name": found.shape.name, "parameters": found.shape.num_parameters, "origin": found.origin}
            for role, found in head.shapes.items()
        },
        "workload": {
            "prompts": workload.batch_size,
            "responsesPerPrompt": workload.group_size,
            "updates": workload.num_updates,
            "promptTokens": {"mean": lengths.prompt_mean, "max": lengths.prompt_max},
            "responseTokens": {"mean": lengths.response_mean, "max": lengths.response_max},
            "assumption": lengths.assumption,
        },
        "placement": placement_document(plan.placement),
        "memory": [_memory(phase) for phase in plan.all_phases],
        "step": {
            "seconds": plain(plan.step.total),
            "boundBy": plan.step.bound_by,
            "phases": plain(plan.step.phases),
        },
        "run": {
            "steps": workload.num_steps,
            "seconds": plain(plan.run_seconds),
            "gpuHours": plain(plan.gpu_hours),
        },
        "sequencesAtOnce": plan.sequences_at_once,
        "changes": [_knob(knob) for knob in plan.knobs],
        "nearestMiss": None if plan.nearest_miss is None else _knob(plan.nearest_miss),
        "notes": list(plan.notes),
    }


def placement_document(placement: Placement) -> dict[str, object]:
    """Pools and who is on them."""
    pools = []
    for pool in placement.pools:
        roles: dict[str, object] = {
            role.value: {"shardSize": layout.shard_size, "sequenceParallel": layout.sequence_parallel}
            for role, layout in pool.layouts.items()
        }
        if pool.rollout is not None:
            roles["rollout"] = {"tensorParallel": pool.rollout.tensor_parallel, "engines": pool.rollout.num_engines}
        size = {"name": pool.name, "nodes": pool.nodes, "gpusPerNode": pool.gpus_per_node}
        pools.append({**size, "gpu": plain(pool.gpu), "roles": roles})
    return {"schedule": placement.schedule.name, "runsToday": placement.runs_today, "pools": pools}


def _memory(phase: PhaseMemory) -> dict[str, object]:
    return {
        "phase": phase.phase.name,
        "pool": phase.pool,
        "bytes": round(phase.total),
        "limit": round(phase.limit),
        "spare": round(phase.spare),
        "kvCacheLacks": round(phase.lacks),
        "verdict": verdict_of((phase,)).name,
        "parts": [
            {"owner": part.owner, "bytes": round(part.num_bytes), "formula": part.formula} for part in phase.parts
        ],
    }


def _knob(knob: Knob) -> dict[str, object]:
    return {
        "changes": plain(knob.changes),
        "verdict": knob.verdict.name,
        "worst": _memory(knob.worst),
        "stepSeconds": plain(knob.step_seconds),
    }
