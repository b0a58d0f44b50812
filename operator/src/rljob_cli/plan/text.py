"""`rljob plan`: what is shown of a plan, short first, its last line the sum of it.

Numbers of memory are GiB of one GPU, the fullest of its pool. A range of seconds is `likely (low to high)`.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from rich.text import Text

from rljob_cli.plain_text import length
from rljob_cli.plan.models import FoundShape
from rljob_cli.plan.picture import picture
from rljob_cli.tables import table
from rljob_planner.memory.knobs import Knob
from rljob_planner.memory_types import PhaseMemory, Verdict
from rljob_planner.model_shape import ModelShape
from rljob_planner.plan import Plan
from rljob_planner.timing_types import Seconds
from rljob_planner.workload import Role

GIB = 2**30
_STYLES = {Verdict.FITS: "green", Verdict.TIGHT: "yellow", Verdict.TOO_LARGE: "red"}
_MAX_KNOBS = 5
_WIDTH = 118


@dataclass(frozen=True)
class PlanHead:
    """What a plan is of."""

    job: str
    """Its name."""
    gpus: str
    """How the GPUs are known."""
    num_gpus: int
    """That there are."""
    shapes: Mapping[Role, FoundShape]
    constants: str = "defaults"
    """Where the planner's constants are from."""
    labels: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """By which nodes of a kind are chosen, where it is known."""


def plan_lines(plan: Plan, head: PlanHead, *, explain: bool = False) -> Iterator[Text]:
    """All that is shown."""
    yield from head_lines(plan, head)
    yield Text()
    for line in picture(plan.placement, plan.workload):
        yield Text(line)
    yield Text()
    yield from memory_lines(plan, explain=explain)
    yield Text()
    yield from time_lines(plan, explain=explain)
    for note in plan.notes:
        yield Text()
        yield wrapped(note)
    yield from knob_lines(plan)
    yield Text()
    yield last_line(plan)


def head_lines(plan: Plan, head: PlanHead) -> Iterator[Text]:
    """The job, its models, what a step is."""
    workload, lengths = plan.workload, plan.workload.lengths
    noun = ("worker" if _is_on_cpus(plan) else "GPU") + ("" if head.num_gpus == 1 else "s")
    used = plan.placement.num_gpus
    number_of = f"{head.num_gpus}" if used == head.num_gpus else f"{used} of {head.num_gpus}"
    yield Text(f"{head.job}: {number_of} {noun} ({head.gpus})", "bold")
    shown = set()
    for role, found in head.shapes.items():
        if found.shape.name not in shown:
            shown.add(found.shape.name)
            size = _billions(found.shape)
            yield Text(f"  {role.value:12} {found.shape.name}, {size} parameters ({found.origin})")
    updates = f"{workload.num_updates} update{'' if workload.num_updates == 1 else 's'}"
    yield Text(f"  {'step':12} {workload.batch_size:,} prompts x {workload.group_size} responses, {updates}")
    tokens = f"prompts of {lengths.prompt_mean:,.0f} tokens (at most {lengths.prompt_max:,})"
    tokens += f", responses of {lengths.response_mean:,.0f} (at most {lengths.response_max:,})"
    yield Text(f"  {'lengths':12} {tokens}")
    if lengths.assumption:
        yield wrapped(lengths.assumption, " " * 15, "dim")
    yield _constants_line(head)


def _constants_line(head: PlanHead) -> Text:
    """From where is what no formula gives."""
    words = "defaults; after a run, rljob plan --calibrate FOLDER fits them to its machine"
    if head.constants != "defaults":
        words = f"calibrated by {head.constants}"
    return Text(f"  {'constants':12} {wrapped(words, ' ' * 15).plain.lstrip()}")


def _billions(shape: ModelShape) -> str:
    number = shape.num_parameters
    return f"{number / 1e9:.2f} billion" if number >= 1e9 else f"{number / 1e6:.2f} million"


