"""Makes prompts of raw rows: checks them, applies the templates and tokenizes them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rljob_api.v1alpha1.dataset import Dataset, DatasetType, NamedDataset, OverlongPrompt
from rljob_trainer.datasets.chat_prompts import ChatTemplate, ignored_key, tools_of, why_not_a_prompt
from rljob_trainer.datasets.filters import comparable
from rljob_trainer.datasets.row_values import Sources, answer_of, value_at
from rljob_trainer.datasets.rows import RawRow
from rljob_trainer.errors import DatasetError
from rljob_trainer.models.assistant_turn import AssistantTurn

if TYPE_CHECKING:
    # Importing this module loads transformers.
    from rljob_trainer.models.tokenizer import ChatMessage, Tokenizer, ToolSchema

DATASET = "spec.training.dataset"
"""Field path of the dataset block."""
PLACEHOLDER = "{prompt}"
SYSTEM = "system"
SOURCE = "source"
"""The part of a metric's name that comes before the name of a source."""


@dataclass(frozen=True)
class PromptRow:
    """One prompt of a dataset."""

    index: int
    """Row number in the dataset, from 0; dropped rows count."""
    prompt: str
    """The text that the policy continues; prompt template and chat template are already applied."""
    source_prompt: str
    """The text that filters compare: the original prompt in the data (of a chat, the contents of its messages). With an
    environment it is `content` if the row has no prompt, or if its prompt does not identify the task
    (`repeated_prompts`)."""
    token_ids: tuple[int, ...]
    """Tokens of `prompt`, including tokens that the model expects at the beginning, such as BOS."""
    answer: object
    """The expected answer; None if the data has no answer column."""
    row: Mapping[str, object]
    """All columns of the row, for the reward."""
    messages: tuple[ChatMessage, ...] | None = None
    """The chat from which `prompt` was rendered; None for a plain text prompt."""
    turn_beginning: str = ""
    """The beginning of the assistant's turn that the chat template has written, such as `<think>\n`. This text is the
    end of `prompt`, but rewards get it as the beginning of the response."""
    plain_turn_beginning: str = ""
    """The same without special tokens, for a reward model that reads texts."""
    location: str = field(default="", compare=False)
    """Location of the row for messages: file and line, or dataset and row number."""
    dataset: str = ""
    """Name of the dataset in `training.datasets`; empty for the only dataset."""
    rewards: tuple[str, ...] = ()
    """The names of the rewards that score responses to this prompt; empty: all."""
    content: str = ""
    """With an environment, all columns as JSON, because the environment may use any of them; for reasoning-gym only the
    prompt, because other columns contain the row number, which differs in equal tasks. Otherwise empty."""
    source: str = ""
    """Name of the row's source, as metrics have it; empty if the dataset has no `sourceField`."""

    @property
    def metric_names(self) -> tuple[str, ...]:
        """The names of the row's dataset and source in metrics, such as `maths` and `maths/source/gsm8k`."""
        if not self.source:
            return (self.dataset,) if self.dataset else ()
        return (self.dataset, f"{self.dataset}/{SOURCE}/{self.source}") if self.dataset else (self.source,)

    @property
    def text_for_rewards(self) -> str:
        """`prompt` without `turn_beginning`."""
        return self.prompt.removesuffix(self.turn_beginning)


@dataclass(frozen=True)
class _RenderedPrompt:
    """A row's prompt before tokenization."""

    prompt: str
    source_prompt: str
    messages: tuple[ChatMessage, ...] | None
    """The messages from which the chat template has rendered `prompt`; None for plain text. A rendered prompt already
    contains the special tokens."""
    turn_beginning: str = ""
    plain_turn_beginning: str = ""


