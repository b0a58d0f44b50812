"""The whole configuration of the trainer: model, data, rewards, algorithm, batch sizes."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated

from pydantic import Field

from rljob_api.base import WireModel
from rljob_api.rule import Path, rule, unique_rule
from rljob_api.scalars import Count, Fraction, Number, PositiveCount
from rljob_api.v1alpha1.algorithm import Algorithm
from rljob_api.v1alpha1.dataset import Dataset, DatasetType, Evaluation, Filters, NamedDataset
from rljob_api.v1alpha1.environment import Environment
from rljob_api.v1alpha1.model import Critic, LoraSync, Model
from rljob_api.v1alpha1.optimizer import Optimizer
from rljob_api.v1alpha1.reward import Reward, RewardType
from rljob_api.v1alpha1.rollout import Rollout, RolloutEngine
from rljob_api.v1alpha1.tracker import Tracker

ENVIRONMENT_REWARD = "environment"
"""The name of the reward that is added if a job with an environment lists none of type Environment."""
_NEEDS_GYM = "self.rewards.exists(reward, reward.type == 'ReasoningGym')"


class Logger(StrEnum):
    """A sink for metrics, in addition to JSON Lines, which are always written."""

    CONSOLE = "Console"
    TENSORBOARD = "TensorBoard"


class ProfilerType(StrEnum):
    """A profiler."""

    TORCH = "Torch"
    NSYS = "Nsys"


class Profile(WireModel):
    """Profiles of single steps, in `profiles/` of the run folder. A profiled step is slower."""

    type: ProfilerType = ProfilerType.TORCH
    """Torch: torch.profiler. Nsys: NVIDIA Nsight Systems, which must be installed."""
    steps: Annotated[tuple[PositiveCount, ...], Field(min_length=1, max_length=16)]
    """Steps, counted from 1."""
    ranks: Annotated[tuple[Count, ...], Field(min_length=1, max_length=16)] = (0,)
    """Workers of the actor's pool, counted from 0."""


class IncompleteGroup(StrEnum):
    """What happens to a group of responses that lost members."""

    TRAIN_ON_REST = "TrainOnRest"
    """It trains on the others. An advantage that compares responses needs at least two."""
    REFILL = "Refill"
    """The missing responses are generated again with other seeds, at most twice. The step waits for them."""


class PromptSamplingType(StrEnum):
    """How often rows are drawn."""

    UNIFORM = "Uniform"
    """Each row once per epoch."""
    PASS_RATE = "PassRate"
    """Rows that are always or never solved are drawn in fewer epochs."""


class PromptSampling(WireModel):
    """How often the rows of the datasets are drawn."""

    type: PromptSamplingType = PromptSamplingType.UNIFORM
    """PassRate draws rows that are always or never solved in fewer epochs.

    A row with pass rate p is drawn in 4 p (1 - p) of the epochs, at least in every tenth. The first epoch has all rows.
    At most 100,000 rows."""
    pass_threshold: Number = 1.0
    """A response with at least this score passes."""


