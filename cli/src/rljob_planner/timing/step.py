"""The time of a step, added up in the order of the trainer's controller (controller/training_step.py).

    weight sync -> generation -> passes (old log-probs | reference | values | scores) -> updates (critic | actor)

The calls of one stage start together. On one pool they run one after the other, on several pools at the same time.
Scores are computed at the same time as the passes. If the scores decide which responses are trained on, the passes wait
for the scores. With the schedule ONE_STEP_OFF, the rollout generates the responses of the next step while the other
roles work on this step. Then all wait for the weight sync.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from rljob_planner.constants import Constants
from rljob_planner.gpus import CPU_NAME
from rljob_planner.kv_cache import engine_budget
from rljob_planner.plan_types import PhaseTime, Seconds, StepTime
from rljob_planner.timing.communication import NO_COST, Cost, NodeType, sync_cost
from rljob_planner.timing.generation import Requests, generation_cost, live_context
from rljob_planner.timing.lengths import Lengths, lengths_of
from rljob_planner.timing.passes import pass_cost, rows_of, update_cost
from rljob_planner.workload import Placement, Role, RolloutLayout, Schedule, TrainLayout, Workload


def rollout_cost(
    workload: Workload, lengths: Lengths, layout: RolloutLayout, node_type: NodeType, constants: Constants
) -> Cost:
    """The cost of the generation in a step, with all rounds of dynamic sampling."""
    work, prompt = workload.rollout, workload.lengths.prompt_mean
    actor = workload.models.get(Role.ACTOR)
    budget = engine_budget(work, layout, node_type.gpu, constants, actor.lora if actor else None)
    at_once = budget.sequences_at_once(live_context(prompt, lengths))
    per_prompt = workload.num_requests // workload.batch_size
    requests = Requests(workload.num_requests, per_prompt, prompt, lengths, workload.lengths.num_turns)
    cost = generation_cost(work, requests, layout, node_type, at_once, constants)
    rounds = workload.generation_factor
    if rounds == 1:
        return cost
    return Cost(rounds * cost.seconds, cost.bound_by, f"{rounds:.3g} rounds x ({cost.formula})")


def scoring_cost(
    role: Role, workload: Workload, lengths: Lengths, layout: TrainLayout, node_type: NodeType, constants: Constants
) -> Cost:
    """The cost of the role's pass without backward. The pass computes old log-probabilities (actor), log-probabilities
    of the reference, values (critic) or scores (reward model)."""
    if role is Role.ACTOR and not workload.needs_old_logprobs:
        return NO_COST
    count = workload.num_responses * workload.trained_fraction
    if role is Role.REWARD_MODEL:
        count = workload.num_requests * workload.generation_factor
    rows = rows_of(count, workload.lengths.prompt_mean, lengths)
    model = workload.models[role]
    return pass_cost(model, rows, workload.max_tokens_per_micro_batch, layout, node_type, constants)


def training_cost(
    role: Role, workload: Workload, lengths: Lengths, layout: TrainLayout, node_type: NodeType, constants: Constants
) -> Cost:
    """The cost of all updates of the role in a step. A frozen model has no cost."""
    model = workload.models[role]
    if not model.is_trained:
        return NO_COST
    count = workload.mini_batch_size * workload.group_size * workload.trained_fraction
    rows = rows_of(count, workload.lengths.prompt_mean, lengths)
    max_tokens, updates = workload.max_tokens_per_micro_batch, workload.num_updates
    cost = update_cost(model, rows, updates, max_tokens, layout, node_type, constants)
    if role is Role.ACTOR and workload.needs_mini_batch_pass:
        whole = pass_cost(model, rows, max_tokens, layout, node_type, constants)
        formula = f"{cost.formula} + {updates} mini-batch passes x ({whole.formula})"
        return replace(cost, seconds=cost.seconds + updates * whole.seconds, formula=formula)
    return cost


WEIGHT_SYNC, GENERATE, REWARD = "weight_sync", "generate", "reward"
OLD_LOGPROB, REF, VALUES = "old_logprob", "ref", "values"
UPDATE_CRITIC, UPDATE_ACTOR = "update_critic", "update_actor"
OTHER = "other"
"""The name for the seconds of a step that belong to no phase."""
ON_HOST = "the host"
"""Used in place of a pool's name: reward functions run on the host, at the same time as phases on any pool."""