class PromptMaker:
    """Makes the prompts of one dataset block."""

    def __init__(
        self,
        dataset: Dataset,
        tokenizer: Tokenizer,
        where: str,
        *,
        for_environment: bool = False,
        repeated: frozenset[str] = frozenset(),
    ) -> None:
        """`where` is the field path for messages. `for_environment`: the rows begin rollouts with an environment. They
        have no tokens, because the environment may add to their prompts or replace them; the limits of the dataset
        apply to the row's own prompt. A row may have no prompt: then it has no messages, and its prompt is empty.
        `repeated`: prompts that do not identify a task (`repeated_prompts`).

        Raises DatasetError."""
        if dataset.prompt_template.count(PLACEHOLDER) != 1:
            raise DatasetError(
                f"{where}.promptTemplate: must contain {PLACEHOLDER} exactly once (seen: {dataset.prompt_template!r})"
            )
        if for_environment and dataset.tools_field is not None:
            raise DatasetError(
                f"{where}.toolsField: would be ignored, because training.environment defines the tools; remove it"
            )
        self.dataset, self.where = dataset, where
        self.name, self.rewards = "", tuple[str, ...]()
        if isinstance(dataset, NamedDataset):
            self.name, self.rewards = dataset.name, dataset.rewards
        self.sources = Sources(dataset, where)
        self.for_environment = for_environment
        self._repeated = repeated
        self.prompt_field, self.answer_field = _fields(dataset)
        self._tokenizer = tokenizer
        self._template = ChatTemplate(tokenizer, self.prompt_field)
        self._turn = AssistantTurn(tokenizer)

    def make_prompts(self, rows: Sequence[RawRow], numbers: Sequence[int]) -> list[PromptRow | None]:
        """Returns the prompt of each row; None if it is too long and the job sets `overlongPrompt: Drop`. `numbers`:
        the numbers of the rows in the dataset.

        A prompt that is a list of chat messages is rendered with the chat template only; `promptTemplate` must then be
        the default. Raises DatasetError with the location of the first unusable row."""
        return self._made_for_environment(rows, numbers) if self.for_environment else self._made(rows, numbers)

    def _made(self, rows: Sequence[RawRow], numbers: Sequence[int]) -> list[PromptRow | None]:
        texts = [
            _checked_unicode(
                _rendered_prompt(
                    raw, self.prompt_field, self.dataset, self._tokenizer, self._template, self._turn, self.where
                ),
                raw,
            )
            for raw in rows
        ]
        return [
            PromptRow(
                number,
                text.prompt,
                text.source_prompt,
                token_ids,
                answer_of(raw, self.answer_field, self.dataset, self.where),
                raw.columns,
                text.messages,
                text.turn_beginning,
                text.plain_turn_beginning,
                raw.location,
                self.name,
                self.rewards,
                source=self.sources.name_of(raw),
            )
            if _fits(len(token_ids), raw, self.dataset, self.where)
            else None
            for number, raw, text, token_ids in zip(numbers, rows, texts, _encode(texts, self._tokenizer), strict=True)
        ]

    def _made_for_environment(self, rows: Sequence[RawRow], numbers: Sequence[int]) -> list[PromptRow | None]:
        dataset = self.dataset
        needs_prompt = "prompt_field" in dataset.model_fields_set
        chats = [
            tuple(_chat_of(raw, self.prompt_field, dataset, self.where))
            if needs_prompt or self.prompt_field in raw.columns
            else None
            for raw in rows
        ]
        texts = [
            self._template.render(chat, raw.location) if chat else "" for raw, chat in zip(rows, chats, strict=True)
        ]
        lengths = map(len, self._tokenizer.encode_all(texts, add_special_tokens=False))
        found: list[PromptRow | None] = []
        for number, raw, chat, length in zip(numbers, rows, chats, lengths, strict=True):
            if chat is not None and not _fits(length, raw, dataset, self.where):
                found.append(None)
                continue
            prompt = "\n".join(message["content"] for message in chat or ())
            source_prompt = "" if chat is None else _source_prompt(value_at(raw, self.prompt_field, self.where))
            is_gym = dataset.type is DatasetType.REASONING_GYM
            content = source_prompt if is_gym else json.dumps(dict(raw.columns), sort_keys=True, default=str)
            if chat is None or comparable(source_prompt) in self._repeated:
                source_prompt = content
            answer = answer_of(raw, self.answer_field, dataset, self.where)
            found.append(
                PromptRow(
                    number,
                    prompt,
                    source_prompt,
                    (),
                    answer,
                    raw.columns,
                    chat,
                    location=raw.location,
                    dataset=self.name,
                    rewards=self.rewards,
                    content=content,
                    source=self.sources.name_of(raw),
                )
            )
        return found


