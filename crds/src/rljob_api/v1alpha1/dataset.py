"""The prompts of training and of evaluations: their source, how a row becomes the prompt of the policy, and how an
evaluation scores the responses."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

from pydantic import Field, JsonValue, StrictStr

from rljob_api.base import WireModel
from rljob_api.rule import Rule, revision_rule, rule, union_rules
from rljob_api.scalars import (
    REWARD_NAME,
    Count,
    FilePath,
    Flag,
    LongText,
    Number,
    OpenFraction,
    PositiveCount,
    PositiveNumber,
    ShortText,
    Temperature,
)
from rljob_api.v1alpha1.reward import RewardName

_PROMPT = "{prompt}"
EvaluationName = Annotated[StrictStr, Field(max_length=63, pattern=REWARD_NAME)]

MAX_SAMPLES = 1024
EVALUATION_METRICS = "eval/"
"""The metrics of an evaluation are `eval/<name>/...`."""


class DatasetType(StrEnum):
    """Kind of dataset. Its settings are in the block with the name of the kind: `file`, `huggingFace` or
    `reasoningGym`."""

    FILE = "File"
    HUGGING_FACE = "HuggingFace"
    REASONING_GYM = "ReasoningGym"


class FileDataset(WireModel):
    """A file in JSON Lines or Parquet format, whose name ends in `.jsonl` or `.parquet`, or a folder of Parquet
    files."""

    path: FilePath
    """Path of the file, or `package://<python package>/<path>`. A relative path starts at the folder of the job file
    (`rljob run`) or of the job's code (cluster)."""


class HuggingFaceDataset(WireModel):
    """A dataset of the Hugging Face Hub, or a local folder with the same layout."""

    path: LongText
    """Repository (`openai/gsm8k`) or local folder."""
    subset: ShortText | None = None
    """Configuration of the dataset, for example `main`; the dataset's default when unset."""
    split: ShortText = "train"
    """Split of the dataset, for example `test`."""
    revision: ShortText | None = None
    """Commit, tag or branch of the repository; its default branch when unset."""


class ReasoningGymDataset(WireModel):
    """Procedurally generated, verifiable tasks of the `reasoning-gym` library."""

    task: ShortText
    """Name of the task, for example `basic_arithmetic`."""
    seed: Count = 0
    """Seed of the generator."""
    size: PositiveCount = 1000
    """Number of generated rows."""
    config: Annotated[dict[str, JsonValue], Field(max_length=64)] = Field(default_factory=dict)
    """Settings of the task, passed to the library unchanged, for example `{max_terms: 4}`."""


class OverlongPrompt(StrEnum):
    """What happens if a prompt has more than `maxPromptTokens` tokens."""

    FAIL = "Fail"
    """The run fails."""
    DROP = "Drop"
    """The row is not used; the log has the number of dropped rows."""


class Duplicates(StrEnum):
    """What happens to rows that repeat an earlier prompt of the dataset."""

    KEEP = "Keep"
    DROP = "Drop"


class Filters(WireModel):
    """Which training rows are not used, in addition to those with the prompt of an evaluation.

    `data/filters.json` in the run folder has their number."""

    duplicates: Duplicates = Duplicates.KEEP
    """What happens to rows that repeat an earlier prompt of the dataset.

    Several white space characters count as one space."""
    contamination_ngram_words: Annotated[PositiveCount, Field(ge=2, le=100)] | None = None
    """Drops rows that have this number of consecutive words in common with an evaluation prompt, for example 13.

    Case and punctuation do not matter."""


class Dataset(WireModel):
    """Rows with a prompt and an answer."""

    type: DatasetType
    file: FileDataset | None = None
    hugging_face: HuggingFaceDataset | None = None
    reasoning_gym: ReasoningGymDataset | None = None
    prompt_field: ShortText = "prompt"
    """Column with the prompt: a string, or a list of chat messages. Dots select within dictionaries and lists, for
    example `extra_info.question` or `messages.0.content`. Ignored for ReasoningGym.

    A column whose name contains the dots has precedence."""
    answer_field: ShortText = "answer"
    """Column with the expected answer, which rewards receive. Dots select as in promptField, for example
    `reward_model.ground_truth` in verl's files. Ignored for ReasoningGym."""
    source_field: ShortText | None = None
    """Column with the row's source, for example `data_source`. Each source has its own metrics.

    Strings or integers, at most 50 different ones. Dots select as in promptField."""
    tools_field: ShortText | None = None
    """Column with tools for the chat template: a list, or JSON text of one.

    Entries have the form `{"type": "function", "function": {"name": ...}}`. Needs chat messages or applyChatTemplate.
    Dots select as in promptField."""
    prompt_template: LongText = "{prompt}"
    """Text around the prompt, which contains `{prompt}` exactly once, for example `Question: {prompt} Answer:`. Do not
    set it if prompts are chat messages."""
    apply_chat_template: Flag = False
    """Format the prompt as a user message with the tokenizer's chat template. With training.environment this is always
    done."""
    max_prompt_tokens: PositiveCount = 512
    """Largest length of a prompt in tokens; see overlongPrompt. With training.environment: of the row's prompt, without
    tools and without what `reset` adds."""
    overlong_prompt: OverlongPrompt = OverlongPrompt.FAIL
    system_prompt: LongText | None = None
    """System message before the messages of each prompt. Needs chat messages, applyChatTemplate or an environment.

    A row that already has a system message is an error."""
    shuffle: Flag = True
    """Shuffle the rows in each epoch, with a generator seeded by `training.seed`. If false, the rows keep their order.
    """


