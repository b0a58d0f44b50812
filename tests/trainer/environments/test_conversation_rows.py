"""What happens to a conversation whose earlier turns the chat template rewrites."""

from __future__ import annotations

from pathlib import Path

from rljob_testing.models import chat_models
from rljob_testing.models.scripted_policies import conversation_of, text_of, turns_of_row, user


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