_PASSES = {OLD_LOGPROB: Role.ACTOR, REF: Role.REF, VALUES: Role.CRITIC}
_UPDATES = {UPDATE_CRITIC: Role.CRITIC, UPDATE_ACTOR: Role.ACTOR}
_NARROW, _FEW_TOKENS, _SMALL_FACTOR = 1024, 4096, 2.0
"""With a smaller hidden size (_NARROW), or fewer tokens per micro-batch (_FEW_TOKENS), passes may take up to
_SMALL_FACTOR times as long as the default constants say. A GPU then mostly waits for kernel launches and memory."""
PHASES = (WEIGHT_SYNC, GENERATE, OLD_LOGPROB, REF, VALUES, REWARD, UPDATE_CRITIC, UPDATE_ACTOR)
"""The phases, in the order in which the controller waits for them. In the metrics, phases do not overlap."""
StageSeconds = tuple[float, ...]
"""Seconds of the stages of a step: weight sync, generation, scores, passes, updates."""
SYNC, GENERATION = range(2)
"""Indices of the first two stages."""


def stages_of(workload: Workload) -> tuple[tuple[str, ...], ...]:
    """The phases of each stage, in the order in which their calls start. The reward model is called before the passes.
    If the scores decide which responses are trained on, they are a separate stage."""
    passes = tuple(_PASSES)
    scores_and_passes = ((REWARD,), passes) if workload.waits_for_scores else ((), (REWARD, *passes))
    return (WEIGHT_SYNC,), (GENERATE,), *scores_and_passes, tuple(_UPDATES)


def stage_seconds(seconds: Mapping[str, float], workload: Workload) -> StageSeconds:
    """Seconds of each stage on one pool, where the phases of a stage run one after the other."""
    return tuple(sum(seconds.get(name, 0.0) for name in stage) for stage in stages_of(workload))


def total_seconds(stages: StageSeconds, schedule: Schedule) -> float:
    """Seconds of a step, from the seconds of each stage on its slowest pool."""
    if schedule is Schedule.SYNCHRONOUS:
        return sum(stages)
    rest = sum(stages) - stages[SYNC] - stages[GENERATION]
    return max(stages[GENERATION], rest) + stages[SYNC]


def pool_costs(
    workload: Workload,
    lengths: Lengths,
    layouts: Mapping[Role, TrainLayout],
    rollout: RolloutLayout | None,
    node_type: NodeType,
    constants: Constants,
) -> dict[str, Cost]:
    """The cost of each phase that runs on one pool, by the phase's name. `layouts` and `rollout` are the layouts of the
    roles on this pool."""
    found: dict[str, Cost] = {}
    if rollout is not None:
        actor = layouts.get(Role.ACTOR)
        found[WEIGHT_SYNC] = sync_cost(
            workload.models[Role.ACTOR], actor, workload.rollout, rollout, node_type, constants
        )
        found[GENERATE] = rollout_cost(workload, lengths, rollout, node_type, constants)
    calls = [(name, role, scoring_cost) for name, role in (_PASSES | {REWARD: Role.REWARD_MODEL}).items()]
    calls += [(name, role, training_cost) for name, role in _UPDATES.items()]
    for name, role, cost in calls:
        model = workload.models.get(role)
        # A reference that is the actor without its adapters runs on the actor's GPUs.
        layout = layouts.get(Role.ACTOR if model is not None and model.is_actor_without_adapters else role)
        if model is not None and layout is not None:
            found[name] = cost(role, workload, lengths, layout, node_type, constants)
    if REWARD in found and found[REWARD].seconds < workload.reward_seconds:
        # The rewards of the run took longer than the reward model should, so they set the time of this phase.
        del found[REWARD]
    return {name: each for name, each in found.items() if each is not NO_COST}


class _Task(NamedTuple):
    pool: str
    cost: Cost


def step_time(workload: Workload, placement: Placement, constants: Constants | None = None) -> StepTime:
    """The time of one step, without checkpoints and evaluations.

    Raises:
        KeyError: a role of the job is in no pool.
    """
    used = constants or Constants()
    known = workload.lengths
    # If the mean response length is a guess, the time is also computed for a shorter and a longer mean.
    means = (known.response_mean_low, None, known.response_mean_high)
    lengths = [lengths_of(known, mean) for mean in means]
    by_lengths = {each: _tasks(workload, placement, used, each) for each in dict.fromkeys(lengths)}
    cases = [by_lengths[each] for each in lengths]
    likely = cases[1]
    ranges = {name: _range(name, [each[name].cost.seconds for each in cases], workload, used) for name in likely}
    waits = [_waits({name: each[index] for name, each in ranges.items()}, likely, workload) for index in range(3)]
    kinds = {pool.name: pool.gpu.name for pool in placement.pools}
    phases = [
        PhaseTime(
            name=name,
            pool=task.pool,
            seconds=Seconds(*ranges[name]),
            bound_by=task.cost.bound_by,
            assumption=_assumption(name, task, kinds.get(task.pool, ""), workload, used),
            formula=task.cost.formula,
            waited=Seconds(*(each[name] for each in waits)),
        )
        for name, task in likely.items()
    ]
    total = Seconds(*(total_seconds(stage_seconds(each, workload), placement.schedule) for each in waits))
    if used.step_seconds:
        fixed = Seconds(0.5 * used.step_seconds, used.step_seconds, 2 * used.step_seconds)
        phases.append(
            PhaseTime(
                OTHER,
                ON_HOST,
                fixed,
                "calls, logging, data",
                "a constant of the planner",
                f"{used.step_seconds:.3g} s",
                fixed,
            )
        )
        total = total + fixed
    worst = max(phases, key=lambda each: each.seconds.likely)
    return StepTime(tuple(phases), total, f"mostly {worst.name}: {worst.bound_by}")


