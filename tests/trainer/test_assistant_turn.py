"""What chat templates write of the assistant's turn before the model continues it, and what ends a turn. The templates
are short forms of those that models come with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rljob_api.v1alpha1.dataset import Dataset, DatasetType, FileDataset
from rljob_testing.models import chat_models
from rljob_testing.training.prompts import load_prompts
from rljob_trainer.models.assistant_turn import AssistantTurn
from rljob_trainer.models.tokenizer import ChatMessage, Tokenizer

USER: ChatMessage = {"role": "user", "content": "What is 2 + 2?"}
CHATS: dict[str, list[ChatMessage]] = {
    "one message": [USER],
    "a system message": [{"role": "system", "content": "Be brief."}, USER],
    "several turns": [USER, {"role": "assistant", "content": "<think>\nadd\n</think>\n\n4"}, USER],
    "an element at the end": [{"role": "user", "content": "Say <answer></answer>"}],
    "one letter": [{"role": "user", "content": "k"}],
    "nothing": [{"role": "user", "content": ""}],
}


@pytest.mark.parametrize(
    ("template", "beginning"),
    [
        ("ChatML", ""),
        ("ChatML, thinking", "<think>\n"),
        ("Qwen3", ""),
        ("Qwen3, thinking", "<think>\n"),
        ("Qwen3, not thinking", "<think>\n\n</think>\n\n"),
        ("Llama 3", ""),
        ("Llama 3, thinking", "<think>"),
        ("R1", "<think>\n"),
        ("V3.1", "</think>"),
        ("Nemotron", "<think>\n"),
        ("Gemma", ""),
        ("Mistral", ""),
        ("harmony", ""),
        ("colon", ""),
        ("without add_generation_prompt", ""),
        ("whatever is asked for", "<think>\n"),
        ("no other assistant", "<think>\n"),
    ],
)
def test_the_start_of_the_turn_is_what_the_template_has_written(tmp_path: Path, template: str, beginning: str) -> None:
    tokenizer = Tokenizer(chat_models.save(tmp_path, chat_models.TEMPLATES[template]))
    turn = AssistantTurn(tokenizer)
    prompts = {name: tokenizer.render_chat(chat) for name, chat in CHATS.items()}
    assert all(prompt.endswith(beginning) for prompt in prompts.values())
    assert {name: turn.beginning(chat, prompts[name]) for name, chat in CHATS.items()} == dict.fromkeys(
        CHATS, beginning
    )


@pytest.mark.parametrize(
    ("beginning", "plain"),
    [
        ("<think>\n", "<think>\n"),
        ("<|User|><think>\n", "<think>\n"),
        ("<|User|>Okay", "Okay"),
        ("<|User|>\n", ""),
        ("", ""),
    ],
)
def test_a_turn_may_start_without_special_tokens(tmp_path: Path, beginning: str, plain: str) -> None:
    ordinary = AssistantTurn(Tokenizer(chat_models.save(tmp_path / "ordinary", chat_models.R1, are_special=False)))
    special = AssistantTurn(Tokenizer(chat_models.save(tmp_path / "special", chat_models.R1)))
    assert ordinary.plain(beginning) == plain
    assert special.plain(beginning) == plain.replace("<think>\n", "")


def test_a_turn_may_start_differently_per_chat(tmp_path: Path) -> None:
    ending = "{% if messages[-1].content.endswith('/no_think') %}<think></think>{% else %}<think>{% endif %}"
    tokenizer = Tokenizer(chat_models.save(tmp_path, chat_models.CHATML.replace("BEGINNING", ending)))
    turn = AssistantTurn(tokenizer)
    found = [turn.beginning(chat, tokenizer.render_chat(chat)) for chat in ([USER], [no_think("2")], [no_think("<b>")])]
    assert found == ["<think>", "<think></think>", "<think></think>"]


def no_think(content: str) -> ChatMessage:
    return {"role": "user", "content": f"{content}/no_think"}


def test_rows_know_the_start_of_their_turn(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(f'{{"prompt": "k"}}\n{json.dumps({"prompt": CHATS["several turns"]})}\n')
    tokenizer = Tokenizer(chat_models.save(tmp_path / "model", chat_models.R1, are_special=False))

    def texts(*, apply_chat_template: bool) -> list[tuple[str, str]]:
        dataset = Dataset(
            type=DatasetType.FILE, file=FileDataset(path="rows.jsonl"), apply_chat_template=apply_chat_template
        )
        rows = load_prompts(dataset, tokenizer, tmp_path, "spec.training.dataset")
        assert [row.text_for_rewards + row.turn_beginning for row in rows] == [row.prompt for row in rows]
        assert [row.plain_turn_beginning for row in rows] == [row.turn_beginning for row in rows]
        return [(row.text_for_rewards, row.turn_beginning) for row in rows]

    chat = (f"<|User|>{USER['content']}<|Assistant|>\n\n4</s><|User|>{USER['content']}<|Assistant|>", "<think>\n")
    assert texts(apply_chat_template=True) == [("<|User|>k<|Assistant|>", "<think>\n"), chat]
    # A plain text prompt has no turns.
    assert texts(apply_chat_template=False) == [("k", ""), chat]


@pytest.mark.parametrize(
    ("template", "token"),
    [
        (chat_models.CHATML, "<|im_end|>"),
        (chat_models.QWEN3, "<|im_end|>"),
        (chat_models.LLAMA3, "<|eot_id|>"),
        (chat_models.R1, "</s>"),
        (chat_models.WITHOUT_GENERATION_PROMPT, "<|im_end|>"),
        ("{% for m in messages %}{{ m.content }}\n{% endfor %}", None),
        ("{{ raise_exception('no') }}", None),
    ],
)
def test_the_token_that_ends_a_turn_is_found(tmp_path: Path, template: str, token: str | None) -> None:
    tokenizer = Tokenizer(chat_models.save(tmp_path, template))
    assert AssistantTurn(tokenizer).turn_end_token_id == (None if token is None else tokenizer.vocabulary()[token])