class Training(WireModel):
    """The training run: model, dataset, rewards, algorithm and batch sizes."""

    model: Model
    dataset: Dataset | None = None
    """Rows with a prompt and an answer. Optional with an environment, whose `reset` then gives all prompts."""
    datasets: Annotated[tuple[NamedDataset, ...], Field(max_length=16)] = ()
    """Several datasets with names, from which prompts are drawn in fixed proportions. Instead of dataset."""
    filters: Filters = Field(default_factory=Filters)
    prompt_sampling: PromptSampling = Field(default_factory=PromptSampling)
    environment: Environment | None = None
    """The environment of rollouts of several turns. When unset, a response is a single turn."""
    rewards: Annotated[tuple[Reward, ...], Field(max_length=16)] = ()
    """Rewards, each of which scores every response. The score of a response is the sum of weight x score over all
    rewards. At least one without an environment."""
    max_failure_rate: Fraction = 0.2
    """Largest fraction of responses of the last 10 steps that may be excluded. Above it the run fails. 1: no limit.

    Responses are excluded because a reward failed (`onError`, `onTimeout`: Exclude), a service was unreachable, or the
    rollout engine did not complete the response."""
    on_incomplete_group: IncompleteGroup = IncompleteGroup.TRAIN_ON_REST
    """What happens to a group that lost members, because responses were excluded."""
    algorithm: Algorithm = Field(default_factory=Algorithm)
    optimizer: Optimizer = Field(default_factory=Optimizer)
    critic: Critic | None = None
    """The critic, for an algorithm that needs one (PPO). When unset, the critic of such an algorithm has default
    settings."""
    rollout: Rollout = Field(default_factory=Rollout)
    evaluations: Annotated[tuple[Evaluation, ...], Field(max_length=8)] = ()
    """Evaluations during training. The first one is shown where there is room for only one score."""
    loggers: Annotated[tuple[Logger, ...], Field(max_length=8)] = (Logger.CONSOLE, Logger.TENSORBOARD)
    """Sinks for metrics, in addition to JSON Lines, which are always written."""
    trackers: Annotated[tuple[Tracker, ...], Field(max_length=2)] = ()
    """W&B and MLflow.

    They get the job, all metrics, samples of each evaluation, and the page of the run."""
    steps: Count
    """Total number of training steps, including those before a resume. 0: only evaluate, train nothing."""
    batch_size: PositiveCount = 64
    """Number of prompts per step, over all workers. Each prompt gets rollout.groupSize responses.

    64 prompts with 8 responses each give 512 responses per step. All GPUs of the actor's pool train on the same number
    of responses (with sequenceParallel, all sets of GPUs that share sequences)."""
    mini_batch_size: PositiveCount | None = None
    """Number of prompts per optimizer update, over all workers; batchSize when unset (one update per step, strictly
    on-policy)."""
    num_epochs_per_batch: PositiveCount = 1
    """Number of passes over the responses of each step."""
    max_tokens_per_micro_batch: PositiveCount = 16384
    """Largest number of tokens in one forward and backward pass of one worker. This limits memory and does not change
    the result.

    Padding counts only for models that need padded sequences. n workers that share sequences (sequenceParallel) process
    n times as many tokens together."""
    seed: Count = 0
    """Seed of the order of prompts, of sampling, and of newly initialised weights."""
    entropy_every_steps: Count = 1
    """Number of steps between two values of the metric actor/entropy; 0 computes it only where the loss needs it."""
    timeline_steps: Annotated[tuple[PositiveCount, ...], Field(max_length=16)] = ()
    """Steps, counted from 1, whose timeline is written to `timelines/` in the run folder, for example `[2, 10]`.

    A timeline shows the controller's phases and the work of each worker, in Perfetto or chrome://tracing."""
    profile: Profile | None = None

    @property
    def sources(self) -> dict[str, Dataset]:
        """The datasets of the training, by their field relative to it: `dataset`, or `datasets[0]`, `datasets[1]`."""
        if self.dataset is not None:
            return {"dataset": self.dataset}
        return {f"datasets[{index}]": each for index, each in enumerate(self.datasets)}

    @property
    def max_sequence_tokens(self) -> int:
        """Tokens of the longest sequence: `maxPromptTokens` + `maxNewTokens`, or with an environment
        `maxContextTokens`."""
        if self.environment is not None:
            return self.environment.max_context_tokens
        longest = max((each.max_prompt_tokens for each in self.sources.values()), default=0)
        return longest + self.rollout.max_new_tokens


def _engine_supports_lora_sync(training: Training) -> bool:
    lora = training.model.lora
    wants_adapter = lora is not None and lora.sync is LoraSync.ADAPTER
    return not wants_adapter or training.rollout.engine is not RolloutEngine.HUGGING_FACE


def _needs_gym(training: Training) -> bool:
    return any(reward.type is RewardType.REASONING_GYM for reward in training.rewards)


def _gym_scores_gym(training: Training) -> bool:
    """Whether each reward of type ReasoningGym only scores datasets of that type, and at most one of them: it has the
    scorer of one task."""
    named = {each.name for each in training.rewards if each.type is RewardType.REASONING_GYM}
    scored = [
        each
        for each in training.sources.values()
        if not isinstance(each, NamedDataset) or not each.rewards or named & set(each.rewards)
    ]
    is_gym = all(each.type is DatasetType.REASONING_GYM for each in scored)
    of_one = all(sum(not each.rewards or name in each.rewards for each in training.datasets) <= 1 for name in named)
    return not named or (is_gym and of_one and bool(training.sources))


