"""The examples with environments: what their classes do, and what their models' tokenizers write."""

from __future__ import annotations

import random
import runpy
from pathlib import Path

import pytest

from rljob_trainer.engines.rollout.base import FinishedSequence, FinishReason
from rljob_trainer.environments.conversation import Conversation
from rljob_trainer.environments.description import ClassSpec, describe_class
from rljob_trainer.environments.template_check import find_rewrites
from rljob_trainer.environments.tool_calls import turn_parser
from rljob_trainer.environments.turn_template import TurnTemplate
from rljob_trainer.models.tokenizer import Tokenizer

REPOSITORY = Path(__file__).parents[3]
ASSETS = REPOSITORY / "trainer/src/rljob_trainer/assets"


def example_class(folder: str, name: str) -> type:
    found = runpy.run_path(str(REPOSITORY / "examples" / folder / f"{folder}.py"))[name]
    assert isinstance(found, type)
    return found


def conversation_of(folder: str, name: str, prompt: str) -> Conversation:
    cls = example_class(folder, name)
    tools = describe_class(cls, ClassSpec(folder, f"{folder}:{name}", {}, "classes[0]")).tools
    template = TurnTemplate(Tokenizer(ASSETS / folder / "model"), [dict(tool) for tool in tools])
    parser = turn_parser(template)
    assert find_rewrites(template, parser) == ()
    return Conversation(template, parser, [{"role": "user", "content": prompt}])


def turn(text: str, tokenizer: Tokenizer) -> FinishedSequence:
    ids = tuple(tokenizer.encode(text + "<eos>", add_special_tokens=False))
    return FinishedSequence("0", ids, (0.0,) * len(ids), (0,) * len(ids), text, text, FinishReason.STOP)


def test_a_game_has_one_token_per_symbol_and_nothing_else() -> None:
    tokenizer = Tokenizer(ASSETS / "guess_letter/model")
    conversation = conversation_of("guess_letter", "GuessLetter", "a-z:")
    assert conversation.add_turn(turn("n", tokenizer)).message["content"] == "n"
    conversation.add_messages([{"role": "user", "content": "<"}])
    conversation.add_turn(turn("g", tokenizer))
    assert tokenizer.decode(conversation.token_ids, skip_special_tokens=False) == "a-z:n<eos><g<eos>"
    [row] = conversation.transcript().rows
    assert [(turn.start - row.num_prompt_tokens, len(turn.logprobs)) for turn in row.turns] == [(0, 2), (3, 2)]


def test_a_turn_that_ends_with_an_equals_sign_calls_the_calculator() -> None:
    tokenizer = Tokenizer(ASSETS / "calculator/model")
    conversation = conversation_of("calculator", "Calculator", "12+31+25:")
    [call] = conversation.add_turn(turn("12+31=", tokenizer)).tool_calls
    assert call["function"] == {"name": "add", "arguments": {"expression": "12+31"}}
    conversation.add_messages([{"role": "tool", "name": "add", "tool_call_id": call["id"], "content": "43"}])
    parsed = conversation.add_turn(turn("43", tokenizer))
    assert (parsed.tool_calls, parsed.message["content"]) == ([], "43")
    assert tokenizer.decode(conversation.token_ids, skip_special_tokens=False) == "add12+31+25:12+31=<eos>4343<eos>"
    # The name of the tool is one token.
    assert len(conversation.token_ids) == 1 + len("12+31+25:") + len("12+31=") + 1 + len("43") + len("43") + 1


@pytest.mark.parametrize("text", ["", "43", "12=31", "12+31=+", "=", "12+31"])
def test_any_other_turn_is_an_answer(text: str) -> None:
    tokenizer = Tokenizer(ASSETS / "calculator/model")
    parsed = conversation_of("calculator", "Calculator", "12+31+25:").add_turn(turn(text, tokenizer))
    assert (parsed.tool_calls, parsed.message["content"], parsed.parse_error) == ([], text, None)


def test_a_letter_is_found_by_halving_the_range() -> None:
    game = example_class("guess_letter", "GuessLetter")()
    letters = "abcdefghijklmnopqrstuvwxyz"
    for seed in range(60):
        random.seed(seed)
        assert game.reset() == "a-z:"
        low, high, answer = 0, 26, "?"
        while answer is not None:
            assert game.get_reward() == 0.0
            middle = (low + high) // 2
            answer = game.respond({"role": "assistant", "content": letters[middle]})
            low, high = (low, middle) if answer == "<" else (middle + 1, high)
        assert game.get_reward() == 1.0


def test_a_game_ends_after_six_guesses_and_bad_guesses_count() -> None:
    game = example_class("guess_letter", "GuessLetter")()
    game.reset()
    assert [game.respond({"role": "assistant", "content": "ab"}) for _ in range(6)] == [*"?????", None]
    assert game.get_reward() == 0.0


def test_only_the_right_sum_is_rewarded_and_the_calculator_adds_two_numbers() -> None:
    task = example_class("calculator", "Calculator")()
    assert task.reset(numbers=[12, 31, 25]) == "12+31+25:"
    assert [task.add("12+31"), task.add("43+25"), task.add("1+2+3"), task.add("12+"), task.add("x")] == [
        *("43", "68", "?", "?", "?")
    ]
    assert task.get_reward() == 0.0
    task.respond({"role": "assistant", "content": "43"})
    assert task.get_reward() == 0.0
    task.respond({"role": "assistant", "content": "68"})
    assert task.get_reward() == 1.0
