"""Rules between the environment and the other settings of the training (dataset, evaluations, rewards, limits of
tokens), and between the evaluations and these settings."""

from __future__ import annotations

from collections.abc import Callable

from rljob_api.rule import Path, rule, unique_rule
from rljob_api.v1alpha1.advantage import AdvantageType
from rljob_api.v1alpha1.dataset import EVALUATION_METRICS, Dataset, DatasetType, Evaluation, Filters, metric_names
from rljob_api.v1alpha1.environment import EnvironmentType, RewritePolicy
from rljob_api.v1alpha1.recipes import advantage_type, is_chosen_cel, is_distillation, is_distillation_cel
from rljob_api.v1alpha1.reward import Reward, RewardType
from rljob_api.v1alpha1.spec import RLJobSpec
from rljob_api.v1alpha1.training import Training, reward_names
from rljob_api.yaml_text import wire_path

_HAS_DATASET = "(has(self.dataset) || size(self.datasets) > 0)"


def _datasets(training: Training) -> dict[Path, Dataset]:
    """The job's datasets by their path, relative to the training."""
    found: dict[Path, Dataset | None] = {(field,): each for field, each in training.sources.items()}
    found |= {("evaluations", index, "dataset"): each.dataset for index, each in enumerate(training.evaluations)}
    return {path: dataset for path, dataset in found.items() if dataset is not None}


def _prompts_that_fill_the_context(training: Training) -> list[str]:
    """`maxPromptTokens` of each dataset whose longest prompt leaves no room for a turn, as text."""
    environment = training.environment
    return [
        f"{wire_path((*path, 'maxPromptTokens'))}: {dataset.max_prompt_tokens}"
        for path, dataset in _datasets(training).items()
        if environment is not None and dataset.max_prompt_tokens >= environment.max_context_tokens
    ]


def _types(training: Training, *wanted: RewardType) -> list[Path]:
    """Paths, relative to `rewards`, of the types of the rewards with one of the types `wanted`."""
    return [(index, "type") for index, reward in enumerate(training.rewards) if reward.type in wanted]


def _new_tokens_fit(training: Training) -> bool:
    environment = training.environment
    return environment is None or training.rollout.max_new_tokens < environment.max_context_tokens


def _has_rows_for_gae(training: Training) -> bool:
    environment = training.environment
    has_rows = environment is not None and (
        environment.on_rewrite is RewritePolicy.NEW_ROW or environment.type is EnvironmentType.SESSION
    )
    return not has_rows or advantage_type(training.algorithm) is not AdvantageType.GAE


def _has_weight(training: Training) -> bool:
    """Whether a reward has a weight other than 0: a listed one, or the one that an environment may add."""
    is_listed = any(reward.type is RewardType.ENVIRONMENT for reward in training.rewards)
    may_add = training.environment is not None and not is_listed
    return may_add or not training.rewards or any(reward.weight != 0 for reward in training.rewards)


def _learns_something(training: Training) -> bool:
    return _has_weight(training) or is_distillation(training.algorithm)


def _turn_fits(training: Training) -> bool:
    longest = training.environment.max_turn_tokens if training.environment is not None else None
    return longest is None or longest <= training.rollout.max_new_tokens


