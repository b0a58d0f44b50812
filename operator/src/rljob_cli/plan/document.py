"""`rljob plan --json`: a plan for programs. Whole bytes, and seconds; names as in the job file, and words of ours in
capitals, which stay when those for people change.

Documents have `formatVersion` and `kind`: `Plan`, here, or those of run_document.py. `verdict` is of what the exit
code speaks of: the file's own pools, or with --search the best placement that can run today (with --write as it is
written, else without changes of the job); `verdictOfFile` is then that of the file's own pools, null where they do not
fit into the cluster. All else at the top is of the file's own pools, and what was found is under `search`."""

from __future__ import annotations

import json
from collections.abc import Mapping

from rich.console import Console

from rljob_api.standard_streams import write_utf8
from rljob_cli.plan.text import PlanHead
from rljob_planner.gpus import Gpu
from rljob_planner.memory.knobs import Knob
from rljob_planner.memory_types import PhaseMemory, verdict_of
from rljob_planner.placement import PlacedPool, Placement
from rljob_planner.plan import Plan
from rljob_planner.timing_types import Seconds
from rljob_planner.workload import Workload

FORMAT_VERSION = "1.0"
"""A reader refuses another number before the point; behind it fields are added."""
KIND = "Plan"


def plan_document(plan: Plan, head: PlanHead) -> dict[str, object]:
    """Of the job as its file has it."""
    low, likely, high = plan.gpu_hours
    return {
        "formatVersion": FORMAT_VERSION,
        "kind": KIND,
        "job": head.job,
        "verdict": plan.verdict.name,
        "models": {
            role.value: {"name": found.shape.name, "parameters": found.shape.num_parameters, "origin": found.origin}
            for role, found in head.shapes.items()
        },
        "workload": _workload(plan.workload),
        "placement": placement_document(plan.placement),
        "memory": [_memory(phase) for phase in plan.all_phases],
        "step": {
            "seconds": seconds_document(plan.step.total),
            "boundBy": plan.step.bound_by,
            "phases": [
                {
                    "name": phase.name,
                    "pool": phase.pool,
                    "seconds": seconds_document(phase.seconds),
                    "boundBy": phase.bound_by,
                    "assumption": phase.assumption,
                    "formula": phase.formula,
                }
                for phase in plan.step.phases
            ],
        },
        "run": {
            "steps": plan.workload.num_steps,
            "seconds": seconds_document(plan.run_seconds),
            "gpuHours": seconds_document(Seconds(low, likely, high)),
        },
        "sequencesAtOnce": plan.sequences_at_once,
        "changes": [_knob(knob) for knob in plan.knobs],
        "nearestMiss": None if plan.nearest_miss is None else _knob(plan.nearest_miss),
        "notes": list(plan.notes),
    }


def printed(document: Mapping[str, object], console: Console) -> None:
    """As JSON, without the console's wrapping and colours."""
    write_utf8(console.file, json.dumps(document, indent=2, ensure_ascii=False) + "\n")


def placement_document(placement: Placement) -> dict[str, object]:
    """Pools and who is on them."""
    return {
        "schedule": placement.schedule.name,
        "runsToday": placement.runs_today,
        "pools": [_pool(pool) for pool in placement.pools],
    }


def _pool(pool: PlacedPool) -> dict[str, object]:
    roles: dict[str, object] = {
        role.value: {"shardSize": layout.shard_size, "sequenceParallel": layout.sequence_parallel}
        for role, layout in pool.layouts.items()
    }
    if pool.rollout is not None:
        roles["rollout"] = {"tensorParallel": pool.rollout.tensor_parallel, "engines": pool.rollout.num_engines}
    return {
        "name": pool.name,
        "nodes": pool.nodes,
        "gpusPerNode": pool.gpus_per_node,
        "gpu": _gpu(pool.gpu),
        "roles": roles,
    }


def _gpu(gpu: Gpu) -> dict[str, object]:
    return {
        "name": gpu.name,
        "memoryBytes": round(gpu.memory_bytes),
        "flops": gpu.flops,
        "bandwidth": gpu.bandwidth,
        "linkBandwidth": gpu.link_bandwidth,
        "networkBandwidth": gpu.network_bandwidth,
    }


def _workload(workload: Workload) -> dict[str, object]:
    lengths = workload.lengths
    return {
        "prompts": workload.batch_size,
        "responsesPerPrompt": workload.group_size,
        "updates": workload.num_updates,
        "promptTokens": {"mean": lengths.prompt_mean, "max": lengths.prompt_max},
        "responseTokens": {"mean": lengths.response_mean, "max": lengths.response_max},
        "assumption": lengths.assumption,
    }


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
        "changes": [{"field": each.field, "value": each.value, "before": each.before} for each in knob.changes],
        "verdict": knob.verdict.name,
        "worst": _memory(knob.worst),
        "stepSeconds": None if knob.step_seconds is None else seconds_document(knob.step_seconds),
    }


def seconds_document(seconds: Seconds) -> dict[str, float]:
    """A range."""
    return {"low": seconds.low, "likely": seconds.likely, "high": seconds.high}
