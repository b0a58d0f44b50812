"""Checks of a valid job's training beyond the rules of the contract, and warnings about settings without effect. The
API server does not reject such mistakes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from rljob_api.rule import Violation
from rljob_api.v1alpha1.checkpoint import KeepBestMode
from rljob_api.v1alpha1.environment_rules import best_metrics, rewards_of
from rljob_api.v1alpha1.model import Dtype, HeadDtype
from rljob_api.v1alpha1.reward import Reward, RewardType, Takes
from rljob_api.v1alpha1.spec import RLJobSpec
from rljob_api.v1alpha1.training import IncompleteGroup, PromptSamplingType, Training, reward_names

METRIC_RULE = "RLJobSpec.reportedMetric"


def training_violations(spec: RLJobSpec) -> Iterator[Violation]:
    """Mistakes that the API server does not check: a comparison with all metrics would be too expensive for it, and the
    schema has no space for more rules."""
    training, best, known = spec.training, spec.checkpoint.keep_best, best_metrics(spec.training)
    if best is not None and best.metric not in known:
        near = [name for name in known if name.startswith(best.metric.rpartition("/")[0] + "/")]
        yield Violation(
            rule=METRIC_RULE,
            path=("spec", "checkpoint", "keepBest", "metric"),
            wrong=f"the evaluation does not report it; it reports {', '.join(near)}",
            advice="correct the name, or change greedy or numSamples of the evaluation",
            seen=best.metric,
        )
    for index, reward in enumerate(training.rewards):
        sees_group = reward.function is not None and reward.function.takes is Takes.GROUP
        if sees_group and training.on_incomplete_group is IncompleteGroup.REFILL:
            yield Violation(
                rule="RLJobSpec.groupOfReward",
                path=("spec", "training", "rewards", index, "function", "takes"),
                wrong="cannot be used with onIncompleteGroup: Refill, because a response that is generated again would"
                " be scored without its group",
                advice="choose another value of onIncompleteGroup",
                seen=str(Takes.GROUP),
            )
    if training.prompt_sampling.type is PromptSamplingType.PASS_RATE and not reward_names(training):
        yield Violation(
            rule="RLJobSpec.rewardOfPassRate",
            path=("spec", "training", "promptSampling", "type"),
            wrong="needs a reward, which scores the responses",
            advice="add one, or use Uniform",
            seen=str(PromptSamplingType.PASS_RATE),
        )


def training_warnings(spec: RLJobSpec) -> Iterator[Violation]:
    """Warnings about settings of the training without effect. A rank without a worker is no fault: the job may run on
    fewer nodes, or on a machine with fewer devices."""
    ranks = () if spec.training.profile is None else spec.training.profile.ranks
    pool_of_actor = spec.placed_roles()["actor"]
    num_workers = sum(pool.nodes * pool.gpus_per_node for pool in spec.pools if pool.name == pool_of_actor)
    for index, rank in enumerate(ranks):
        if rank >= num_workers:
            yield Violation(
                rule="Profile.ranks",
                path=("spec", "training", "profile", "ranks", index),
                wrong=f"has no effect: the actor's pool has {num_workers} workers, counted from 0",
                advice="remove it, or use a smaller number",
                seen=str(rank),
            )
    model = spec.training.model
    if model.head_dtype is HeadDtype.FLOAT32 and model.dtype is Dtype.FLOAT32:
        yield Violation(
            rule="Model.headDtype",
            path=("spec", "training", "model", "headDtype"),
            wrong="has no effect with dtype: Float32, in which logits are already in float32",
            advice="remove it, or set dtype: BFloat16",
            seen=json.dumps(model.head_dtype),
        )
    for index, evaluation in enumerate(spec.training.evaluations):
        rewards = rewards_of(evaluation, spec.training)
        all_count_as_1 = not any(reward.weight for reward in rewards)
        highest = _highest_score(rewards, spec.training, all_count_as_1=all_count_as_1)
        if evaluation.num_samples and highest is not None and highest < evaluation.pass_threshold - 1e-9:
            yield Violation(
                rule="Evaluation.passThreshold",
                path=("spec", "training", "evaluations", index, "passThreshold"),
                wrong=f"no response can pass, so pass_at_k is always 0: the largest possible score is {highest:g}",
                advice="set passThreshold to a score that a good response has, or name fewer rewards in `rewards`",
                seen=f"{evaluation.pass_threshold:g}",
            )

    yield from _warnings_about_rewards(spec.training)
    yield from _warnings_about_best(spec)
    yield from _warnings_about_datasets(spec.training)
    yield from _warnings_about_sampling(spec.training)


def _warnings_about_rewards(training: Training) -> Iterator[Violation]:
    names_of_datasets = {name for dataset in training.datasets for name in dataset.rewards}
    all_are_named = bool(training.datasets) and all(dataset.rewards for dataset in training.datasets)
    for index, reward in enumerate(training.rewards):
        path = ("spec", "training", "rewards", index)
        function = reward.function
        if function is not None and function.takes is not Takes.BATCH and "batch_size" in function.model_fields_set:
            yield Violation(
                rule="FunctionReward.batchSize",
                path=(*path, "function", "batchSize"),
                wrong=f"has no effect with takes: {function.takes}",
                advice="remove it, or set takes: Batch",
                seen=str(function.batch_size),
            )
        if all_are_named and reward.name not in names_of_datasets and reward.type is not RewardType.ENVIRONMENT:
            yield Violation(
                rule="Reward.named",
                path=(*path, "name"),
                wrong="scores no response of the training, because each dataset names other rewards",
                advice="add it to the rewards of a dataset, or remove it if no evaluation names it",
                seen=reward.name,
            )


def _warnings_about_best(spec: RLJobSpec) -> Iterator[Violation]:
    best = spec.checkpoint.keep_best
    if best is None:
        return
    path = ("spec", "checkpoint", "keepBest")
    if spec.training.steps == 0:
        yield Violation(
            rule="KeepBest.steps",
            path=path,
            wrong="has no effect with 0 steps, which save no checkpoint",
            advice="remove it, or increase training.steps",
            seen=best.metric,
        )
    elif best.metric.endswith("/excluded_fraction") and best.mode is KeepBestMode.MAX:
        yield Violation(
            rule="KeepBest.mode",
            path=(*path, "mode"),
            wrong="keeps the checkpoint with the most responses without a score",
            advice="set mode: Min",
            seen=str(best.mode),
        )


def _warnings_about_datasets(training: Training) -> Iterator[Violation]:
    total = sum(dataset.weight for dataset in training.datasets)
    for index, dataset in enumerate(training.datasets):
        num_prompts = dataset.weight / total * training.steps * training.batch_size
        if training.steps and num_prompts < 1:
            yield Violation(
                rule="NamedDataset.weight",
                path=("spec", "training", "datasets", index, "weight"),
                wrong=f"is so small that the training draws no prompt of this dataset (on average {num_prompts:.2g})",
                advice="increase it, or remove the dataset",
                seen=f"{dataset.weight:g}",
            )


def _warnings_about_sampling(training: Training) -> Iterator[Violation]:
    sampling, path = training.prompt_sampling, ("spec", "training", "promptSampling", "passThreshold")
    if sampling.type is PromptSamplingType.UNIFORM:
        if "pass_threshold" in sampling.model_fields_set:
            yield Violation(
                rule="PromptSampling.type",
                path=path,
                wrong="has no effect with type: Uniform",
                advice="remove it, or set type: PassRate",
                seen=f"{sampling.pass_threshold:g}",
            )
        return
    named = [frozenset(dataset.rewards) for dataset in training.datasets] or [frozenset[str]()]
    highest = [
        _highest_score([each for each in training.rewards if not names or each.name in names], training)
        for names in named
    ]
    known = [score for score in highest if score is not None]
    if len(known) == len(highest) and max(known) < sampling.pass_threshold - 1e-9:
        yield Violation(
            rule="PromptSampling.passThreshold",
            path=path,
            wrong=f"no response can pass, so all rows are drawn rarely: the largest possible score is {max(known):g}",
            advice="set passThreshold to a score that a good response has",
            seen=f"{sampling.pass_threshold:g}",
        )


def _highest_score(rewards: Sequence[Reward], training: Training, *, all_count_as_1: bool = False) -> float | None:
    """The largest possible weighted sum of these rewards; None if it is unknown."""
    if not rewards or training.environment is not None:
        # An environment may add a reward.
        return None
    total = 0.0
    for reward in rewards:
        weight = 1.0 if all_count_as_1 else reward.weight
        if weight == 0:
            continue
        limits = _score_limits(reward)
        if limits is None:
            return None
        total += max(weight * limit for limit in limits)
    return total


def _score_limits(reward: Reward) -> tuple[float, float] | None:
    """The smallest and largest score of a reward; None if they are unknown."""
    match reward.type:
        case RewardType.MATH_ANSWER | RewardType.CODE | RewardType.REASONING_GYM | RewardType.FORMAT:
            return 0.0, 1.0
        case RewardType.OVERLONG if reward.overlong is not None:
            return -reward.overlong.penalty_factor, 0.0
        case RewardType.JUDGE if reward.judge is not None:
            has_scale = reward.judge.scale is not None or not reward.judge.labels
            scores = [*(reward.judge.labels or {}).values(), *((0.0, 1.0) if has_scale else ())]
            return min(scores), max(scores)
    return None
