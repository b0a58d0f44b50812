"""Formats a plan for the terminal: the job, memory by phase, seconds by phase, proposals, and a one-line summary.

Memory is in GiB on the fullest GPU of a pool. Seconds are printed as `likely (low to high)`.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rich.text import Text

from rljob.plain_text import duration_text
from rljob_cli.plan.gpus import PoolGpus
from rljob_cli.plan.models import FoundShape
from rljob_cli.table import table
from rljob_planner.kv_cache import GIB
from rljob_planner.memory.proposals import Proposal
from rljob_planner.plan import Plan
from rljob_planner.plan_types import Part, PhaseMemory, Seconds, Verdict, verdict_of
from rljob_planner.workload import PlacedPool, Placement, Role, Schedule

_STYLES = {Verdict.FITS: "green", Verdict.TIGHT: "yellow", Verdict.TOO_LARGE: "red"}
_MAX_PROPOSALS = 5
"""The largest number of proposals that are printed; --json has all."""
_WIDTH = 118
"""The largest number of columns of a printed sentence."""


@dataclass(frozen=True)
class PlanHead:
    """What the first lines of the output need besides the plan."""

    job: str
    """The job's name."""
    gpus: PoolGpus
    shapes: Mapping[Role, FoundShape]
    constants: str
    """Where the planner's constants come from: `defaults`, or the runs that they were fitted to."""

    @property
    def num_gpus(self) -> int:
        """The number of GPUs that the job may use. A placement may leave some of them free."""
        return sum(group.num_gpus for group in self.gpus.cluster)


def plan_lines(plan: Plan, head: PlanHead, *, explain: bool = False) -> Iterator[Text]:
    """The whole output of a plan without --search."""
    yield from head_lines(plan, head)
    for pool in plan.placement.pools:
        yield Text(f"  {'pool ' + pool.name:12} {_pool_text(pool)}")
    yield from plan_body(plan, explain=explain)
    yield from proposal_lines(plan)
    yield Text()
    yield last_line(plan)


def plan_body(plan: Plan, *, explain: bool) -> Iterator[Text]:
    """Memory of each pool, seconds of a step, and notes."""
    for name, phases in plan.phases.items():
        yield Text()
        pool = f" of pool {name}" if len(plan.phases) > 1 else ""
        yield Text(f"Memory of the fullest {_unit(plan)}{pool}, GiB", "bold")
        head, *rows = table(("PHASE", "  USED", " LIMIT", "", "USED BY"), [_memory_row(each) for each in phases], "  ")
        yield head
        for line, phase in zip(rows, phases, strict=True):
            yield line
            for part in phase.parts if explain else ():
                yield _part_line(part)
    yield from _host_lines(plan, explain=explain)
    yield Text()
    yield from _time_lines(plan, explain=explain)
    for note in plan.notes:
        yield Text()
        yield wrapped(note)


def head_lines(plan: Plan, head: PlanHead) -> Iterator[Text]:
    """The job, its GPUs, its models, and what one step does."""
    workload, lengths = plan.workload, plan.workload.lengths
    noun = _unit(plan) + ("" if head.num_gpus == 1 else "s")
    used = plan.placement.num_gpus
    number_text = f"{head.num_gpus}" if used == head.num_gpus else f"{used} of {head.num_gpus}"
    yield Text(f"{head.job}: {number_text} {noun} ({head.gpus.origin})", "bold")
    shown = set()
    for role, found in head.shapes.items():
        if found.shape.name not in shown:
            shown.add(found.shape.name)
            num = found.shape.num_parameters
            size = f"{num / 1e9:.2f} billion" if num >= 1e9 else f"{num / 1e6:.2f} million"
            yield Text(f"  {role.value:12} {found.shape.name}, {size} parameters ({found.origin})")
    updates = f"{workload.num_updates} update{'' if workload.num_updates == 1 else 's'}"
    responses, prompts = "responses", "prompts"
    if lengths.conversation_max is not None:
        responses, prompts = f"rollouts of {lengths.num_turns:.3g} turns", "prompts with messages"
    yield Text(f"  {'step':12} {workload.batch_size:,} prompts x {workload.group_size} {responses}, {updates}")
    tokens = f"{prompts} of {lengths.prompt_mean:,.0f} tokens (at most {lengths.prompt_max:,})"
    tokens += f", responses of {lengths.response_mean:,.0f} (at most {lengths.response_max:,})"
    if lengths.conversation_max is not None:
        tokens += f", together at most {lengths.conversation_max:,}"
    yield Text(f"  {'lengths':12} {tokens}")
    if lengths.assumption:
        yield wrapped(lengths.assumption, " " * 15, "dim")
    origin = "defaults; rljob plan --calibrate FOLDER fits them to a run on your machine"
    if head.constants != "defaults":
        origin = f"calibrated by {head.constants}"
    yield Text(f"  {'constants':12} {wrapped(origin, ' ' * 15).plain.lstrip()}")


