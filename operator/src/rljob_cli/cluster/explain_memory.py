"""What `rljob explain` adds for a job that has run out of memory, or may: what takes it, and which field to change.

By the planner, from the job's file alone: nothing where it does not know the model or the kind of GPUs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from rich.text import Text

from rljob_api.conditions import ConditionType, Reason
from rljob_api.standard_streams import printable
from rljob_api.v1alpha1.spec import RLJobSpec
from rljob_cli.cluster.job_state import condition, ending, newest_attempt
from rljob_cli.cluster.stored_job import StoredJob
from rljob_cli.errors import CliError
from rljob_planner.errors import PlanError
from rljob_planner.host_memory import host_needs, told_need
from rljob_planner.job_memory import memory_outlook, shown, told
from rljob_planner.memory_types import Verdict

_OF_A_GPU = re.compile(r"out of memory|too little memory|OutOfMemoryError|there is too little", re.IGNORECASE)
"""In the words of torch, vLLM and the trainer."""
_MAX_CHANGES = 4
_MAX_COMMON = ("spec.training.maxTokensPerMicroBatch", "spec.training.rollout.gpuMemoryUtilization")


def memory_text(job: StoredJob) -> Iterator[Text]:
    """Nothing for a job whose memory nobody has complained about."""
    reason, message = _why(job)
    if reason == Reason.OUT_OF_MEMORY:
        yield from _host_text(job, message)
    elif _OF_A_GPU.search(message):
        yield from _device_text(job)
    else:
        yield from _warning_text(job)


def _why(job: StoredJob) -> tuple[str, str]:
    """Why the job, or its newest attempt, has ended."""
    end, following, newest = ending(job.status), job.status.next_attempt, newest_attempt(job)
    if end is not None:
        return end.reason, end.message
    if following is not None:
        return following.reason, following.message or ""
    return (newest.reason or "", newest.message or "") if newest is not None and newest.ended is not None else ("", "")


def _host_text(job: StoredJob, message: str) -> Iterator[Text]:
    """A container's memory is not that of its GPUs."""
    spec = _spec(job)
    try:
        needs = () if spec is None else host_needs(spec)
    except PlanError:
        needs = ()
    for need in needs:
        if f"-{need.pool}-" in message or "pod " not in message:
            yield Text(f"  {told_need(need)}")


def _device_text(job: StoredJob) -> Iterator[Text]:
    spec = _spec(job)
    try:
        outlook = None if spec is None else memory_outlook(spec)
    except PlanError:
        outlook = None
    if outlook is None:
        yield Text("  `rljob plan` for the job's file, with --gpu, says what takes memory and which field to change")
        return
    yield Text(f"  by an estimate most is taken in pool {outlook.worst.pool}: {shown(outlook.worst)}")
    for knob in outlook.knobs[:_MAX_CHANGES]:
        yield Text(f"  what would do: {told(knob)}")
    if outlook.verdict is Verdict.FITS:
        yield Text(f"  so the estimate is wrong for this job, or its machines; lower {' or '.join(_MAX_COMMON)}")


def _warning_text(job: StoredJob) -> Iterator[Text]:
    """What the operator has said before anything was made."""
    valid, end = condition(job.status, ConditionType.SPEC_VALID), ending(job.status)
    is_told = valid is not None and valid.reason == Reason.MEMORY_TOO_SMALL
    if valid is not None and is_told and not (end is not None and end.is_complete):
        yield Text(f"  {printable(valid.message)}", "yellow")


def _spec(job: StoredJob) -> RLJobSpec | None:
    try:
        return job.spec()
    except CliError:
        return None