def reward_names(training: Training) -> list[str]:
    """The names of all rewards, with the one that an environment may add."""
    is_listed = any(reward.type is RewardType.ENVIRONMENT for reward in training.rewards)
    added = [ENVIRONMENT_REWARD] if training.environment is not None and not is_listed else []
    return [*(reward.name for reward in training.rewards), *added]


def _unknown_rewards(training: Training) -> list[Path]:
    """Paths, relative to `datasets`, of names that no reward has."""
    known = reward_names(training)
    return [
        (index, "rewards", number)
        for index, dataset in enumerate(training.datasets)
        for number, name in enumerate(dataset.rewards)
        if name not in known
    ]


def _unweighted(training: Training) -> list[Path]:
    """Paths, relative to `datasets`, of the rewards of datasets that are scored only with weight 0."""
    without = {reward.name for reward in training.rewards if reward.weight == 0}
    return [
        (index, "rewards")
        for index, dataset in enumerate(training.datasets)
        if dataset.rewards and set(dataset.rewards) <= without
    ]


def _too_long_buffers(training: Training) -> list[Path]:
    """Paths, relative to `rewards`, of each `bufferTokens` above the length limit of responses."""
    limit = training.rollout.max_new_tokens
    return [
        (index, "overlong", "bufferTokens")
        for index, reward in enumerate(training.rewards)
        if reward.overlong is not None and reward.overlong.buffer_tokens > limit
    ]


def _steps_after_critic_warmup(training: Training) -> int:
    """The number of steps that train the policy."""
    return training.steps - (training.critic.warmup_steps if training.critic is not None else 0)


def _late_steps(steps: Sequence[int], training: Training) -> list[Path]:
    """Paths, relative to the list, of the steps after the last step."""
    return [(index,) for index, step in enumerate(steps) if step > training.steps]


def _num_steps(training: Training, _: Path) -> list[str]:
    return [f"training.steps: {training.steps}"]


