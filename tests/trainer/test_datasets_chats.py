"""Prompts that are chats: how they are rendered, and which are rejected with row, column and the template's own
message. The tokenizer is the quickstart's: it knows digits and `>`."""

from __future__ import annotations

import json
import shutil
from importlib.resources import files
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rljob_api.v1alpha1.dataset import Dataset, DatasetType, FileDataset
from rljob_testing.models import tiny_models
from rljob_testing.training.prompts import load_prompts
from rljob_trainer.datasets.prompts import PromptMaker, PromptRow
from rljob_trainer.datasets.rows import RawRow
from rljob_trainer.errors import ChatTemplateError, DatasetError
from rljob_trainer.models.tokenizer import ChatMessage, Tokenizer

WHERE = "spec.training.dataset"
MODEL = Path(str(files("rljob_trainer"))) / "assets/sort_digits/model"
PLAIN = "{% for message in messages %}>{{ message.content }}>{% endfor %}{% if add_generation_prompt %}8{% endif %}"
"""Every message is between `>`s, and the assistant's turn begins with an 8."""
USERS_ONLY = "{% for m in messages %}{% if m.role == 'user' %}>{{ m.content }}{% endif %}{% endfor %}8"
"""Drops roles that it does not know, as many templates do."""
NO_SYSTEM = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not\n  supported') }}{% endif %}" + PLAIN
)
ALTERNATES = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant') }}{% endif %}{{ m.content }}{% endfor %}"
)
ASSISTANT: ChatMessage = {"role": "assistant", "content": "2"}
SYSTEM: ChatMessage = {"role": "system", "content": "1"}
USER: ChatMessage = {"role": "user", "content": "1"}


def tokenizer_with(template: object, folder: Path) -> Tokenizer:
    """The quickstart's tokenizer with a chat template of any type in tokenizer_config.json."""
    shutil.copytree(MODEL, folder)
    tiny_models.change_json(folder / "tokenizer_config.json", chat_template=template)
    return Tokenizer(folder)


def loaded(tmp_path: Path, template: object, *prompts: object, **fields: object) -> list[PromptRow]:
    """Loads rows of a file chats.jsonl with these prompts."""
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    dataset = Dataset.model_validate({"type": DatasetType.FILE, "file": FileDataset(path="chats.jsonl"), **fields})
    return load_prompts(dataset, tokenizer_with(template, tmp_path / "model"), tmp_path, WHERE)


@pytest.mark.parametrize("applies", [True, False])
def test_chats_use_the_template_whatever_apply_chat_template_is(tmp_path: Path, applies: bool) -> None:
    [row] = loaded(tmp_path, PLAIN, [SYSTEM, {"role": "user", "content": "2"}], apply_chat_template=applies)
    assert (row.prompt, row.source_prompt, row.token_ids) == (">1>>2>8", "1\n2", (2, 4, 2, 2, 5, 2, 11))


def test_the_system_prompt_is_the_first_message_of_each_prompt(tmp_path: Path) -> None:
    rows = loaded(tmp_path, PLAIN, [USER], [USER, ASSISTANT, USER], "3", system_prompt="9", apply_chat_template=True)
    assert [row.prompt for row in rows] == [">9>>1>8", ">9>>1>>2>>1>8", ">9>>3>8"]
    assert rows[0].messages == ({"role": "system", "content": "9"}, USER)
    # Rows are compared with those of other datasets without it.
    assert [row.source_prompt for row in rows] == ["1", "1\n2\n1", "3"]


@pytest.mark.parametrize("others", [[SYSTEM, USER], [USER, SYSTEM, USER]])
def test_a_second_system_message_is_rejected(tmp_path: Path, others: list[ChatMessage]) -> None:
    words = r"dataset\.systemPrompt: .*chats\.jsonl, line 2 already has a system message; remove systemPrompt"
    with pytest.raises(DatasetError, match=words):
        loaded(tmp_path, PLAIN, [USER], others, system_prompt="9")


