"""Conversations with a policy whose turns a test chooses."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rljob_testing.models import chat_models
from rljob_trainer.engines.rollout.base import FinishedSequence, FinishReason
from rljob_trainer.engines.rollout.response_text import response_decoder
from rljob_trainer.environments.conversation import Conversation
from rljob_trainer.environments.tool_calls import turn_parser
from rljob_trainer.environments.transcript import TokenRow
from rljob_trainer.environments.turn_template import TurnTemplate
from rljob_trainer.models.tokenizer import ChatMessage, Tokenizer, ToolSchema


class Policy:
    """A policy whose turns a test chooses."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        self.tokenizer = tokenizer
        self.stop = stop
        self.decoder = response_decoder(tokenizer)

    def turn(self, conversation: Conversation, text: str, reason: FinishReason = FinishReason.STOP) -> FinishedSequence:
        """A turn of these characters; special tokens are written as in templates."""
        token_ids = self.tokenizer.encode(text, add_special_tokens=False)
        found = self.decoder.response_text(conversation.token_ids, token_ids, self.stop)
        logprobs = tuple(-1.0 - n for n in range(len(token_ids)))
        versions = tuple(7 for _ in token_ids)
        return FinishedSequence("1", tuple(token_ids), logprobs, versions, found.text, found.plain, reason)


def conversation_of(
    folder: Path,
    template: str,
    messages: list[ChatMessage],
    *,
    tools: Sequence[ToolSchema] = (),
    starts_new_rows: bool = False,
) -> tuple[Conversation, Policy]:
    """A conversation with a tokenizer that has this chat template, and a policy for it."""
    responses = chat_models.HERMES_RESPONSES if tools else None
    eos = "<|im_end|>" if "<|im_end|>" in template else "<|eot_id|>"
    saved = chat_models.save(folder, template, eos_token=eos, are_special=False, response_template=responses)
    turn_template = TurnTemplate(Tokenizer(saved), tools)
    parser = turn_parser(turn_template)
    conversation = Conversation(turn_template, parser, messages, starts_new_rows=starts_new_rows)
    return conversation, Policy(turn_template.tokenizer)


def user(content: str) -> ChatMessage:
    """A message of the user."""
    return {"role": "user", "content": content}


def text_of(conversation: Conversation, policy: Policy) -> str:
    """The text of all tokens of the row, with special tokens."""
    return policy.tokenizer.decode(conversation.token_ids, skip_special_tokens=False)


def turns_of_row(row: TokenRow) -> list[tuple[int, ...]]:
    """The tokens of the turns that are trained in a row."""
    return [tuple(row.token_ids[turn.start : turn.start + len(turn.logprobs)]) for turn in row.turns]