def _tasks(workload: Workload, placement: Placement, constants: Constants, lengths: Lengths) -> dict[str, _Task]:
    """All phases of the job, in the order in which the controller waits for them."""
    _check_that_roles_have_pools(workload, placement)
    found: dict[str, _Task] = {}
    for pool in placement.pools:
        node_type = NodeType(pool.gpu, pool.gpus_per_node)
        costs = pool_costs(workload, lengths, pool.layouts, pool.rollout, node_type, constants)
        found |= {name: _Task(pool.name, cost) for name, cost in costs.items()}
    if REWARD not in found and (seconds := workload.reward_seconds):
        found[REWARD] = _Task(ON_HOST, Cost(seconds, "rewards", f"{seconds:.3g} s"))
    return {name: found[name] for name in PHASES if name in found}


def _check_that_roles_have_pools(workload: Workload, placement: Placement) -> None:
    """Raises KeyError if a role of the job has no pool. Otherwise the time of its phases would be silently missing."""
    placed = {role for pool in placement.pools for role in pool.roles}
    for role in workload.roles:
        is_the_actor = role in workload.models and workload.models[role].is_actor_without_adapters
        placed_role = Role.ACTOR if is_the_actor else role
        if placed_role not in placed:
            raise KeyError(placed_role)


def _range(name: str, seconds: Sequence[float], workload: Workload, constants: Constants) -> tuple[float, float, float]:
    """Low, likely and high seconds of a phase. The range covers the possible mean lengths, and is widened by the
    uncertainty of speeds. `seconds`: likely seconds with a shorter, the likely and a longer mean length."""
    spread = constants.spread
    upwards = (1 + spread) * (_SMALL_FACTOR if _has_small_products(name, workload, constants) else 1)
    return min(seconds) * (1 - spread), seconds[1], max(seconds) * upwards


def _has_small_products(name: str, workload: Workload, constants: Constants) -> bool:
    """Whether the phase may be slower than the default constants say, because these are for wide models and full
    micro-batches. False with constants of a profile."""
    role = (_PASSES | _UPDATES).get(name)
    if role is None or role not in workload.models or constants.source != Constants().source:
        return False
    narrow = workload.models[role].shape.hidden_size <= _NARROW
    return narrow or workload.max_tokens_per_micro_batch < _FEW_TOKENS


def _waits(seconds: Mapping[str, float], tasks: Mapping[str, _Task], workload: Workload) -> dict[str, float]:
    """Seconds that the controller waits for each phase after the phases before it have ended."""
    found: dict[str, float] = {}
    for stage in stages_of(workload):
        ends: dict[str, float] = {}
        busy: dict[str, float] = {}
        for name in (each for each in stage if each in tasks):
            pool = tasks[name].pool
            ends[name] = busy[pool] = busy.get(pool, 0.0) + seconds[name]
        now = 0.0
        for name in sorted(ends, key=PHASES.index):
            found[name] = max(0.0, ends[name] - now)
            now = max(now, ends[name])
    return found


def _assumption(name: str, task: _Task, kind: str, workload: Workload, constants: Constants) -> str:
    """What the estimate of a phase assumes."""
    if name == GENERATE:
        has_experts = workload.rollout.shape.has_experts
        step = constants.expert_decode_step_seconds if has_experts else constants.decode_step_seconds
        reached = f"{constants.decode_bandwidth_efficiency:.0%} of the memory bandwidth, {1e3 * step:.3g} ms per token"
        return "; ".join(each for each in (workload.lengths.assumption, reached, constants.source) if each)
    role = (_PASSES | _UPDATES).get(name)
    if role is None:
        return "as measured in the run" if task.pool == ON_HOST else f"link speeds from {constants.source}"
    shape = workload.models[role].shape
    of_kind = constants.training_efficiency_of if name in _UPDATES else constants.forward_efficiency_of
    whose = "the cores' guessed speed" if kind == CPU_NAME else "the GPU's stated speed"
    reached = f"{of_kind(kind, has_experts=shape.has_experts):.0%} of {whose} in matrix products ({constants.source})"
    if _has_small_products(name, workload, constants):
        return f"{reached}; may take up to {_SMALL_FACTOR:g} times as long, because the matrix products are small"
    return reached