def placement_text(placement: Placement) -> str:
    """A placement as text: `actor+rollout on 1x8 H100 (shards of 4, TP 2); ref on 1x8 H100`. TP is tensor parallelism,
    SP sequence parallelism."""
    pools = "; ".join(_pool_text(pool) for pool in placement.pools)
    return pools if placement.schedule is Schedule.SYNCHRONOUS else f"{pools}; {placement.schedule.value}"


def _pool_text(pool: PlacedPool) -> str:
    layouts = []
    sizes = {role.value: layout.shard_size for role, layout in pool.layouts.items()}
    if len(set(sizes.values())) > 1:
        layouts.append(f"shards: {', '.join(f'{role} {size}' for role, size in sizes.items())}")
    elif set(sizes.values()) - {pool.num_gpus}:
        layouts.append(f"shards of {min(sizes.values())}")
    if pool.rollout is not None and pool.rollout.tensor_parallel > 1:
        layouts.append(f"TP {pool.rollout.tensor_parallel}")
    if sequence_parallel := {layout.sequence_parallel for layout in pool.layouts.values()} - {1}:
        layouts.append(f"SP {max(sequence_parallel)}")
    inner = f" ({', '.join(layouts)})" if layouts else ""
    roles = "+".join(role.value for role in pool.roles)
    return f"{roles or 'nothing'} on {pool.nodes}x{pool.gpus_per_node} {pool.gpu.name}{inner}"


def _memory_row(phase: PhaseMemory) -> tuple[str | Text, ...]:
    """The cells of a phase: name, used GiB, limit in GiB, whether that fits, GiB by role."""
    verdict = verdict_of((phase,))
    outcome = {
        Verdict.FITS: "fits",
        Verdict.TIGHT: f"tight, {phase.spare / GIB:.1f} free",
        Verdict.TOO_LARGE: f"{-phase.spare / GIB:.1f} too much",
    }[verdict]
    if phase.kv_cache_shortage > 0:
        outcome = f"KV cache {phase.kv_cache_shortage / GIB:.1f} too small"
    used_by = ", ".join(f"{owner} {num_bytes / GIB:.1f}" for owner, num_bytes in _by_owner(phase).items())
    total, limit = (f"{each / GIB:>6.1f}" for each in (phase.total, phase.limit))
    return phase.phase.value, total, limit, Text(outcome, _STYLES[verdict]), used_by


def _part_line(part: Part) -> Text:
    """A part of a row, with its formula."""
    return Text(f"      {part.owner:28} {part.num_bytes / GIB:8.2f}  {part.formula}", "dim")


def _host_lines(plan: Plan, *, explain: bool) -> Iterator[Text]:
    """Host memory of a node of each pool with GPUs. On CPUs the phases have it."""
    parts_of = {pool.name: plan.host_memory[pool.name] for pool in plan.placement.pools if not pool.gpu.is_cpu}
    if not parts_of:
        return
    rows = []
    for name, parts in parts_of.items():
        ordered = sorted(parts, key=lambda part: -part.num_bytes)
        shares = ", ".join(f"{part.owner} {part.num_bytes / GIB:.1f}" for part in ordered)
        rows.append((name, f"{sum(part.num_bytes for part in parts) / GIB:>6.1f}", shares))
    head, *lines = table(("POOL", "  USED", "USED BY"), rows, "  ")
    yield Text()
    yield Text("Host memory of a node, GiB", "bold")
    yield head
    for line, parts in zip(lines, parts_of.values(), strict=True):
        yield line
        yield from map(_part_line, parts if explain else ())


_ENGINE_OWNERS = ("rollout weights", "engine", "KV cache", "sleeping engine")
"""An owner whose name begins with one of these belongs to the rollout engine."""


def _by_owner(phase: PhaseMemory) -> dict[str, float]:
    """Bytes by role. A part that belongs to no role keeps the name of its owner. Sums that would be printed as 0.0 GiB
    are left out, unless there are no others."""
    sums: dict[str, float] = {}
    for part in phase.parts:
        role = next((role.value for role in Role if part.owner.startswith(f"{role.value} ")), None)
        owner = "rollout" if part.owner.startswith(_ENGINE_OWNERS) else role or part.owner
        sums[owner] = sums.get(owner, 0.0) + part.num_bytes
    return {owner: num_bytes for owner, num_bytes in sums.items() if num_bytes >= 0.05 * GIB} or sums


def _time_lines(plan: Plan, *, explain: bool) -> Iterator[Text]:
    """The seconds of each phase, of a step, and of all steps."""
    total, run, hours = plan.step.total, plan.run_seconds, plan.gpu_hours
    rows = []
    for phase in plan.step.phases:
        share = phase.seconds.likely / total.likely if total.likely else 0.0
        pool = f" ({phase.pool})" if len(plan.placement.pools) > 1 else ""
        rows.append((f"{phase.name}{pool}", *seconds_cells(phase.seconds), f"{share:>5.0%}", phase.bound_by))
    rows.append(("step", *seconds_cells(total), "", plan.step.bound_by))
    name = "all steps" if plan.workload.num_steps == 1 else f"{plan.workload.num_steps:,} steps"
    spread = f"{duration_text(run.low)} to {duration_text(run.high)}"
    of_gpus = f"{number(hours.likely)} ({number(hours.low)} to {number(hours.high)}) {_hours(plan)}"
    rows.append((name, f"{duration_text(run.likely):>6}", spread, "", of_gpus))
    head, *lines = table(("PHASE", "LIKELY", "RANGE", "SHARE", "BOUND BY"), rows, "  ")
    yield Text("Seconds per step", "bold")
    yield head
    for line, phase in zip(lines, plan.step.phases, strict=False):
        yield line
        yield from (Text(f"      {text}", "dim") for text in (phase.formula, phase.assumption) if text and explain)
    yield from lines[-2:]