def repeated_prompts(evaluations: Iterable[Sequence[PromptRow]]) -> frozenset[str]:
    """Returns the prompts of evaluations that do not identify a task, in the form of `comparable`: several rows have
    the same prompt, such as `Play.`, and the environment reads the task from other columns.

    These are all prompts of each evaluation that has at most half as many different prompts as different rows. Without
    an environment there are none."""
    found = set[str]()
    for rows in evaluations:
        prompts = {comparable(row.source_prompt) for row in rows}
        if 2 * len(prompts) <= len({row.content for row in rows}):
            found |= prompts
    return frozenset(found)


def _source_prompt(value: object) -> str:
    """Returns the text of a prompt in the data."""
    messages = _messages(value)
    return str(value) if messages is None else "\n".join(message["content"] for message in messages)


def _fields(dataset: Dataset) -> tuple[str, str]:
    if dataset.type is DatasetType.REASONING_GYM:
        return "question", "answer"
    return dataset.prompt_field, dataset.answer_field


def _rendered_prompt(
    raw: RawRow,
    prompt_field: str,
    dataset: Dataset,
    tokenizer: Tokenizer,
    template: ChatTemplate,
    turn: AssistantTurn,
    where: str,
) -> _RenderedPrompt:
    """Applies the prompt template and the chat template to a row. Raises DatasetError."""
    value = value_at(raw, prompt_field, f"{where}.promptField")
    messages = _checked_messages_or_text(value, raw, prompt_field, dataset, where)
    if messages is None and not dataset.apply_chat_template:
        _refuse_chat_settings(dataset, raw, where)
        return _RenderedPrompt(dataset.prompt_template.replace(PLACEHOLDER, str(value)), str(value), None)
    if not tokenizer.has_chat_template:
        raise DatasetError(
            f"{where}.applyChatTemplate: the model's tokenizer has no chat template (needed for {raw.location}); use "
            "an instruction-tuned model, or plain text prompts with applyChatTemplate: false"
        )
    source_prompt = str(value) if messages is None else "\n".join(message["content"] for message in messages)
    if messages is None:
        messages = [{"role": "user", "content": dataset.prompt_template.replace(PLACEHOLDER, str(value))}]
    messages = _with_system_prompt(messages, raw, dataset, where)
    tools: tuple[ToolSchema, ...] = ()
    if dataset.tools_field is not None:
        value = value_at(raw, dataset.tools_field, f"{where}.toolsField")
        tools = tools_of(value, dataset.tools_field, raw.location)
    prompt = template.render(messages, raw.location, tools)
    beginning = turn.beginning(messages, prompt, tools)
    return _RenderedPrompt(prompt, source_prompt, tuple(messages), beginning, turn.plain(beginning))


def _refuse_chat_settings(dataset: Dataset, raw: RawRow, where: str) -> None:
    """Raises DatasetError for settings of chats, because the prompt of this row is a string without a chat template."""
    for name, value, other in (
        ("systemPrompt", dataset.system_prompt, "write the text into promptTemplate"),
        ("toolsField", dataset.tools_field, "remove it"),
    ):
        if value is not None:
            raise DatasetError(
                f"{where}.{name}: would be ignored, because the prompt of {raw.location} is a string that is not "
                f"formatted as a chat; set applyChatTemplate: true, or {other}"
            )


def _chat_of(raw: RawRow, prompt_field: str, dataset: Dataset, where: str) -> list[ChatMessage]:
    """Returns the row's prompt as chat messages; a string is a message of the user. Raises DatasetError."""
    value = value_at(raw, prompt_field, f"{where}.promptField")
    messages = _checked_messages_or_text(value, raw, prompt_field, dataset, where)
    if messages is None:
        messages = [{"role": "user", "content": dataset.prompt_template.replace(PLACEHOLDER, str(value))}]
    return _with_system_prompt(messages, raw, dataset, where)