TRAINING_ENVIRONMENT_RULES = (
    rule(
        Training,
        "Training.dataset",
        field=".dataset",
        cel=f"{_HAS_DATASET} || has(self.environment)",
        wrong="is required without training.environment",
        advice="add a dataset, or an environment whose `reset` returns the prompt",
        holds=lambda t: bool(t.sources) or t.environment is not None,
    ),
    rule(
        Training,
        "Training.filters",
        field=".filters",
        cel=f"{_HAS_DATASET} || self.filters.duplicates == 'Keep' && !has(self.filters.contaminationNgramWords)",
        wrong="would be ignored without training.dataset",
        advice="remove it",
        holds=lambda t: bool(t.sources) or t.filters == Filters(),
    ),
    rule(
        Training,
        "Training.contamination",
        field=".filters.contaminationNgramWords",
        cel="!has(self.filters.contaminationNgramWords) || size(self.evaluations) > 0",
        wrong="would be ignored without training.evaluations",
        advice="add an evaluation, or remove it",
        holds=lambda t: t.filters.contamination_ngram_words is None or bool(t.evaluations),
    ),
    rule(
        Training,
        "Training.rewards",
        field=".rewards",
        cel=f"size(self.rewards) > 0 || has(self.environment) || {is_distillation_cel('self.algorithm')}",
        wrong="at least one reward is required without training.environment",
        advice="add a reward, or an environment with `get_reward`",
        holds=lambda t: bool(t.rewards) or t.environment is not None or is_distillation(t.algorithm),
    ),
    rule(
        Training,
        "Training.rewardWeights",
        field=".rewards",
        # An environment adds a reward with weight 1 if no reward has its type.
        cel="has(self.environment) && !self.rewards.exists(reward, reward.type == 'Environment')"
        " || self.rewards.size() == 0 || self.rewards.exists(reward, reward.weight != 0.0)"
        f" || {is_distillation_cel('self.algorithm')}",
        wrong="all weights are 0, so the policy would learn nothing",
        advice="give at least one reward a weight other than 0",
        holds=_learns_something,
    ),
    rule(
        Training,
        "Training.environmentReward",
        field=".rewards",
        cel="has(self.environment) || !self.rewards.exists(reward, reward.type == 'Environment')",
        wrong="a reward of type Environment requires training.environment",
        advice="add the environment, or change the type of the reward",
        holds=lambda t: t.environment is not None or not _types(t, RewardType.ENVIRONMENT),
        fault_paths=lambda t: _types(t, RewardType.ENVIRONMENT),
    ),
    rule(
        Training,
        "Training.answers",
        field=".rewards",
        cel=f"{_HAS_DATASET} || !self.rewards.exists(reward, reward.type in ['MathAnswer', 'Code'])",
        wrong="a reward of type MathAnswer or Code requires training.dataset, whose rows have the answers",
        advice="add a dataset, or change the type of the reward",
        holds=lambda t: bool(t.sources) or not _types(t, RewardType.MATH_ANSWER, RewardType.CODE),
        fault_paths=lambda t: _types(t, RewardType.MATH_ANSWER, RewardType.CODE),
    ),
    rule(
        Training,
        "Training.environmentClasses",
        field=".environment.classes",
        cel="!has(self.environment) || !has(self.environment.classes) || size(self.environment.classes) == 1"
        f" || {_HAS_DATASET}",
        wrong="several classes require training.dataset, whose column `environment` names the class of each row",
        advice="add a dataset, or use one class",
        holds=lambda t: t.environment is None or len(t.environment.classes or ()) <= 1 or bool(t.sources),
    ),
    rule(
        Training,
        "Training.environmentPromptTokens",
        field=".environment.maxContextTokens",
        cel="!has(self.environment) || (!has(self.dataset)"
        " || self.dataset.maxPromptTokens < self.environment.maxContextTokens)"
        " && self.datasets.all(each, each.maxPromptTokens < self.environment.maxContextTokens)"
        " && self.evaluations.all(each,"
        " !has(each.dataset) || each.dataset.maxPromptTokens < self.environment.maxContextTokens)",
        wrong="must be above maxPromptTokens of each dataset, or the longest prompt leaves no room for a turn",
        advice="increase maxContextTokens, or reduce maxPromptTokens",
        holds=lambda t: not _prompts_that_fill_the_context(t),
        details=lambda t, _: _prompts_that_fill_the_context(t),
    ),
    rule(
        Training,
        "Training.environmentNewTokens",
        field=".rollout.maxNewTokens",
        cel="!has(self.environment) || self.rollout.maxNewTokens < self.environment.maxContextTokens",
        wrong="must be below environment.maxContextTokens, which also counts the prompt, or it could never be reached",
        advice="reduce maxNewTokens, or increase maxContextTokens",
        holds=_new_tokens_fit,
    ),
    rule(
        Training,
        "Training.environmentGae",
        field=".environment",
        cel="!has(self.environment) || self.environment.onRewrite != 'NewRow' && self.environment.type != 'Session'"
        f" || !{is_chosen_cel('self.algorithm', 'advantage', (AdvantageType.GAE,))}",
        wrong="GAE needs one row per rollout, unlike type Session and onRewrite NewRow",
        advice="choose another advantage",
        holds=_has_rows_for_gae,
    ),
    rule(
        Training,
        "Training.environmentTurnTokens",
        field=".environment.maxTurnTokens",
        cel="!has(self.environment) || !has(self.environment.maxTurnTokens)"
        " || self.environment.maxTurnTokens <= self.rollout.maxNewTokens",
        wrong="must be at most rollout.maxNewTokens, the limit of all turns together",
        advice="reduce maxTurnTokens, or increase rollout.maxNewTokens",
        holds=_turn_fits,
    ),
)


def rewards_of(evaluation: Evaluation, training: Training) -> list[Reward]:
    """The listed rewards that score the responses of an evaluation."""
    wanted = evaluation.rewards
    return [reward for reward in training.rewards if wanted is None or reward.name in wanted]


def _faults(is_fault: Callable[[Evaluation, Training], bool], *field: str) -> Callable[[Training], list[Path]]:
    """Returns a function that returns the paths, relative to `evaluations`, of `field` of each entry with the fault."""
    return lambda training: [
        (index, *field) for index, each in enumerate(training.evaluations) if is_fault(each, training)
    ]


def _unknown_rewards(training: Training) -> list[Path]:
    known = reward_names(training)
    return [
        (index, "rewards", number)
        for index, each in enumerate(training.evaluations)
        for number, name in enumerate(each.rewards or ())
        if name not in known
    ]


def _needs_gym_rows(evaluation: Evaluation, training: Training) -> bool:
    """Whether a reward of type ReasoningGym would score rows of another dataset."""
    is_scored = any(each.type is RewardType.REASONING_GYM for each in rewards_of(evaluation, training))
    dataset = evaluation.dataset
    return is_scored and dataset is not None and dataset.type is not DatasetType.REASONING_GYM


