"""The prompts of training and evaluation: their source, and how a row becomes the prompt of the policy."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field, JsonValue

from rljob_api.base import WireModel
from rljob_api.rule import revision_rule, rule, union_rules
from rljob_api.scalars import Count, Flag, LongText, PositiveCount, ShortText

_PROMPT = "{prompt}"


class DatasetType(StrEnum):
    """Kind of dataset. Its settings are in the block with the name of the kind: `file`, `huggingFace` or
    `reasoningGym`."""

    FILE = "File"
    HUGGING_FACE = "HuggingFace"
    REASONING_GYM = "ReasoningGym"


class FileDataset(WireModel):
    """A file in JSON Lines or Parquet format; its name must end in `.jsonl` or `.parquet`."""

    path: LongText
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
    shuffle: Flag = True
    """Shuffle the rows in each epoch, with a generator seeded by `training.seed`. If false, the rows keep their order.
    """


DATASET_RULES = (
    *union_rules(
        Dataset,
        (
            ("File", "file", lambda dataset: (dataset.type, dataset.file)),
            ("HuggingFace", "hugging_face", lambda dataset: (dataset.type, dataset.hugging_face)),
            ("ReasoningGym", "reasoning_gym", lambda dataset: (dataset.type, dataset.reasoning_gym)),
        ),
    ),
    revision_rule(HuggingFaceDataset, "path", lambda dataset: (dataset.path, dataset.revision)),
    rule(
        Dataset,
        "Dataset.promptTemplate",
        field=".promptTemplate",
        cel="self.promptTemplate.contains('{prompt}')"
        " && self.promptTemplate.indexOf('{prompt}') == self.promptTemplate.lastIndexOf('{prompt}')",
        wrong="must contain {prompt} exactly once",
        advice="write {prompt} once, where the row's prompt belongs",
        holds=lambda dataset: dataset.prompt_template.count(_PROMPT) == 1,
    ),
)