TRAINING_RULES = (
    rule(
        Training,
        "Training.evaluationsOnly",
        field=".steps",
        cel="self.steps > 0 || size(self.evaluations) > 0",
        wrong="0 steps need evaluations",
        advice="add one, or increase steps",
        holds=lambda training: training.steps > 0 or len(training.evaluations) > 0,
    ),
    rule(
        Training,
        "Training.warmupSteps",
        field=".optimizer.warmupSteps",
        # If critic.warmupSteps is too large by itself, another rule reports it.
        cel="has(self.critic) && self.critic.warmupSteps >= self.steps"
        " || self.optimizer.warmupSteps <= self.steps - (has(self.critic) ? self.critic.warmupSteps : 0)",
        wrong="must be at most training.steps, or with a critic at most training.steps - critic.warmupSteps",
        advice="reduce optimizer.warmupSteps, or increase training.steps",
        holds=lambda t: (
            (t.critic is not None and t.critic.warmup_steps >= t.steps)
            or t.optimizer.warmup_steps <= _steps_after_critic_warmup(t)
        ),
    ),
    rule(
        Training,
        "Training.timelineSteps",
        field=".timelineSteps",
        cel="self.timelineSteps.all(step, step <= self.steps)",
        wrong="each step must be at most training.steps",
        advice="remove it, or increase training.steps",
        holds=lambda t: not _late_steps(t.timeline_steps, t),
        fault_paths=lambda t: _late_steps(t.timeline_steps, t),
        details=_num_steps,
    ),
    rule(
        Training,
        "Training.profileSteps",
        field=".profile.steps",
        cel="!has(self.profile) || self.profile.steps.all(step, step <= self.steps)",
        wrong="each step must be at most training.steps",
        advice="remove it, or increase training.steps",
        holds=lambda t: t.profile is None or not _late_steps(t.profile.steps, t),
        fault_paths=lambda t: _late_steps(t.profile.steps, t) if t.profile is not None else [],
        details=_num_steps,
    ),
    rule(
        Training,
        "Training.loraSync",
        field=".model.lora.sync",
        cel="!has(self.model.lora) || self.model.lora.sync != 'Adapter' || self.rollout.engine != 'HuggingFace'",
        wrong="must not be Adapter with rollout.engine: HuggingFace, which does not support adapters",
        advice="use Merged or Auto, or rollout.engine: VLLM",
        holds=_engine_supports_lora_sync,
    ),
    unique_rule(
        Training,
        "rewards",
        "name",
        lambda training: [reward.name for reward in training.rewards],
        "give each reward a different name (the default is score)",
    ),
    unique_rule(
        Training,
        "datasets",
        "name",
        lambda training: [dataset.name for dataset in training.datasets],
        "give each dataset a different name",
    ),
    rule(
        Training,
        "Training.datasets",
        field=".datasets",
        cel="!has(self.dataset) || size(self.datasets) == 0",
        wrong="cannot be used together with training.dataset, the short form for one dataset",
        advice="move the dataset into datasets, with a name",
        holds=lambda training: training.dataset is None or not training.datasets,
    ),
    rule(
        Training,
        "Training.datasetRewards",
        field=".datasets",
        # An environment may add a reward.
        cel="self.datasets.all(dataset, dataset.rewards.all(name, self.rewards.exists(reward, reward.name == name)"
        f" || has(self.environment) && name == '{ENVIRONMENT_REWARD}'))",
        wrong="rewards must be names of training.rewards",
        advice="correct the names",
        holds=lambda training: not _unknown_rewards(training),
        fault_paths=_unknown_rewards,
        details=lambda training, _: [f"names: {', '.join(reward_names(training))}"],
    ),
    rule(
        Training,
        "Training.datasetRewardWeights",
        field=".datasets",
        cel="self.datasets.all(dataset, size(dataset.rewards) == 0 || dataset.rewards.exists(name,"
        " !self.rewards.exists(reward, reward.name == name && reward.weight == 0.0)))",
        wrong="all rewards of a dataset have weight 0, so its prompts would teach nothing",
        advice="name a reward with another weight",
        holds=lambda training: not _unweighted(training),
        fault_paths=_unweighted,
    ),
    unique_rule(
        Training,
        "trackers",
        "type",
        lambda training: [tracker.type for tracker in training.trackers],
        "remove one of them",
    ),
    rule(
        Training,
        "Training.overlongBuffer",
        field=".rewards",
        cel="self.rewards.all(reward, !has(reward.overlong)"
        " || reward.overlong.bufferTokens <= self.rollout.maxNewTokens)",
        wrong="overlong.bufferTokens must be at most rollout.maxNewTokens",
        advice="reduce bufferTokens, or increase maxNewTokens",
        holds=lambda training: not _too_long_buffers(training),
        fault_paths=_too_long_buffers,
    ),
    rule(
        Training,
        "Training.reasoningGymReward",
        field=".rewards",
        cel=f"!{_NEEDS_GYM} || has(self.dataset) && self.dataset.type == 'ReasoningGym'"
        " || size(self.datasets) > 0 && self.datasets.all(dataset, dataset.type == 'ReasoningGym' ||"
        " size(dataset.rewards) > 0 && !self.rewards.exists(reward, reward.type == 'ReasoningGym' &&"
        " reward.name in dataset.rewards)) && self.rewards.all(reward, reward.type != 'ReasoningGym' ||"
        " self.datasets.filter(dataset, size(dataset.rewards) == 0 || reward.name in dataset.rewards).size() <= 1)",
        wrong="a reward of type ReasoningGym requires training.dataset.type: ReasoningGym, and scores one dataset",
        advice="change the type of the reward or of the dataset, or the names in datasets[].rewards",
        holds=_gym_scores_gym,
    ),
    rule(
        Training,
        "Training.oneRewardModel",
        field=".rewards",
        cel="self.rewards.filter(reward, reward.type == 'RewardModel').size() <= 1",
        wrong="at most one reward may have the type RewardModel",
        advice="remove the others",
        holds=lambda training: sum(reward.type is RewardType.REWARD_MODEL for reward in training.rewards) <= 1,
    ),
)
