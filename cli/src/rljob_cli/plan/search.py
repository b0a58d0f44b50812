"""Formats the output of `rljob plan --search`: the best placements of a job's roles, and why each is not the first.

If the job fits in no placement, the output has the placements of a changed job, and the changes that make it fit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.text import Text

from rljob.differences import differences
from rljob_api.v1alpha1.spec import RLJobSpec
from rljob_api.yaml_text import read_yaml
from rljob_cli.plan.text import (
    PlanHead,
    head_lines,
    last_line,
    number,
    placement_text,
    plan_body,
    proposal_lines,
    seconds_cells,
    wrapped,
)
from rljob_cli.table import table
from rljob_planner.clusters import PRODUCT_LABEL
from rljob_planner.job_memory import known_gpus
from rljob_planner.kv_cache import GIB
from rljob_planner.memory.job_changes import Change
from rljob_planner.plan import Plan
from rljob_planner.search.best_placement import SearchResult
from rljob_planner.search.ranking import Candidate
from rljob_planner.workload import Placement

_NOT_TRIED = (
    "Not tried: pools with part of a node, or with a number of nodes other than 1, 2, 3, 4, 6, 8, 12, 16, ...; pools"
    " with nodes of two GPU types; sequence and tensor parallelism across nodes or above 8; {settings}."
)


def changed_spec(spec: RLJobSpec, changes: Sequence[Change]) -> RLJobSpec:
    """The job's spec with these changes. `rewards[]` in the path of a field means the first reward with a reward
    model."""
    wire = spec.to_wire()
    for change in changes:
        *block_names, field = change.field.removeprefix("spec.").split(".")
        block: object = wire
        for name in block_names:
            assert isinstance(block, dict), "every field is in a block"
            block = block.setdefault(name.removesuffix("[]"), {})
            if isinstance(block, list):
                block = next(entry for entry in block if "rewardModel" in entry)
        assert isinstance(block, dict), "every field is in a block"
        block[field] = read_yaml(change.value).value
    return RLJobSpec.from_wire(wire)


def search_lines(
    found: SearchResult,
    head: PlanHead,
    file_spec: RLJobSpec,
    new_spec: RLJobSpec,
    file_plan: Plan | None,
    *,
    explain: bool,
) -> Iterator[Text]:
    """The best placements, then the best supported one in detail.

    Args:
        file_spec: the spec of the job file.
        new_spec: the spec with the best supported placement; equal to `file_spec` if there is none.
        file_plan: the plan for the pools of the job file; None if the cluster has no room for them.
    """
    shown, title = _plan_in_detail(found)
    yield from head_lines(shown, head)
    if file_plan is not None:
        likely, verdict = file_plan.step.total.likely, file_plan.verdict
        yield Text(f"  {'as written':12} {number(likely)} s per step, memory {verdict.value}")
        yield wrapped(placement_text(file_plan.placement), " " * 15, "dim")
    yield Text()
    if found.candidates:
        if found.advice:
            yield wrapped(" ".join(found.advice))
            yield Text()
        yield from _candidate_lines(found.candidates, found.changes)
    settings = "other job settings" if found.changes else "changes of job settings, such as maxTokensPerMicroBatch"
    yield wrapped(_NOT_TRIED.format(settings=settings), "  ", "dim")
    yield Text()
    yield Text(title, "bold")
    yield wrapped(placement_text(shown.placement), "  ")
    yield from plan_body(shown, explain=explain)
    free = head.num_gpus - shown.placement.num_gpus
    if free > 0 and found.best_supported is not None:
        yield Text()
        sentence = "no placement that the trainer can run is clearly faster with them"
        yield wrapped(f"{free} of the {head.num_gpus} GPUs stay free: {sentence}.")
    if not found.candidates:
        yield from proposal_lines(shown)
        yield Text()
        yield wrapped(" ".join(found.advice))
    if found.best_supported is not None:
        yield Text()
        yield from _change_lines(file_spec, new_spec, shown.placement, head)
    yield Text()
    yield last_line(shown, "with the changes above" if found.changes else "")


def _plan_in_detail(found: SearchResult) -> tuple[Plan, str]:
    """The plan that is printed in detail, and the title above it."""
    if found.best_supported is not None:
        is_first = found.candidates[0].is_supported
        return (
            found.best_supported.plan,
            f"The best placement {'' if is_first else 'that the trainer can run '}in detail",
        )
    if found.candidates:
        return found.candidates[
            0
        ].plan, "This version of the trainer can run none of these placements; the first one in detail"
    assert found.nearest_miss is not None, "a search finds placements that fit, or the closest one"
    return found.nearest_miss, "No placement fits; the closest one in detail"


def _candidate_lines(candidates: Sequence[Candidate], changes: Sequence[Change]) -> Iterator[Text]:
    rows: list[tuple[str | Text, ...]] = []
    for at, candidate in enumerate(candidates):
        worst, behind = candidate.plan.fullest_phase, f"{candidate.seconds / candidates[0].seconds - 1:+.0%}"
        rows.append(
            (
                str(at + 1),
                *seconds_cells(candidate.plan.step.total),
                "" if at == 0 else "tie" if candidate.is_tie else behind,
                f"{worst.total / GIB:.1f} of {worst.limit / GIB:.1f}",
                Text("yes", "green") if candidate.is_supported else Text("no", "yellow"),
                placement_text(candidate.plan.placement),
            )
        )
    changed = " and ".join(f"{change.field} to {change.value}" for change in changes)
    yield Text(f"The best placements{f' after changing {changed}' if changed else ''}", "bold")
    head, *lines = table(("", "STEP, s", "RANGE", "", "MEMORY, GiB", "RUNNABLE", "PLACEMENT"), rows, "  ")
    yield head
    for line, candidate in zip(lines, candidates, strict=True):
        yield line
        if candidate.reasons:
            yield wrapped("; ".join(candidate.reasons), "       ", "dim")


def _change_lines(file_spec: RLJobSpec, new_spec: RLJobSpec, placement: Placement, head: PlanHead) -> Iterator[Text]:
    """The changes in the job file, and advice on the selectors of the pools' nodes."""
    lines = differences(file_spec, new_spec)
    if lines:
        yield Text("Changes in the job file (--write FILE writes a new file with them)", "bold")
    else:
        yield Text("The job file already has this placement.")
    for line in lines:
        yield Text(f"  - {line}", "yellow")
    without_selector = []
    for pool, placed in zip(new_spec.pools, placement.pools, strict=True):
        gpu = placed.gpu
        # Kubernetes applies nodeSelector and affinity together, but `known_gpus` ignores the affinity of a pool whose
        # nodeSelector names a GPU type. So the affinity is checked again without the nodeSelector.
        by_affinity = pool.model_copy(update={"template": pool.template.model_copy(update={"node_selector": {}})})
        required = [[kind.name for kind in known_gpus(each)] for each in (pool, by_affinity)]
        if not any(required) and gpu.name not in head.gpus.labels:
            without_selector.append(f"{pool.name} {gpu.name}")
        elif other := next((names[0] for names in required if names and gpu.name not in names), None):
            sentence = (
                f"! pool {pool.name}: its nodeSelector or affinity selects {other}, but this plan uses {gpu.name}"
            )
            yield wrapped(f"{sentence}; change the selector or the affinity.", "  ", "yellow")
    if len({group.gpu.name for group in head.gpus.cluster}) > 1 and without_selector:
        sentence = (
            f"The cluster has several GPU types. Select the nodes of each pool ({', '.join(without_selector)}) in its"
        )
        yield wrapped(f"{sentence} template.nodeSelector, for example with the label {PRODUCT_LABEL}.", "  ")
