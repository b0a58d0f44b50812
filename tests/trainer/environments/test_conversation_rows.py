"""What happens to a conversation whose earlier turns the chat template rewrites."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from rljob_testing.models import chat_models
from rljob_testing.models.scripted_policies import conversation_of, text_of, turns_of_row, user
from rljob_trainer.engines.rollout.base import FinishReason
from rljob_trainer.environments.template_check import find_rewrites
from rljob_trainer.models.tokenizer import ToolSchema

ADD: ToolSchema = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {}}}
CHATML = chat_models.TEMPLATES["ChatML"]


def test_a_template_that_removes_thinking_is_noticed_in_a_conversation(tmp_path: Path) -> None:
    conversation, policy = conversation_of(tmp_path, chat_models.TEMPLATES["Qwen3"], [user("2 + 2?")])
    for answer, is_rewritten in (("4", False), ("<think>\nadd\n</think>\n\n5", True)):
        assert not conversation.is_rewritten
        turn = policy.turn(conversation, f"{answer}<|im_end|>")
        conversation.add_turn(turn)
        assert not conversation.is_rewritten
        assert conversation.add_messages([user("next")])
        assert conversation.is_rewritten is is_rewritten
    assert "<think>\nadd\n</think>\n\n5<|im_end|>\n<|im_start|>user\nnext" in text_of(conversation, policy)


def test_a_rewritten_conversation_goes_on_in_a_new_row(tmp_path: Path) -> None:
    """The template removes the thinking of the second turn. Then the third turn begins a row whose prompt is what the
    template writes. Every sampled token is in one row."""
    template = chat_models.TEMPLATES["Qwen3"]
    conversation, policy = conversation_of(tmp_path, template, [user("2 + 2?")], starts_new_rows=True)
    turns = []
    for answer in ("4", "<think>\nadd\n</think>\n\n5"):
        turns.append(policy.turn(conversation, f"{answer}<|im_end|>"))
        conversation.add_turn(turns[-1])
        assert conversation.add_messages([user("next")])
    rendered = policy.tokenizer.render_chat(conversation.messages)
    assert text_of(conversation, policy) == rendered
    assert "add" not in rendered
    assert conversation.num_prompt_tokens == len(conversation.token_ids)
    turns.append(policy.turn(conversation, "6<|im_end|>"))
    conversation.add_turn(turns[-1])
    assert (conversation.num_turns, conversation.num_sampled_tokens) == (3, sum(len(turn.token_ids) for turn in turns))
    assert conversation.response_text == rendered.removeprefix(conversation.prompt_text) + "6"
    transcript = conversation.transcript()
    assert transcript.is_rewritten
    first, second = transcript.rows
    assert [len(first.turns), len(second.turns)] == [2, 1]
    assert [*turns_of_row(first), *turns_of_row(second)] == [turn.token_ids for turn in turns]


def test_a_new_row_must_fit_and_needs_a_turn(tmp_path: Path) -> None:
    template = chat_models.TEMPLATES["Qwen3"]
    conversation, policy = conversation_of(tmp_path, template, [user("2 + 2?")], starts_new_rows=True)
    conversation.add_turn(policy.turn(conversation, "<think>\nadd\n</think>\n\n5<|im_end|>"))
    before = list(conversation.token_ids)
    assert not conversation.add_messages([user("next")], max_tokens=10)
    assert conversation.token_ids == before
    assert conversation.add_messages([user("next")])
    [row] = conversation.transcript().rows
    assert list(row.token_ids) == before


@pytest.mark.parametrize(
    ("call", "is_rewritten"),
    [('{"name": "add", "arguments": {"a": 1}}', False), ('{"name":"add","arguments":{"a":1}}', True)],
)
def test_rewrites_that_the_test_at_the_start_does_not_find_are_counted(
    tmp_path: Path, call: str, is_rewritten: bool
) -> None:
    """The policy may write the JSON of a call with other spaces than the template."""
    template = chat_models.HERMES.replace("BEGINNING", "").replace("THINKING", "")
    for starts_new_rows in (False, True):
        conversation, policy = conversation_of(
            tmp_path, template, [user("1 + 2?")], tools=[ADD], starts_new_rows=starts_new_rows
        )
        found = find_rewrites(conversation._template, conversation._parser)
        assert all("with thinking" in rewrite.kind for rewrite in found)
        turn = policy.turn(conversation, f"<tool_call>\n{call}\n</tool_call><|im_end|>")
        assert conversation.add_turn(turn).tool_calls
        assert conversation.add_messages([{"role": "tool", "name": "add", "content": "3"}])
        conversation.add_turn(policy.turn(conversation, "3<|im_end|>"))
        transcript = conversation.transcript()
        assert (transcript.is_rewritten, len(transcript.rows)) == (is_rewritten, 1 + (is_rewritten and starts_new_rows))


def test_half_a_character_at_the_end_of_a_turn_is_rewritten(tmp_path: Path) -> None:
    """The message of the turn does not have it, but the row of tokens does."""
    conversation, policy = conversation_of(tmp_path, CHATML, [user("one")])
    turn = policy.turn(conversation, "caf\u00e9", FinishReason.LENGTH)
    for number, kept in ((1, turn.token_ids), (2, turn.token_ids[:-1])):
        text = "caf\u00e9" if number == 1 else "caf"
        conversation.add_turn(
            replace(turn, token_ids=kept, logprobs=(0.0,) * len(kept), policy_versions=(0,) * len(kept), text=text)
        )
        assert conversation.add_messages([user("next")])
        assert conversation.is_rewritten is (number == 2)
    assert conversation.prompt_text + conversation.response_text == text_of(conversation, policy)


def test_each_token_of_a_conversation_is_decoded_a_few_times(tmp_path: Path) -> None:
    """However many turns follow, and although each may begin a new row."""
    conversation, policy = conversation_of(tmp_path, CHATML, [user("one")], starts_new_rows=True)
    turns = [policy.turn(conversation, f"{number} {'x' * 20}<|im_end|>") for number in range(40)]
    num_decoded, decode = 0, policy.tokenizer.decode

    def counted(token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        nonlocal num_decoded
        num_decoded += len(token_ids)
        return decode(token_ids, skip_special_tokens=skip_special_tokens)

    policy.tokenizer.decode = counted  # type: ignore[method-assign]
    for turn in turns:
        conversation.add_turn(turn)
        assert conversation.add_messages([user("next")])
    assert not conversation.transcript().is_rewritten
    assert num_decoded < 2 * len(conversation.token_ids)