def memory_lines(plan: Plan, *, explain: bool) -> list[Text]:
    """Of each pool, phase by phase."""
    lines: list[Text] = []
    for name, phases in plan.phases.items():
        if lines:
            lines.append(Text())
        pool = f" of pool {name}" if len(plan.phases) > 1 else ""
        unit = "worker" if _is_on_cpus(plan) else "GPU"
        lines.append(Text(f"Memory of one {unit}{pool}, GiB", "bold"))
        rows = [_memory_row(phase) for phase in phases]
        found = table(("PHASE", "  USED", "    OF", "", "WHAT"), rows, "  ")
        if not explain:
            lines += found
            continue
        lines.append(found[0])
        for line, phase in zip(found[1:], phases, strict=True):
            lines.append(line)
            lines += [
                Text(f"      {part.owner:24} {part.num_bytes / GIB:8.2f}  {part.formula}", "dim")
                for part in phase.parts
            ]
    return lines


def _memory_row(phase: PhaseMemory) -> tuple[Text, ...]:
    verdict = _verdict_of(phase)
    words = "fits" if verdict is Verdict.FITS else verdict.value
    if phase.lacks > 0:
        words = f"KV cache {phase.lacks / GIB:.1f} short"
    elif verdict is Verdict.TOO_LARGE:
        words = f"{-phase.spare / GIB:.1f} too much"
    elif verdict is Verdict.TIGHT:
        words = f"tight, {phase.spare / GIB:.1f} left"
    shares = ", ".join(f"{owner} {num_bytes / GIB:.1f}" for owner, num_bytes in _by_owner(phase).items())
    return (
        Text(phase.phase.value),
        Text(f"{phase.total / GIB:>6.1f}"),
        Text(f"{phase.limit / GIB:>6.1f}"),
        Text(words, _STYLES[verdict]),
        Text(shares),
    )


def _verdict_of(phase: PhaseMemory) -> Verdict:
    if phase.spare < 0:
        return Verdict.TOO_LARGE
    return Verdict.TIGHT if phase.spare < 0.1 * phase.limit else Verdict.FITS


_ENGINE_OWNERS = ("rollout weights", "engine", "KV cache", "sleeping engine")


def _by_owner(phase: PhaseMemory) -> dict[str, float]:
    """Parts by role; what is none's has its own name."""
    sums: dict[str, float] = {}
    for part in phase.parts:
        role = next((role.value for role in Role if part.owner.startswith(f"{role.value} ")), None)
        owner = "rollout" if part.owner.startswith(_ENGINE_OWNERS) else role or part.owner
        sums[owner] = sums.get(owner, 0.0) + part.num_bytes
    return {owner: num_bytes for owner, num_bytes in sums.items() if num_bytes >= 0.05 * GIB} or sums


def time_lines(plan: Plan, *, explain: bool) -> list[Text]:
    """The phases of a step and their sum."""
    total = plan.step.total
    rows = []
    for phase in plan.step.phases:
        share = phase.seconds.likely / total.likely if total.likely else 0.0
        pool = f" ({phase.pool})" if len(plan.placement.pools) > 1 else ""
        rows.append(_time_row(f"{phase.name}{pool}", phase.seconds, f"{share:.0%}", phase.bound_by))
    rows.append(_time_row("step", total, "", plan.step.bound_by))
    run, (low, likely, high) = plan.run_seconds, plan.gpu_hours
    hours = f"{number(likely)} ({number(low)} to {number(high)}) {_hours(plan)}"
    name = "all steps" if plan.workload.num_steps == 1 else f"{plan.workload.num_steps:,} steps"
    cells = (name, f"{length(run.likely):>6}", f"{length(run.low)} to {length(run.high)}", "", hours)
    rows.append(tuple(map(Text, cells)))
    lines = [Text("Seconds of a step", "bold")]
    found = table(("PHASE", "LIKELY", "RANGE", "SHARE", "BOUND BY"), rows, "  ")
    if not explain:
        return [*lines, *found]
    lines.append(found[0])
    for line, phase in zip(found[1:-2], plan.step.phases, strict=True):
        lines.append(line)
        lines += [Text(f"      {text}", "dim") for text in (phase.formula, phase.assumption) if text]
    lines += found[-2:]
    return lines