def seconds_cells(seconds: Seconds) -> tuple[str, str]:
    """The likely seconds, and the range."""
    return f"{number(seconds.likely):>6}", f"{number(seconds.low)} to {number(seconds.high)}"


def number(value: float) -> str:
    """A number with three significant digits, and at most two decimals."""
    if value >= 99.5:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 9.95 else f"{value:.2f}"


def proposal_lines(plan: Plan) -> Iterator[Text]:
    """The proposals that would make the job fit or, if it is tight, give it more room."""
    if plan.verdict is Verdict.FITS:
        return
    yield Text()
    if not plan.proposals:
        effect = "makes the job fit" if plan.verdict is Verdict.TOO_LARGE else "gives the job more room"
        yield Text(f"None of the changes that were tried {effect}.", "bold")
        if plan.nearest_miss is not None:
            yield Text("The closest proposal:")
            yield from _proposal_table([plan.nearest_miss])
        return
    effect = "make the job fit" if plan.verdict is Verdict.TOO_LARGE else "give the job more room"
    printed = plan.proposals[:_MAX_PROPOSALS]
    several = "; make all changes of a proposal" if any(len(each.changes) > 1 for each in printed) else ""
    yield Text(f"Proposals that {effect} (one of them is enough{several})", "bold")
    yield from _proposal_table(printed)
    if (left := len(plan.proposals) - len(printed)) > 0:
        yield Text(f"  {left} more with --json", "dim")


def _proposal_table(proposals: Sequence[Proposal]) -> list[Text]:
    """A numbered row for each proposal. If a proposal has several changes, each further change has a row of its own."""
    rows: list[tuple[str | Text, ...]] = []
    for index, proposal in enumerate(proposals, 1):
        worst, seconds = proposal.fullest_phase, proposal.step_seconds
        memory = f"{worst.total / GIB:.1f} of {worst.limit / GIB:.1f} in {worst.phase.value}"
        if worst.kv_cache_shortage > 0:
            memory = f"KV cache {worst.kv_cache_shortage / GIB:.1f} too small"
        step = "" if seconds is None else number(seconds.likely)
        first, *others = [f"{each.field}: {each.before} -> {each.value}" for each in proposal.changes]
        verdict = Text(proposal.verdict.value, _STYLES[proposal.verdict])
        rows.append((Text(f"{index}. {first}", "yellow"), memory, verdict, step))
        rows += [(Text(f"   {other}", "yellow"), "", "", "") for other in others]
    return table(("PROPOSAL", "MEMORY, GiB", "", "STEP, s"), rows, "  ")


def last_line(plan: Plan, condition: str = "") -> Text:
    """The summary: `Plan: fits, ...`, or `Plan: fits CONDITION, ...`."""
    worst, total = plan.fullest_phase, plan.step.total
    where = f" on pool {worst.pool}" if len(plan.phases) > 1 else ""
    memory = f"{worst.total / GIB:.1f} of {worst.limit / GIB:.1f} GiB in {worst.phase.value}{where}"
    if worst.kv_cache_shortage > 0:
        memory = f"the KV cache is {worst.kv_cache_shortage / GIB:.1f} GiB too small in {worst.phase.value}{where}"
    line = Text("Plan: ", "bold")
    line.append(plan.verdict.value, f"bold {_STYLES[plan.verdict]}")
    line.append(f" {condition}" if condition else "")
    steps = f"{plan.workload.num_steps:,} step{'' if plan.workload.num_steps == 1 else 's'}"
    line.append(
        f", {memory}; {number(total.likely)} s per step ({number(total.low)} to {number(total.high)});"
        f" {steps} in {duration_text(plan.run_seconds.likely)}, {number(plan.gpu_hours.likely)} {_hours(plan)}"
    )
    return line


def wrapped(sentence: str, indent: str = "", style: str = "") -> Text:
    """A sentence, wrapped at `_WIDTH` columns."""
    filled = textwrap.fill(sentence, _WIDTH, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)
    return Text(filled, style)


def _unit(plan: Plan) -> str:
    """What the plan counts: GPUs or, on CPUs, workers."""
    return "worker" if any(pool.gpu.is_cpu for pool in plan.placement.pools) else "GPU"


def _hours(plan: Plan) -> str:
    return "worker-hours" if _unit(plan) == "worker" else "GPU-hours"
