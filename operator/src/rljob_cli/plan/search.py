"""`rljob plan --search`: the best placements of a job's roles, and why the others lose.

Where nothing fits, those of the job with the changes of its training that would make it fit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rich.text import Text

from rljob_api.v1alpha1.spec import RLJobSpec, RolloutRole, TrainRole
from rljob_api.yaml_text import read_yaml
from rljob_cli.differences import differences
from rljob_cli.plain_text import table
from rljob_cli.plan.document import placement_document, plain
from rljob_cli.plan.gpus import selected_kind
from rljob_cli.plan.text import (
    GIB,
    PlanHead,
    head_lines,
    knob_lines,
    last_line,
    memory_lines,
    note_lines,
    number,
    placement_words,
    time_lines,
    wrapped,
)
from rljob_planner.constants import Constants
from rljob_planner.gpus import Cluster
from rljob_planner.job_placement import spec_with, with_selectors
from rljob_planner.memory.changes import Change
from rljob_planner.plan import Plan
from rljob_planner.search.mapping import search
from rljob_planner.search.results import Candidate, SearchResult
from rljob_planner.workload import Placement, Workload

Labels = Mapping[str, tuple[str, str]]


@dataclass(frozen=True)
class JobMapping:
    """What a search has found."""

    spec: RLJobSpec
    """The job, with `changes`."""
    result: SearchResult
    changes: tuple[Change, ...] = ()
    """Of the job's training: those without which nothing fits."""
    missed: SearchResult | None = None
    """Of the job without them."""

    @property
    def best(self) -> Plan | None:
        """The best that this version can run."""
        return None if self.result.best_today is None else self.result.best_today.plan


def find_mapping(spec: RLJobSpec, workload: Workload, cluster: Cluster, constants: Constants) -> JobMapping:
    """The best mappings of the job; where none fits, those of the job with the changes of its training that would make
    the nearest miss fit. Raises PlanError."""
    result = search(workload, cluster, constants, pool_names=[pool.name for pool in spec.pools])
    changed = None if result.nearest_miss is None else result.nearest_miss.changed
    if changed is None or changed.result.best_today is None:
        return JobMapping(spec, result)
    # A job that learns something else is not what was asked for.
    if any(change.is_drastic for change in changed.changes):
        return JobMapping(spec, result)
    return JobMapping(changed_spec(spec, changed.changes), changed.result, changed.changes, missed=result)


def changed_spec(spec: RLJobSpec, changes: Sequence[Change]) -> RLJobSpec:
    """The job with these values in its fields; `rewards[]` in a field is the reward with a model."""
    wire = spec.to_wire()
    for change in changes:
        *way, last = change.field.removeprefix("spec.").split(".")
        place: object = wire
        for part in way:
            assert isinstance(place, dict), "a field is in a block"
            place = place.setdefault(part.removesuffix("[]"), {})
            if isinstance(place, list):
                place = next(entry for entry in place if "rewardModel" in entry)
        assert isinstance(place, dict), "a field is in a block"
        place[last] = read_yaml(change.value).value
    return RLJobSpec.from_wire(wire)


def placed_spec(spec: RLJobSpec, placement: Placement, labels: Labels) -> RLJobSpec:
    """The job with these pools and places, and pools that choose nodes of their kind where `labels` has it. What a role
    says already stays as it is written. Raises PlanError for a placement that cannot run."""
    placed = spec_with(spec, placement)
    roles: dict[str, TrainRole | RolloutRole] = dict(placed.roles)
    for name, before in spec.roles:
        now, same = roles[name], dict[str, object]()
        if before.pool is not None and before.pool == (now.pool or placed.pools[0].name):
            same["pool"] = before.pool
        if isinstance(before, TrainRole) and isinstance(now, TrainRole) and before.sequence_parallel == 1:
            same["sequence_parallel"] = now.num_sequence_ranks
        roles[name] = now.model_copy(update=same)
    placed = placed.model_copy(update={"roles": placed.roles.model_copy(update=roles)})
    return with_selectors(placed, placement, labels)