def _time_row(name: str, seconds: Seconds, share: str, bound_by: str) -> tuple[Text, ...]:
    spread = f"{number(seconds.low)} to {number(seconds.high)}"
    return Text(name), Text(f"{number(seconds.likely):>6}"), Text(spread), Text(f"{share:>5}"), Text(bound_by)


def number(value: float) -> str:
    """Three digits, and no more than two behind the point."""
    if value >= 99.5:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 9.95 else f"{value:.2f}"


def knob_lines(plan: Plan) -> Iterator[Text]:
    """What would make it fit, or give it room."""
    if plan.verdict is Verdict.FITS:
        return
    yield Text()
    if not plan.knobs:
        yield Text("Nothing that was tried makes it fit.", "bold")
        if plan.nearest_miss is not None:
            yield Text("The nearest miss:")
            yield from _knob_lines([plan.nearest_miss])
        return
    what = "What would make it fit" if plan.verdict is Verdict.TOO_LARGE else "What would give it room"
    yield Text(f"{what}, each worked out anew", "bold")
    yield from _knob_lines(plan.knobs[:_MAX_KNOBS])
    if (left := len(plan.knobs) - _MAX_KNOBS) > 0:
        yield Text(f"  and {left} more with --json", "dim")


def _knob_lines(knobs: Sequence[Knob]) -> list[Text]:
    """A row for each; of several changes each has a row of its own."""
    rows = []
    for knob in knobs:
        for at, change in enumerate(knob.changes):
            text = Text(f"{'~' if at == 0 else ' '} {change.field}: {change.before} -> {change.value}", "yellow")
            rows.append((text, *(_knob_cells(knob) if at == 0 else (Text(), Text(), Text()))))
    return table(("CHANGE", "GiB", "", "STEP s"), rows, "  ")


def _knob_cells(knob: Knob) -> tuple[Text, Text, Text]:
    worst, seconds = knob.worst, knob.step_seconds
    memory = f"{worst.total / GIB:.1f} of {worst.limit / GIB:.1f} in {worst.phase.value}"
    if worst.lacks > 0:
        memory = f"KV cache {worst.lacks / GIB:.1f} short"
    step = "" if seconds is None else number(seconds.likely)
    return Text(memory), Text(knob.verdict.value, _STYLES[knob.verdict]), Text(step)


def last_line(plan: Plan, condition: str = "") -> Text:
    """`Plan: fits, ...`, or `Plan: fits CONDITION, ...`"""
    worst, total = plan.worst, plan.step.total
    where = f" on pool {worst.pool}" if len(plan.phases) > 1 else ""
    memory = f"{worst.total / GIB:.1f} of {worst.limit / GIB:.1f} GiB in {worst.phase.value}{where}"
    if worst.lacks > 0:
        memory = f"in {worst.phase.value}{where} the KV cache is {worst.lacks / GIB:.1f} GiB short"
    line = Text("Plan: ", "bold")
    line.append(plan.verdict.value, f"bold {_STYLES[plan.verdict]}")
    line.append(f" {condition}" if condition else "")
    steps = f"{plan.workload.num_steps:,} step{'' if plan.workload.num_steps == 1 else 's'}"
    line.append(
        f", {memory}; a step {number(total.likely)} s ({number(total.low)} to {number(total.high)});"
        f" {steps} {length(plan.run_seconds.likely)}, {number(plan.gpu_hours[1])} {_hours(plan)}"
    )
    return line


def wrapped(sentence: str, indent: str = "", style: str = "") -> Text:
    """A sentence on as many lines as it takes."""
    filled = textwrap.fill(sentence, _WIDTH, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)
    return Text(filled, style)


def _hours(plan: Plan) -> str:
    return "hours of workers" if _is_on_cpus(plan) else "GPU-hours"


def _is_on_cpus(plan: Plan) -> bool:
    return any(pool.gpu.is_cpu for pool in plan.placement.pools)