def test_a_system_prompt_needs_a_chat_and_a_template_that_uses_it(tmp_path: Path) -> None:
    words = (
        r"dataset\.systemPrompt: would be ignored, .*chats\.jsonl, line 1 is a string .* set applyChatTemplate: true"
    )
    with pytest.raises(DatasetError, match=words):
        loaded(tmp_path, PLAIN, "1", system_prompt="9")
    for number, (template, words) in enumerate(
        (
            (NO_SYSTEM, r"line 1: .* rejects .*\(roles: system, user\): .*System role not supported"),
            (USERS_ONLY, r"line 1: .* ignores message 1 .*\(role 'system': '9'\)"),
        )
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        with pytest.raises(DatasetError, match=words):
            loaded(folder, template, [USER], system_prompt="9")


def test_an_environment_gets_the_system_prompt_too(tmp_path: Path) -> None:
    tokenizer = tokenizer_with(PLAIN, tmp_path / "model")
    dataset = Dataset(type=DatasetType.FILE, file=FileDataset(path="chats.jsonl"), system_prompt="9")
    maker = PromptMaker(dataset, tokenizer, WHERE, for_environment=True)
    [row] = maker.make_prompts([RawRow("chats.jsonl, line 1", {"prompt": "1"})], [0])
    assert row is not None
    assert row.messages == ({"role": "system", "content": "9"}, USER)
    with pytest.raises(DatasetError, match=r"systemPrompt: .*line 2 already has a system message"):
        maker.make_prompts([RawRow("chats.jsonl, line 2", {"prompt": [SYSTEM, USER]})], [1])


def test_earlier_assistant_turns_are_part_of_the_prompt(tmp_path: Path) -> None:
    [row] = loaded(tmp_path, PLAIN, [USER, ASSISTANT, {"role": "user", "content": "3"}])
    assert row.prompt == ">1>>2>>3>8"


@pytest.mark.parametrize(
    ("template", "messages", "words"),
    [
        (NO_SYSTEM, [SYSTEM, USER], r"\(roles: system, user\): .*model failed: System role not supported; change"),
        (
            ALTERNATES,
            [USER, USER],
            r"\(roles: user, user\): .*failed: Conversation roles must alternate user/assistant",
        ),
        ("{% for m in messages %}\n{{ m.content }", [USER], r"failed: line 2 is not valid Jinja: unexpected '}'"),
        ("{{ messages|shout }}", [USER], r"failed: line 1 is not valid Jinja: No filter named 'shout'"),
        ("{{ bos.token }}", [USER], r"failed: UndefinedError: 'bos' is undefined"),
        ("{{ messages[0].content + 1 }}", [USER], r"failed: TypeError: can only concatenate str"),
        ("{{ messages[0].content.parts[0] }}", [USER], r"UndefinedError: .*no attribute 'parts'"),
        ("{{ 1 / (messages|length - 1) }}", [USER], r"failed: ZeroDivisionError: division by zero"),
        ("{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}", [USER], r"failed: RecursionError: maximum recursion depth"),
        ("{% break %}", [USER], r"failed: SyntaxError: 'break' outside loop"),
        ([{"name": n, "template": PLAIN} for n in ("a", "b")], [USER], r"several chat templates \(a, b\) and none is "),
        (5, [USER], r"TypeError: Can't compile non template nodes"),
    ],
)
def test_an_error_of_the_template_is_a_configuration_error(
    tmp_path: Path, template: object, messages: list[ChatMessage], words: str
) -> None:
    good = [] if len(messages) == 1 else [[USER]]
    row = rf"chats\.jsonl, line {len(good) + 1}: the model's chat template rejects column 'prompt' .*"
    with pytest.raises(DatasetError, match=row + words):
        loaded(tmp_path, template, *good, messages)


def test_a_template_named_default_is_used(tmp_path: Path) -> None:
    templates = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": PLAIN}]
    assert loaded(tmp_path, templates, [USER])[0].prompt == ">1>8"


def test_prompt_template_is_applied_before_the_chat_template(tmp_path: Path) -> None:
    [row] = loaded(tmp_path, PLAIN, "3", apply_chat_template=True, prompt_template="{prompt}7")
    assert (row.prompt, row.source_prompt, row.messages) == (">37>8", "3", ({"role": "user", "content": "37"},))


def test_a_text_that_the_template_rejects_is_named_like_a_chat(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=r"chats\.jsonl, line 1: .*column 'prompt' .*\(roles: user\): .*failed: no;"):
        loaded(tmp_path, "{{ raise_exception('no') }}", "1", apply_chat_template=True)


@pytest.mark.parametrize(
    ("messages", "left_out"),
    [
        ([SYSTEM, USER], r"message 1 of column 'prompt' \(role 'system': '1'\)"),
        ([USER, {"role": "wizard", "content": "1"}], r"message 2 of column 'prompt' \(role 'wizard': '1'\)"),
        ([USER, ASSISTANT, USER], r"message 2 of column 'prompt' \(role 'assistant': '2'\)"),
    ],
)
def test_a_message_that_the_template_drops_is_an_error(
    tmp_path: Path, messages: list[ChatMessage], left_out: str
) -> None:
    with pytest.raises(DatasetError, match=r"line 2: the model's chat template ignores " + left_out):
        loaded(tmp_path, USERS_ONLY, [USER, USER], messages)


@pytest.mark.parametrize(
    ("template", "prompt"),
    [
        ("{% for m in messages %}>{{ m.content.split('9')[0] }}{% endfor %}", ">1>2"),
        ("{% for m in messages %}>{{ m.content[:2] }}{% endfor %}", ">19>29"),
        ("{% for m in messages %}>{{ m.content.split('9')[-1] }}{% endfor %}", ">3>4"),
        ("{% for m in messages %}>{{ m.content[-2:] }}{% endfor %}", ">93>94"),
    ],
)
def test_a_template_may_read_only_one_end_of_a_message(tmp_path: Path, template: str, prompt: str) -> None:
    [row] = loaded(tmp_path, template, [{"role": "user", "content": "193"}, {"role": "user", "content": "294"}])
    assert row.prompt == prompt


@pytest.mark.parametrize(
    ("key", "value", "seen"),
    [
        ("tool_calls", [{"id": "1"}], r"\(\[\{'id': '1'\}\]\)"),
        ("name", "Ann", r"\('Ann'\)"),
        ("reasoning_content", "1", r"\('1'\)"),
        ("prefix", False, r"\(False\)"),
    ],
)
def test_a_message_key_that_would_be_dropped_is_rejected_by_name(
    tmp_path: Path, key: str, value: object, seen: str
) -> None:
    unread = rf"^\S*chats\.jsonl, line 2: in the chat of column 'prompt' message 2 has the key '{key}' {seen}, which "
    with pytest.raises(DatasetError, match=unread + "would be ignored, .*; remove"):
        loaded(tmp_path, PLAIN, [USER], [USER, {**ASSISTANT, key: value}, USER])


def test_empty_keys_are_ignored(tmp_path: Path) -> None:
    nothing = {"name": None, "tool_calls": [], "reasoning_content": "", "extra": {}, "weight": 0}
    [row] = loaded(tmp_path, PLAIN, [{**USER, **nothing}])
    assert (row.prompt, row.messages) == (">1>8", (USER,))


@pytest.mark.parametrize("messages", [[USER, ASSISTANT], [ASSISTANT]])
def test_a_chat_that_ends_with_an_assistant_turn_is_rejected(tmp_path: Path, messages: list[ChatMessage]) -> None:
    with pytest.raises(
        DatasetError, match=r"line 2: the chat in column 'prompt' ends with an assistant's turn \('2'\)"
    ):
        loaded(tmp_path, PLAIN, [USER], messages)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([], r"contains an empty list; it must be a string, or a list of chat messages with role and content"),
        (
            [USER, {"role": "user", "content": [{"type": "image"}]}],
            r"message 2 \(role 'user'\) has content that is not a ",
        ),
        (
            [{"role": "assistant", "content": None, "tool_calls": []}],
            r"message 1 .*content that is not a string \(None\)",
        ),
        ([{"role": 1, "content": "1"}], r"message 1 has a role that is not a string \(1\)"),
        ([{"from": "human", "value": "1"}], r"message 1 has the keys from, value; it must be"),
        (["1"], r"contains a list \(\['1'\]\)"),
        ({"messages": [USER]}, r"contains a dict"),
        (None, r"contains a NoneType \(None\)"),
    ],
)
def test_an_invalid_chat_is_named(tmp_path: Path, value: object, message: str) -> None:
    with pytest.raises(DatasetError, match=r"chats\.jsonl, line 2: column 'prompt' " + r".*" + message):
        loaded(tmp_path, PLAIN, [USER], value)


