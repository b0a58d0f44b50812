"""`rljob plan --search`: the best placements of a job's roles, and why the others lose."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from rich.text import Text

from rljob_api.v1alpha1.spec import RLJobSpec
from rljob_cli.plan.changes import placement_changes
from rljob_cli.plan.document import placement_document, seconds_document
from rljob_cli.plan.gpus import selected_kind
from rljob_cli.plan.mapping import JobMapping
from rljob_cli.plan.picture import picture
from rljob_cli.plan.text import (
    GIB,
    PlanHead,
    head_lines,
    knob_lines,
    last_line,
    memory_lines,
    number,
    time_lines,
    wrapped,
)
from rljob_cli.tables import table
from rljob_planner.job_placement import spec_with
from rljob_planner.memory.changes import Change
from rljob_planner.placement import PlacedPool, Placement, Schedule
from rljob_planner.plan import Plan
from rljob_planner.search.results import Candidate, SearchResult

_STYLES = {"+": "green", "-": "red", "~": "yellow"}


def search_lines(found: JobMapping, head: PlanHead, own: Plan | None, *, explain: bool) -> Iterator[Text]:
    """The best placements, and the first of those that can run in full. `own` is the plan of the file as it is, None
    where its pools do not fit into the cluster."""
    result, best = found.result, found.best
    shown = best or _second_choice(result)
    yield from head_lines(shown, head)
    if own is not None:
        words = f"a step {number(own.step.total.likely)} s, memory {own.verdict.value}"
        yield Text(f"  {'as it is':12} {words}")
        yield wrapped(placement_words(own.placement), " " * 15, "dim")
    yield Text()
    if found.missed is not None and found.missed.nearest_miss is not None:
        yield wrapped(" ".join(found.missed.nearest_miss.advice))
        yield Text()
    if result.candidates:
        yield from _candidate_lines(result, found.changes)
    for sentence in (*result.refused, *result.limits):
        yield wrapped(sentence, "  ", "dim")
    yield Text()
    yield Text(_title(result), "bold")
    yield from _in_full(shown, explain=explain)
    if (free := head.num_gpus - shown.placement.num_gpus) > 0:
        yield Text()
        yield wrapped(
            f"{free} of the {head.num_gpus} GPUs stay free: nothing that runs today is clearly faster with them."
        )
    if result.nearest_miss is not None and not result.candidates:
        yield from knob_lines(result.nearest_miss.plan)
        for sentence in result.nearest_miss.advice:
            yield wrapped(sentence)
    if best is not None:
        yield Text()
        yield from _change_lines(found, best.placement, head.labels)
    yield Text()
    yield last_line(shown, "with the changes above" if found.changes else "")


def _second_choice(result: SearchResult) -> Plan:
    if result.candidates:
        return result.candidates[0].plan
    assert result.nearest_miss is not None, "a search finds something or says what came closest"
    return result.nearest_miss.plan


def _title(result: SearchResult) -> str:
    if result.best_today is not None:
        return "The best" if _is_first(result) else "The best that runs today"
    return "None of these can run yet; the first in full" if result.candidates else "No mapping fits. The nearest miss"


def _is_first(result: SearchResult) -> bool:
    return bool(result.candidates) and result.candidates[0].runs_today


def _in_full(plan: Plan, *, explain: bool) -> Iterator[Text]:
    for line in picture(plan.placement, plan.workload):
        yield Text(f"  {line}")
    yield Text()
    yield from memory_lines(plan, explain=explain)
    yield Text()
    yield from time_lines(plan, explain=explain)
    for note in plan.notes:
        yield Text()
        yield wrapped(note)


def _candidate_lines(result: SearchResult, changes: Sequence[Change]) -> Iterator[Text]:
    rows = []
    for at, candidate in enumerate(result.candidates):
        worst, total = candidate.plan.worst, candidate.plan.step.total
        low, high = number(total.low), number(total.high)
        rows.append(
            (
                Text(str(at + 1)),
                Text(f"{number(total.likely):>6}"),
                Text(f"{low} to {high}"),
                Text("" if at == 0 else "tie" if candidate.is_tie else _slower(candidate, result)),
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


def _slower(candidate: Candidate, result: SearchResult) -> str:
    first = result.candidates[0].seconds
    return f"{candidate.seconds / first - 1:+.0%}"


def placement_words(placement: Placement) -> str:
    """`actor+rollout on 1x8 H100 (shards of 4, TP 2); ref on 1x8 H100`. TP is tensor, SP sequence parallel."""
    words = "; ".join(_pool_words(pool) for pool in placement.pools)
    return words if placement.schedule is Schedule.SYNCHRONOUS else f"{words}; {placement.schedule.value}"


def _pool_words(pool: PlacedPool) -> str:
    roles = "+".join(role.value for role in pool.roles)
    layouts = []
    sizes = Counter(layout.shard_size for layout in pool.layouts.values())
    if sizes and (len(sizes) > 1 or next(iter(sizes)) != pool.num_gpus):
        of_roles = (f"{role.value} {pool.layouts[role].shard_size}" for role in pool.roles if role in pool.layouts)
        layouts.append(f"shards of {next(iter(sizes))}" if len(sizes) == 1 else f"shards: {', '.join(of_roles)}")
    if pool.rollout is not None and pool.rollout.tensor_parallel > 1:
        layouts.append(f"TP {pool.rollout.tensor_parallel}")
    shares = {layout.sequence_parallel for layout in pool.layouts.values()} - {1}
    if shares:
        layouts.append(f"SP {max(shares)}")
    inner = f" ({', '.join(layouts)})" if layouts else ""
    return f"{roles} on {pool.nodes}x{pool.gpus_per_node} {pool.gpu.name}{inner}"


def _change_lines(found: JobMapping, placement: Placement, labels: Mapping[str, tuple[str, str]]) -> Iterator[Text]:
    of_places = placement_changes(found.spec, spec_with(found.spec, placement)).lines()
    of_training = (f"~ {change.field}: {change.before} -> {change.value}" for change in found.changes)
    lines = [*of_training, *of_places, *_selector_changes(found.spec, placement, labels)]
    if not lines:
        yield Text("The file has these pools and places already.")
        return
    yield Text("In the file (--write FILE writes it)", "bold")
    for line in lines:
        yield Text(f"  {line}", _STYLES[line[0]])
    for pool in placement.pools:
        wanted = selected_kind(next((each for each in found.spec.pools if each.name == pool.name), None))
        if wanted is not None and wanted != pool.gpu.name and pool.gpu.name not in labels:
            sentence = (
                f"! pool {pool.name}: its nodeSelector is for nodes with {wanted}, and here it is on {pool.gpu.name}."
            )
            yield wrapped(sentence, "  ", "yellow")
    kinds = {pool.name: pool.gpu.name for pool in placement.pools}
    if len(set(kinds.values())) > 1 and (unknown := [name for name in kinds if kinds[name] not in labels]):
        named = ", ".join(f"{name} {kinds[name]}" for name in unknown)
        sentence = f"Each pool is meant for nodes with other GPUs ({named}): say so in its template.nodeSelector."
        yield wrapped(sentence, "  ")


def _selector_changes(spec: RLJobSpec, placement: Placement, labels: Mapping[str, tuple[str, str]]) -> Iterator[str]:
    """How pools come to nodes of their kind, where there are several."""
    before = {pool.name: pool.template.node_selector for pool in spec.pools}
    for pool in placement.pools:
        chosen = labels.get(pool.gpu.name)
        if chosen is not None and before.get(pool.name, {}).get(chosen[0]) != chosen[1]:
            yield f"~ spec.pools[{pool.name}].template.nodeSelector: {chosen[0]}: {chosen[1]}"


def search_document(found: JobMapping) -> dict[str, object]:
    """For programs."""
    result = found.result
    best, missed = result.best_today, found.missed or result
    return {
        "changes": [{"field": each.field, "value": each.value, "before": each.before} for each in found.changes],
        "candidates": [_candidate(each) for each in result.candidates],
        "bestToday": None if best is None else _candidate(best),
        "refused": list(result.refused),
        "limits": list(result.limits),
        "advice": [] if missed.nearest_miss is None else list(missed.nearest_miss.advice),
    }


def _candidate(candidate: Candidate) -> dict[str, object]:
    plan = candidate.plan
    return {
        "placement": placement_document(plan.placement),
        "verdict": plan.verdict.name,
        "memoryBytes": round(plan.worst.total),
        "memoryLimit": round(plan.worst.limit),
        "stepSeconds": seconds_document(plan.step.total),
        "isTie": candidate.is_tie,
        "runsToday": candidate.runs_today,
        "reasons": list(candidate.reasons),
    }
