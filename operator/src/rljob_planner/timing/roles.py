"""What each role's part of a step takes on a layout, one function per stage: what a search asks for again and again,
and what `step` puts together.

Which passes there are: trainer, controller/training_step.py. Rows that are not learned from cost no pass and no update;
scores are of everything that was generated.
"""

from __future__ import annotations

from dataclasses import replace
from enum import StrEnum

from rljob_planner.constants import Constants
from rljob_planner.kv_cache import engine_space
from rljob_planner.placement import RolloutLayout, TrainLayout
from rljob_planner.timing.costs import NO_COST, Cost, Site
from rljob_planner.timing.generation import Requests, generation_cost, live_context
from rljob_planner.timing.lengths import Lengths, lengths_of
from rljob_planner.timing.passes import pass_cost, rows_of, update_cost
from rljob_planner.workload import Role, Workload


class LengthCase(StrEnum):
    """Which lengths a range of seconds is worked out for."""

    SHORT = "short"
    LIKELY = "likely"
    LONG = "long"


def lengths_in(workload: Workload, case: LengthCase = LengthCase.LIKELY) -> Lengths:
    """The workload's responses; where their mean is a guess, the shortest and longest that it may stand for."""
    given = workload.lengths
    means = {LengthCase.SHORT: given.response_mean_low, LengthCase.LONG: given.response_mean_high}
    return lengths_of(given, means.get(case))


def rollout_cost(workload: Workload, lengths: Lengths, layout: RolloutLayout, site: Site, constants: Constants) -> Cost:
    """Generation of a step, with the rounds of dynamic sampling."""
    work, prompt = workload.rollout, workload.lengths.prompt_mean
    actor = workload.models.get(Role.ACTOR)
    space = engine_space(work, layout, site.gpu, constants, actor.lora if actor else None)
    at_once = space.sequences_at_once(live_context(prompt, lengths))
    per_prompt = workload.num_requests // workload.batch_size
    requests = Requests(workload.num_requests, per_prompt, prompt, lengths)
    cost = generation_cost(work, requests, layout, site, at_once, constants)
    rounds = workload.generated_per_learned
    if rounds == 1:
        return cost
    return Cost(rounds * cost.seconds, cost.bound_by, f"{rounds:.3g} rounds x ({cost.formula})")


def scoring_cost(
    role: Role, workload: Workload, lengths: Lengths, layout: TrainLayout, site: Site, constants: Constants
) -> Cost:
    """The role's pass without gradient: old log-probabilities, the reference's, values, scores."""
    if role is Role.ACTOR and not workload.needs_old_logprobs:
        return NO_COST
    count = workload.num_responses * workload.learned_fraction
    if role is Role.REWARD_MODEL:
        count = workload.num_requests * workload.generated_per_learned
    rows = rows_of(count, workload.lengths.prompt_mean, lengths)
    model = workload.models[role]
    return pass_cost(model, rows, workload.max_tokens_per_micro_batch, layout, site, constants)


def training_cost(
    role: Role, workload: Workload, lengths: Lengths, layout: TrainLayout, site: Site, constants: Constants
) -> Cost:
    """All updates of the role in a step; nothing for roles that do not learn."""
    model = workload.models[role]
    if not model.is_trained:
        return NO_COST
    count = workload.mini_batch_size * workload.group_size * workload.learned_fraction
    rows = rows_of(count, workload.lengths.prompt_mean, lengths)
    budget, updates = workload.max_tokens_per_micro_batch, workload.num_updates
    cost = update_cost(model, rows, updates, budget, layout, site, constants)
    if role is Role.ACTOR and workload.needs_whole_pass:
        whole = pass_cost(model, rows, budget, layout, site, constants)
        formula = f"{cost.formula} + {updates} whole passes x ({whole.formula})"
        return replace(cost, seconds=cost.seconds + updates * whole.seconds, formula=formula)
    return cost
