"""The environment classes of a job, with what their conversations need."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rljob_trainer.environments.conversation import Conversation, first_messages
from rljob_trainer.environments.description import NAME_COLUMN, EnvironmentDescription
from rljob_trainer.environments.settings import EnvironmentSettings
from rljob_trainer.environments.tool_calls import TurnParser, turn_parser
from rljob_trainer.environments.turn_template import TurnTemplate
from rljob_trainer.errors import ChatTemplateError, DatasetError
from rljob_trainer.models.tokenizer import ChatMessage, Tokenizer

WHERE = "spec.training.environment"


@dataclass(frozen=True)
class EnvironmentKind:
    """One class."""

    where: str
    """The class for messages: its field of the job and its path."""
    description: EnvironmentDescription
    template: TurnTemplate
    parser: TurnParser
    starts_new_rows: bool
    """See Conversation."""

    def conversation(
        self,
        messages: Sequence[ChatMessage] | None,
        observation: str | list[ChatMessage] | None,
        max_context_tokens: int,
    ) -> Conversation:
        """Begins a conversation. `observation`: what `reset` returned. Raises EnvironmentMessageError,
        ChatTemplateError if the template rejects a message or leaves it out, and DatasetError if no turn fits after
        the prompt."""
        begun = first_messages(messages, observation, self.where)
        try:
            conversation = Conversation(self.template, self.parser, begun, starts_new_rows=self.starts_new_rows)
        except ChatTemplateError as error:
            raise ChatTemplateError(f"{self.where}: {error}") from error
        if conversation.num_prompt_tokens >= max_context_tokens:
            raise DatasetError(
                f"{WHERE}.maxContextTokens ({max_context_tokens}): the prompt of a rollout has "
                f"{conversation.num_prompt_tokens} tokens, so no turn fits; increase it, or shorten the prompt (it "
                f"begins with {conversation.prompt_text:.80}...)"
            )
        return conversation


class EnvironmentKinds:
    """The classes of a job by name."""

    def __init__(self, tokenizer: Tokenizer, settings: EnvironmentSettings) -> None:
        """Raises ConfigurationError if the model's chat template or tokenizer does not fit the environments."""
        self._kinds: dict[str, EnvironmentKind] = {}
        for spec, description in zip(settings.classes, settings.descriptions, strict=True):
            template = TurnTemplate(tokenizer, [dict(tool) for tool in description.tools])
            parser = turn_parser(template, settings.tool_parser)
            self._kinds[description.name] = EnvironmentKind(
                f"{spec.where} ({spec.path})", description, template, parser, settings.starts_new_rows
            )

    def __iter__(self) -> Iterator[EnvironmentKind]:
        return iter(self._kinds.values())

    def named(self, name: str) -> EnvironmentKind:
        """Returns the class with this name."""
        return self._kinds[name]

    def of_row(self, row: Mapping[str, object]) -> EnvironmentKind:
        """Returns the class for a row of the dataset. Raises DatasetError if the job has several classes, and the row
        names none of them."""
        if len(self._kinds) == 1:
            return next(iter(self._kinds.values()))
        name = row.get(NAME_COLUMN)
        if not isinstance(name, str) or name not in self._kinds:
            raise DatasetError(
                f"{WHERE}.classes: the column {NAME_COLUMN!r} of a row must name one of {', '.join(self._kinds)} "
                f"(seen: {name!r:.80}); fix the row, or add the class"
            )
        return self._kinds[name]
