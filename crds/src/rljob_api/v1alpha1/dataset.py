"""Where prompts come from, how a row becomes the text that the policy continues, and what is held out."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field, JsonValue

from rljob_api.base import WireModel
from rljob_api.rule import revision_rule, rule, union_rules
from rljob_api.scalars import Count, Flag, LongText, PositiveCount, ShortText, Temperature

_PROMPT = "{prompt}"


class DatasetType(StrEnum):
    """One block of the same name (camelCase) says the rest."""

    FILE = "File"
    HUGGING_FACE = "HuggingFace"
    REASONING_GYM = "ReasoningGym"


class FileDataset(WireModel):
    """JSON Lines (`.jsonl`) or Parquet (`.parquet`), chosen by the file's name."""

    path: LongText
    """A path (relative to the job file when run locally) or `package://<python package>/<path>`."""


class HuggingFaceDataset(WireModel):
    """A dataset of the Hugging Face hub, or a local folder in its layout."""

    path: LongText
    subset: ShortText | None = None
    split: ShortText = "train"
    revision: ShortText | None = None


class ReasoningGymDataset(WireModel):
    """Procedurally generated, verifiable tasks of the `reasoning-gym` library."""

    task: ShortText
    """Name of the task, for example `basic_arithmetic`."""
    seed: Count = 0
    size: PositiveCount = 1000
    """Number of rows generated."""
    config: Annotated[dict[str, JsonValue], Field(max_length=64)] = Field(default_factory=dict)
    """The task's own settings, passed through as written."""


class OverlongPrompt(StrEnum):
    """What to do with a prompt of more than `maxPromptTokens` tokens."""

    FAIL = "Fail"
    DROP = "Drop"
    """Leave the row out; the number of rows dropped is logged."""


class Dataset(WireModel):
    """Rows of prompt and answer."""

    type: DatasetType
    file: FileDataset | None = None
    hugging_face: HuggingFaceDataset | None = None
    reasoning_gym: ReasoningGymDataset | None = None
    prompt_field: ShortText = "prompt"
    """Column with the prompt: text, or a list of chat messages. Dots lead into dictionaries and lists:
    `extra_info.question`, `messages.0.content`; a column that has the dots in its name comes first. ReasoningGym:
    always its question."""
    answer_field: ShortText = "answer"
    """Column handed to the reward as the expected answer, with dots as in promptField: `reward_model.ground_truth` in
    verl's files. ReasoningGym: always its answer."""
    prompt_template: LongText = "{prompt}"
    """Text around the prompt; must contain `{prompt}` exactly once. Leave it out where prompts are chat messages."""
    apply_chat_template: Flag = False
    """Wrap the prompt as a user message in the tokenizer's chat template."""
    max_prompt_tokens: PositiveCount = 512
    overlong_prompt: OverlongPrompt = OverlongPrompt.FAIL
    shuffle: Flag = True
    """Visit the rows in an order drawn from `training.seed`, a new one each epoch."""


class Evaluation(WireModel):
    """Greedy accuracy, and sampled accuracy beside it, on the same prompts each time.

    Rows of the training set whose prompt occurs here are left out of training."""

    dataset: Dataset
    num_prompts: PositiveCount = 256
    """The first n rows of the dataset; fewer if it has fewer."""
    every_steps: Count = 20
    """0: only before the first and after the last step."""
    at_start: Flag = True
    num_samples: Count = 1
    """Sampled responses per prompt, beside the greedy one; 0 for none."""
    temperature: Temperature = 1.0
    """Of the sampled responses."""


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
        advice="write {prompt} where the row's prompt belongs",
        holds=lambda dataset: dataset.prompt_template.count(_PROMPT) == 1,
    ),
)