def search_lines(
    found: JobMapping, head: PlanHead, file: RLJobSpec, own: Plan | None, *, explain: bool
) -> Iterator[Text]:
    """The best placements, and the first of those that can run in full. `own` is the plan of the `file` as it is, None
    where its pools do not fit into the cluster."""
    result, best = found.result, found.best
    shown = best or _second_choice(result)
    yield from head_lines(shown, head)
    if own is not None:
        yield Text(f"  {'as it is':12} a step {number(own.step.total.likely)} s, memory {own.verdict.value}")
        yield wrapped(placement_words(own.placement), " " * 15, "dim")
    yield Text()
    if found.missed is not None and found.missed.nearest_miss is not None:
        yield wrapped(found.missed.nearest_miss.advice)
        yield Text()
    if result.candidates:
        yield from _candidate_lines(result, found.changes)
    for sentence in result.limits:
        yield wrapped(sentence, "  ", "dim")
    yield Text()
    yield Text(_title(result), "bold")
    yield wrapped(placement_words(shown.placement), "  ")
    yield Text()
    yield from memory_lines(shown, explain=explain)
    yield Text()
    yield from time_lines(shown, explain=explain)
    yield from note_lines(shown)
    if (free := head.num_gpus - shown.placement.num_gpus) > 0:
        yield Text()
        yield wrapped(
            f"{free} of the {head.num_gpus} GPUs stay free: nothing that runs today is clearly faster with them."
        )
    if result.nearest_miss is not None and not result.candidates:
        yield from knob_lines(result.nearest_miss.plan)
        yield wrapped(result.nearest_miss.advice)
    if best is not None:
        yield Text()
        yield from _change_lines(file, found, best.placement, head.labels)
    yield Text()
    yield last_line(shown, "with the changes above" if found.changes else "")


def search_document(found: JobMapping) -> dict[str, object]:
    """For programs."""
    result = found.result
    best, missed = result.best_today, found.missed or result
    return {
        "changes": plain(found.changes),
        "candidates": [_candidate_document(each) for each in result.candidates],
        "bestToday": None if best is None else _candidate_document(best),
        "limits": list(result.limits),
        "advice": [] if missed.nearest_miss is None else [missed.nearest_miss.advice],
    }


def _candidate_document(candidate: Candidate) -> dict[str, object]:
    plan = candidate.plan
    return {
        "placement": placement_document(plan.placement),
        "verdict": plan.verdict.name,
        "memoryBytes": round(plan.worst.total),
        "memoryLimit": round(plan.worst.limit),
        "stepSeconds": plain(plan.step.total),
        "isTie": candidate.is_tie,
        "runsToday": candidate.runs_today,
        "reasons": list(candidate.reasons),
    }


def _second_choice(result: SearchResult) -> Plan:
    if result.candidates:
        return result.candidates[0].plan
    assert result.nearest_miss is not None, "a search finds something or says what came closest"
    return result.nearest_miss.plan


def _title(result: SearchResult) -> str:
    if result.best_today is not None:
        is_first = bool(result.candidates) and result.candidates[0].runs_today
        return "The best" if is_first else "The best that runs today"
    return "None of these can run yet; the first in full" if result.candidates else "No mapping fits. The nearest miss"


def _candidate_lines(result: SearchResult, changes: Sequence[Change]) -> Iterator[Text]:
    rows = []
    for at, candidate in enumerate(result.candidates):
        worst, total = candidate.plan.worst, candidate.plan.step.total
        behind = f"{candidate.seconds / result.candidates[0].seconds - 1:+.0%}"
        rows.append(
            (
                Text(str(at + 1)),
                Text(f"{number(total.likely):>6}"),
                Text(f"{number(total.low)} to {number(total.high)}"),
                Text("" if at == 0 else "tie" if candidate.is_tie else behind),
                Text(f"{worst.total / GIB:.1f} of {worst.limit / GIB:.1f}"),
                Text("yes", "green") if candidate.runs_today else Text("no", "yellow"),
                Text(placement_words(candidate.plan.placement)),
            )
        )
    assumed = " and ".join(f"{change.field}: {change.value}" for change in changes)
    yield Text(f"The best placements{f' with {assumed}' if assumed else ''}", "bold")
    lines = table(("", "STEP s", "RANGE", "", "GiB", "RUNS TODAY", "WHERE"), rows, "  ")
    yield lines[0]
    for line, candidate in zip(lines[1:], result.candidates, strict=True):
        yield line
        if candidate.reasons:
            yield wrapped("; ".join(candidate.reasons), "       ", "dim")


def _change_lines(file: RLJobSpec, found: JobMapping, placement: Placement, labels: Labels) -> Iterator[Text]:
    lines = differences(file, placed_spec(found.spec, placement, labels))
    if not lines:
        yield Text("The file has these pools and places already.")
        return
    yield Text("In the file (--write FILE writes it)", "bold")
    for line in lines:
        yield Text(f"  ~ {line}", "yellow")
    kinds = {pool.name: pool.gpu.name for pool in placement.pools}
    for pool in file.pools:
        wanted, kind = selected_kind(pool), kinds.get(pool.name)
        if wanted is not None and kind is not None and wanted != kind and kind not in labels:
            sentence = f"! pool {pool.name}: its nodeSelector is for nodes with {wanted}, and here it is on {kind}."
            yield wrapped(sentence, "  ", "yellow")
    if len(set(kinds.values())) > 1 and (unknown := [name for name in kinds if kinds[name] not in labels]):
        named = ", ".join(f"{name} {kinds[name]}" for name in unknown)
        sentence = f"Each pool is meant for nodes with other GPUs ({named}): say so in its template.nodeSelector."
        yield wrapped(sentence, "  ")