class NamedDataset(Dataset):
    """One of several datasets that training draws from."""

    name: RewardName
    """Name of the dataset in metrics and samples, for example `maths`."""
    weight: PositiveNumber = 1.0
    """Share of the prompts, relative to the weights of the other datasets.

    With weights 3 and 1, the order is A A B A, A A B A, and so on. The order is fixed: among any consecutive prompts,
    the number of prompts of a dataset differs from its share by less than 2."""
    rewards: Annotated[tuple[RewardName, ...], Field(max_length=16)] = ()
    """Names of the rewards that score responses to these prompts; empty: all."""


class Evaluation(WireModel):
    """Scoring of greedy and sampled responses to held-out prompts, each time the same prompts.

    Training does not use rows whose prompt is among the prompts of an evaluation."""

    name: EvaluationName = "heldout"
    """Name in metrics and samples, for example `gsm8k`."""
    dataset: Dataset | None = None
    """Rows with held-out prompts. Fields as in training.dataset; unset if that is unset."""
    rewards: Annotated[tuple[RewardName, ...], Field(min_length=1, max_length=16)] | None = None
    """Names of the rewards that score the responses; all when unset.

    The score is the weighted sum of these rewards. If all of them have weight 0, each counts with weight 1. Other
    rewards do not run."""
    num_prompts: PositiveCount = 256
    """Number of prompts: the first rows of the dataset, or all if it has fewer. Without a dataset: number of rollouts,
    whose environments have other seeds than those of training."""
    every_steps: Count = 20
    """Evaluate after every n-th training step, and after the last one; 0: only after the last one."""
    at_start: Flag = True
    """Evaluate before the first step."""
    greedy: Flag = True
    """Generate one greedy response per prompt."""
    num_samples: Annotated[Count, Field(le=MAX_SAMPLES)] = 1
    """Number of sampled responses per prompt in addition to the greedy one."""
    temperature: Temperature = 1.0
    """Sampling temperature of the sampled responses."""
    top_p: OpenFraction = 1.0
    """Sample from the most likely tokens whose probabilities add up to this number; 1: from all."""
    max_new_tokens: PositiveCount | None = None
    """Largest length of a response in tokens, at most rollout.maxNewTokens; rollout.maxNewTokens when unset."""
    pass_threshold: Number = 1.0
    """A response with at least this score passes (metric pass_at_k)."""


def metric_names(evaluation: Evaluation) -> Iterator[str]:
    """Yields the names of the metrics of an evaluation, its main score first. Metrics of single rewards and of sources
    are not included."""
    prefix = f"{EVALUATION_METRICS}{evaluation.name}/"
    num_samples = evaluation.num_samples
    if evaluation.greedy:
        yield prefix + "greedy"
    if num_samples:
        yield f"{prefix}mean_at_{num_samples}"
        yield from (f"{prefix}pass_at_{k}" for k in pass_at_ks(num_samples))
        yield f"{prefix}maj_at_{num_samples}"
    yield prefix + "excluded_fraction"
    yield prefix + "response_length_mean"


def pass_at_ks(num_samples: int) -> list[int]:
    """The k of pass@k: the powers of two below `num_samples`, and `num_samples`. Example: 6 gives 1, 2, 4, 6."""
    return [*(1 << power for power in range(num_samples.bit_length()) if 1 << power < num_samples), num_samples]


@dataclass(frozen=True)
class EvaluationScores:
    """The mean scores of an evaluation."""

    name: str
    """Name of the evaluation."""
    labels: Mapping[str, str]
    """Readable labels by the name of the metric, the main score first: `{"eval/heldout/greedy": "greedy",
    "eval/heldout/mean_at_4": "sampled"}`."""


def scores_of(evaluations: Iterable[Evaluation]) -> list[EvaluationScores]:
    """The mean scores of each evaluation. The first of an evaluation is its main score: that of greedy responses, or
    without them that of sampled ones."""
    found = []
    for each in evaluations:
        labels = {f"{EVALUATION_METRICS}{each.name}/greedy": "greedy"} if each.greedy else {}
        if each.num_samples:
            labels[f"{EVALUATION_METRICS}{each.name}/mean_at_{each.num_samples}"] = "sampled"
        found.append(EvaluationScores(each.name, labels))
    return found


def _rules_of(kind: type[Dataset]) -> tuple[Rule, ...]:
    """The rules of `Dataset`, for it or for a subclass."""
    return (
        *union_rules(
            kind,
            (
                ("File", "file", lambda dataset: (dataset.type, dataset.file)),
                ("HuggingFace", "hugging_face", lambda dataset: (dataset.type, dataset.hugging_face)),
                ("ReasoningGym", "reasoning_gym", lambda dataset: (dataset.type, dataset.reasoning_gym)),
            ),
        ),
        rule(
            kind,
            f"{kind.__name__}.promptTemplate",
            field=".promptTemplate",
            cel="self.promptTemplate.contains('{prompt}')"
            " && self.promptTemplate.indexOf('{prompt}') == self.promptTemplate.lastIndexOf('{prompt}')",
            wrong="must contain {prompt} exactly once",
            advice="write {prompt} once, where the row's prompt belongs",
            holds=lambda dataset: dataset.prompt_template.count(_PROMPT) == 1,
        ),
    )


DATASET_RULES = (
    *_rules_of(Dataset),
    *_rules_of(NamedDataset),
    revision_rule(HuggingFaceDataset, "path", lambda dataset: (dataset.path, dataset.revision)),
    rule(
        Evaluation,
        "Evaluation.responses",
        field=".numSamples",
        cel="self.greedy || self.numSamples > 0",
        wrong="must be above 0 with greedy: false, or there is no response",
        advice="increase numSamples, or remove greedy: false",
        holds=lambda evaluation: evaluation.greedy or evaluation.num_samples > 0,
    ),
)