def test_prompt_template_is_rejected_where_it_would_be_ignored(tmp_path: Path) -> None:
    message = rf"{WHERE}\.promptTemplate: would be ignored, because .*chats\.jsonl, line 2 has chat messages"
    with pytest.raises(DatasetError, match=message):
        loaded(tmp_path, PLAIN, "1", [USER], prompt_template="{prompt}7")


FRAGMENTS = st.sampled_from(
    [
        "{{ messages", "[0]", ".content", " }}", "{% for m in messages %}", "{% endfor %}", "{{ m.role }}", "{% if ",
        "add_generation_prompt", " %}", "{% endif %}", "{{ raise_exception(", "'a'", ")", "|tojson", "|int", "|length",
        " + ", " / ", "0", "1", "none", "{% set x = ", "{{ x }}", "{% break %}", ".items()", "{% generation %}",
        "{% endgeneration %}", "{% macro f(a) %}", "{% endmacro %}", "{{ f(1) }}", "{{ strftime_now(", "text",
    ]
)  # fmt: skip


@pytest.fixture(scope="module")
def any_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return tokenizer_with(PLAIN, tmp_path_factory.mktemp("any") / "model")


@given(st.lists(FRAGMENTS, max_size=12).map("".join))
@settings(max_examples=150, deadline=None)
def test_a_template_gives_a_text_or_one_error(any_tokenizer: Tokenizer, template: str) -> None:
    any_tokenizer._backend.chat_template = template
    try:
        found = any_tokenizer.render_chat([SYSTEM, USER])
    except ChatTemplateError as error:
        found = str(error)
    assert isinstance(found, str)