_without_rows = _faults(lambda each, training: each.dataset is None and bool(training.sources), "dataset")
_with_other_rows = _faults(_needs_gym_rows, "dataset", "type")
_too_long = _faults(lambda each, training: (each.max_new_tokens or 0) > training.rollout.max_new_tokens, "maxNewTokens")
_not_synced = _faults(lambda each, training: each.every_steps % training.rollout.sync_every_steps != 0, "everySteps")


def best_metrics(training: Training) -> list[str]:
    """The metrics that `keepBest` may name: those of all evaluations, without those of single rewards."""
    return [name for each in training.evaluations for name in metric_names(each)]


def _names_an_evaluation(spec: RLJobSpec) -> bool:
    best = spec.checkpoint.keep_best
    prefixes = tuple(f"{EVALUATION_METRICS}{each.name}/" for each in spec.training.evaluations)
    return best is None or best.metric.startswith(prefixes)


TRAINING_EVALUATION_RULES = (
    unique_rule(
        Training,
        "evaluations",
        "name",
        lambda training: [each.name for each in training.evaluations],
        "give each evaluation a different name (the default is heldout)",
    ),
    rule(
        Training,
        "Training.evaluationDataset",
        field=".evaluations",
        cel=f"!{_HAS_DATASET} || self.evaluations.all(each, has(each.dataset))",
        wrong="each needs a dataset, because training has one",
        advice="add a dataset with held-out rows",
        holds=lambda training: not _without_rows(training),
        fault_paths=_without_rows,
    ),
    rule(
        Training,
        "Training.evaluationsScored",
        field=".evaluations",
        cel="size(self.evaluations) == 0 || size(self.rewards) > 0 || has(self.environment)",
        wrong="would have no scores, because training.rewards is empty",
        advice="add a reward (weight 0 keeps it out of the training), or remove the evaluations",
        holds=lambda training: not training.evaluations or bool(reward_names(training)),
    ),
    rule(
        Training,
        "Training.evaluationRewards",
        field=".evaluations",
        cel="self.evaluations.all(each, !has(each.rewards) || each.rewards.all(name,"
        " self.rewards.exists(reward, reward.name == name) || name == 'environment' && has(self.environment)"
        " && !self.rewards.exists(reward, reward.type == 'Environment')))",
        wrong="rewards must be names of training.rewards",
        advice="correct the name, or add the reward; weight 0 keeps it out of the training",
        holds=lambda training: not _unknown_rewards(training),
        fault_paths=_unknown_rewards,
        details=lambda training, _: reward_names(training),
    ),
    rule(
        Training,
        "Training.reasoningGymEvaluation",
        field=".evaluations",
        cel="self.evaluations.all(each, !has(each.dataset) || each.dataset.type == 'ReasoningGym'"
        " || !self.rewards.exists(reward, reward.type == 'ReasoningGym'"
        " && (!has(each.rewards) || reward.name in each.rewards)))",
        wrong="the dataset's type must be ReasoningGym, because a reward of type ReasoningGym scores the evaluation",
        advice="change the type of this dataset or of the reward, or name other rewards in `rewards`",
        holds=lambda training: not _with_other_rows(training),
        fault_paths=_with_other_rows,
    ),
    rule(
        Training,
        "Training.evaluationNewTokens",
        field=".evaluations",
        cel="self.evaluations.all(each, !has(each.maxNewTokens) || each.maxNewTokens <= self.rollout.maxNewTokens)",
        wrong="maxNewTokens must be at most rollout.maxNewTokens, for which the rollout engine has memory",
        advice="reduce it, or increase rollout.maxNewTokens",
        holds=lambda training: not _too_long(training),
        fault_paths=_too_long,
        details=lambda training, _: [f"rollout.maxNewTokens: {training.rollout.max_new_tokens}"],
    ),
    rule(
        Training,
        "Training.syncEverySteps",
        field=".evaluations",
        cel="self.evaluations.all(each, each.everySteps % self.rollout.syncEverySteps == 0)",
        wrong="everySteps must be a multiple of rollout.syncEverySteps, because an evaluation transfers the newest"
        " weights to the rollout engine",
        advice="change everySteps or rollout.syncEverySteps",
        holds=lambda training: not _not_synced(training),
        fault_paths=_not_synced,
        details=lambda training, _: [f"rollout.syncEverySteps: {training.rollout.sync_every_steps}"],
    ),
    rule(
        RLJobSpec,
        "RLJobSpec.keepBestMetric",
        field=".checkpoint.keepBest.metric",
        # An exact comparison would be too expensive for the API server; see `training_violations`.
        cel="!has(self.checkpoint.keepBest) || self.training.evaluations.exists(each,"
        " self.checkpoint.keepBest.metric.startsWith('eval/' + each.name + '/'))",
        wrong="must be a metric of one of training.evaluations, such as eval/heldout/greedy",
        advice="correct the name, or add the evaluation",
        holds=_names_an_evaluation,
        details=lambda spec, _: best_metrics(spec.training),
    ),
)