def _with_system_prompt(messages: list[ChatMessage], raw: RawRow, dataset: Dataset, where: str) -> list[ChatMessage]:
    """Returns the messages after the dataset's system prompt, if it has one. Raises DatasetError if the row has a
    system message already."""
    if dataset.system_prompt is None:
        return messages
    if any(message["role"] == SYSTEM for message in messages):
        raise DatasetError(
            f"{where}.systemPrompt: {raw.location} already has a system message; remove systemPrompt, or the message "
            "from the data"
        )
    return [{"role": SYSTEM, "content": dataset.system_prompt}, *messages]


def _checked_messages_or_text(
    value: object, raw: RawRow, prompt_field: str, dataset: Dataset, where: str
) -> list[ChatMessage] | None:
    """Returns the chat messages of a row's prompt; None if it is a string. Raises DatasetError for anything else, and
    for settings and keys that would be ignored."""
    messages = _messages(value)
    if messages is None and not isinstance(value, str):
        raise DatasetError(
            f"{raw.location}: column {prompt_field!r} {why_not_a_prompt(value)}; it must be a string, or a list of "
            "chat messages with role and content"
        )
    if messages is not None and (seen := ignored_key(value)):
        raise DatasetError(
            f"{raw.location}: in the chat of column {prompt_field!r} {seen}, which would be ignored, because only role "
            "and content are used; remove the key, or move its value into the content"
        )
    if messages is not None and dataset.prompt_template != PLACEHOLDER:
        raise DatasetError(
            f"{where}.promptTemplate: would be ignored, because {raw.location} has chat messages in column "
            f"{prompt_field!r}; remove it, or put its text into the messages"
        )
    return messages


def _checked_unicode(text: _RenderedPrompt, raw: RawRow) -> _RenderedPrompt:
    """Checks that the prompt can be encoded. Raises DatasetError for an unpaired surrogate, which JSON can contain but
    no tokenizer accepts."""
    try:
        text.prompt.encode()
    except UnicodeEncodeError as error:
        raise DatasetError(
            f"{raw.location}: the prompt contains an unpaired surrogate (at character {error.start}); fix it, or "
            "remove the row"
        ) from error
    return text


def _messages(value: object) -> list[ChatMessage] | None:
    """Returns the chat messages; None if the value is something else."""
    if not isinstance(value, list) or not value:
        return None
    messages: list[ChatMessage] = []
    for item in value:
        match item:
            case {"role": str() as role, "content": str() as content}:
                messages.append({"role": role, "content": content})
            case _:
                return None
    return messages


def _encode(texts: Sequence[_RenderedPrompt], tokenizer: Tokenizer) -> list[tuple[int, ...]]:
    """Returns the tokens of each prompt. Special tokens are added only to plain text, because the chat template has
    written them into the others."""
    token_ids: list[tuple[int, ...]] = [()] * len(texts)
    for has_special_tokens in (False, True):
        indices = [index for index, text in enumerate(texts) if (text.messages is not None) is has_special_tokens]
        encoded = tokenizer.encode_all(
            [texts[index].prompt for index in indices], add_special_tokens=not has_special_tokens
        )
        for index, ids in zip(indices, encoded, strict=True):
            token_ids[index] = tuple(ids)
    return token_ids


def _fits(num_tokens: int, raw: RawRow, dataset: Dataset, where: str) -> bool:
    """Whether the prompt is used; False if it is too long and is dropped. Raises DatasetError if it is empty, or too
    long with `overlongPrompt: Fail`."""
    if num_tokens == 0:
        raise DatasetError(f"{raw.location}: the prompt is empty; add text, or remove the row")
    if num_tokens <= dataset.max_prompt_tokens:
        return True
    if dataset.overlong_prompt is OverlongPrompt.FAIL:
        raise DatasetError(
            f"{raw.location}: the prompt has {num_tokens} tokens, more than {where}.maxPromptTokens "
            f"({dataset.max_prompt_tokens}); increase it, or set overlongPrompt: Drop"
        )
    return False


def evaluation_dataset(index: int) -> str:
    """Returns the field path of the dataset of an entry of `training.evaluations`."""
    return f"spec.training.evaluations[{index}].dataset"
