"""Patterns that no response can match, and models whose responses never end: found before a device is used."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path

import pytest

from rljob_api.v1alpha1.environment import Environment, EnvironmentType
from rljob_api.v1alpha1.training import Training
from rljob_testing.models import chat_models
from rljob_testing.training import training_runs
from rljob_trainer.controller.checks.responses import check_responses
from rljob_trainer.datasets.prompts import PromptRow
from rljob_trainer.errors import ConfigurationError
from rljob_trainer.rewards.format import first_impossible_part, literal_beginning

DIGITS = Path(__file__).parents[2] / "trainer/src/rljob_trainer/assets/sort_digits/model"
"""Its tokenizer knows digits only."""
DOCUMENTED = r"<think>.*</think>\s*<answer>.*</answer>"


def training(pattern: str, *, stop: tuple[str, ...] = (), masks: bool = False) -> Training:
    rewards = [{"type": "Format", "format": {"pattern": pattern}}]
    wire = training_runs.small_job(
        rewards=rewards, algorithm={"maskTruncatedResponses": masks}, rollout={"stop": list(stop)}
    )
    return Training.from_wire(wire["spec"]["training"])


def row(beginning: str = "", *, is_chat: bool = False) -> PromptRow:
    messages = ({"role": "user", "content": "x"},) if is_chat else None
    return PromptRow(0, f"x{beginning}", "x", (1,), None, {}, messages, beginning)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """Models, by whether the tags are special tokens."""
    template = chat_models.TEMPLATES["ChatML, thinking"]
    return {
        each: chat_models.save(tmp_path_factory.mktemp("model"), template, are_special=each) for each in (True, False)
    }


@pytest.mark.parametrize("are_special", [True, False])
@pytest.mark.parametrize("beginning", ["", "<think>\n"])
def test_the_documented_pattern_can_match(
    models: dict[bool, Path], are_special: bool, beginning: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        check_responses(training(DOCUMENTED), models[are_special], [row(beginning)])
    assert not caplog.records


@pytest.mark.parametrize(
    ("pattern", "lost"),
    [
        (DOCUMENTED, "'<think>': the tokenizer .*'>'; use other tags"),
        (r"(\d+|<a>)\s*(?:<answer>)+.*", "'<answer>'"),
        (r"(?:1|<a>.*)?(<b>|(?P<c><c>x)).*", "'<b>'"),
        (r"(?=.*<d>)(?>1<e>)", "'<d>'"),
    ],
)
def test_a_tag_that_the_tokenizer_does_not_decode_is_reported(pattern: str, lost: str) -> None:
    where = r"^spec\.training\.rewards\[0\]\.format\.pattern \(reward score\): .* can never match, .*"
    with pytest.raises(ConfigurationError, match=where + lost):
        check_responses(training(pattern), DIGITS, [row()])


@pytest.mark.parametrize(
    "pattern", [r"\d+", r"(<a>)?1", r"(?:<a>){0,2}1", "<a>|1", "(?!<a>)1", "[<a>]+", r"(?i:<a>)", "(?i)<a>", "<(a|b)>"]
)
def test_a_pattern_that_needs_no_tag_is_accepted(pattern: str) -> None:
    check_responses(training(pattern), DIGITS, [row()])


def test_a_tag_that_the_template_writes_needs_no_token(caplog: pytest.LogCaptureFixture) -> None:
    pattern = r"<think>\d+"
    check_responses(training(pattern), DIGITS, [row("<think>")])
    assert not caplog.records
    with pytest.raises(ConfigurationError, match="'<think>'"):
        check_responses(training(pattern), DIGITS, [row("<think>"), row()])


def test_end_tokens_and_stop_texts_are_in_no_response(models: dict[bool, Path]) -> None:
    with pytest.raises(ConfigurationError, match=r"'</s>': the tokenizer .*''; use"):
        check_responses(training("4</s>"), models[True], [row()])
    # It is removed only at the end of a response.
    check_responses(training(r"4<\|im_end\|>.*"), models[True], [row()])
    cause = r"'</answer>': it is in spec\.training\.rollout\.stop, .*; remove it"
    with pytest.raises(ConfigurationError, match=f"can never match, .* {cause}"):
        check_responses(training(DOCUMENTED, stop=("\n\n", "</answer>")), models[True], [row("<think>\n")])
    check_responses(training(r"<answer>.*(</answer>)?", stop=("</answer>",)), models[True], [row()])
    # A conversation has them between its turns.
    game = training(r"4</s>.*</answer>", stop=("</answer>",)).model_copy(
        update={"environment": Environment(type=EnvironmentType.CLASS, max_context_tokens=64)}
    )
    check_responses(game, models[True], [row()])


@pytest.mark.parametrize(
    ("pattern", "beginning", "stop", "can_match"),
    [
        ("<think>\nOkay.*", "<think>\n", "\n", True),
        (".*\nOkay", "<think>\n", "\n", True),
        ("<think>\n.*", "<think>", "\n", False),
        ("<think>\nOkay\n", "<think>\n", "\n", False),
    ],
)
def test_a_stop_text_does_not_end_what_the_template_writes(
    models: dict[bool, Path], pattern: str, beginning: str, stop: str, can_match: bool
) -> None:
    checked = training(pattern, stop=(stop,))
    if can_match:
        check_responses(checked, models[True], [row(beginning)])
    else:
        with pytest.raises(ConfigurationError, match=re.escape(f"{stop!r}: it is in spec.training")):
            check_responses(checked, models[True], [row(beginning)])


def test_a_tag_that_only_the_template_writes_may_be_followed_by_others() -> None:
    """The tokenizer knows digits only."""
    check_responses(training(r"<think>1\d"), DIGITS, [row("<think>")])
    with pytest.raises(ConfigurationError, match="'<think>'"):
        check_responses(training(r"<think><think>"), DIGITS, [row("<think>")])


@pytest.mark.parametrize(
    ("prompt", "beginning", "pattern", "tag"),
    [
        ("2+2?[THINK]", "", r"\[THINK\].*\[/THINK\].*", "[THINK]"),
        ("2+2? <think>\n", "", "<think>.*</think>.*", "<think>"),
        ("2+2?<think>\n", "<think>\n", "<think>.*</think>.*", None),
        ("2+2?", "", r"\[THINK\].*\[/THINK\].*", None),
        ("2+2?[THINK]", "", r".*\[/THINK\].*", None),
        ("2+2?[THINK]", "", r"(\[THINK\])?.*\[/THINK\].*", None),
    ],
)
def test_a_pattern_that_begins_with_the_end_of_the_prompt_is_warned_of(
    models: dict[bool, Path],
    prompt: str,
    beginning: str,
    pattern: str,
    tag: str | None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    rows = [row(), PromptRow(0, prompt, "2+2?", (1,), None, {}, turn_beginning=beginning)]
    check_responses(training(pattern), models[False], rows)
    seen = [each.getMessage() for each in caplog.records if "prompts already end with it" in each.getMessage()]
    assert len(seen) == (tag is not None)
    assert all(f"{pattern!r} begins with {tag}, " in message for message in seen)


def test_a_start_of_the_turn_that_the_pattern_excludes_is_warned_of(
    models: dict[bool, Path], caplog: pytest.LogCaptureFixture
) -> None:
    for pattern, is_warned in (("<answer>.*", True), ("^<think>\n", False), ("<think>", False), (".*</think>", False)):
        caplog.clear()
        check_responses(training(pattern), models[True], [row("<think>\n")])
        assert ["never matches, because the chat template begins" in each.message for each in caplog.records] == [
            True
        ] * is_warned


@pytest.mark.parametrize(
    ("pattern", "texts", "beginning"),
    [
        (DOCUMENTED, ["<think>", "</think>", "<answer>", "</answer>"], "<think>"),
        (r"a(b(?:c)d)+e", ["a", "bcd", "e"], "a"),
        (r"\A(a)b|abc", ["ab"], ""),
        ("x(?:y+z|w)", ["x", "y", "z"], "x"),
        ("a?(?<=b)c*?d{2,}+", ["b", "d"], ""),
    ],
)
def test_the_texts_that_every_match_contains_are_found(pattern: str, texts: list[str], beginning: str) -> None:
    seen: list[str] = []
    assert first_impossible_part(pattern, lambda text: seen.append(text)) is None
    assert seen[: len(texts)] == texts
    assert literal_beginning(pattern) == beginning


def without_end(folder: Path, **files: dict[str, object]) -> Path:
    """A model whose files name no end token except the given ones."""
    chat_models.save(folder, chat_models.CHATML.replace("BEGINNING", ""), eos_token=None)
    for name, document in files.items():
        file = folder / f"{name}.json"
        known = json.loads(file.read_text()) if file.exists() else {}
        file.write_text(json.dumps({**known, **document}))
    return folder


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"generation_config": {"eos_token_id": None}},
        # Not a token of the model.
        {"config": {"eos_token_id": 100_000}},
    ],
    ids=["nowhere", "null", "unknown"],
)
def test_a_model_without_an_end_token_cannot_mask_truncated_responses(
    tmp_path: Path, files: dict[str, dict[str, object]], caplog: pytest.LogCaptureFixture
) -> None:
    folder = without_end(tmp_path, **files)
    message = (
        r"^spec\.training\.algorithm\.maskTruncatedResponses: .* no end token .*eos_token_id in generation_config.*"
        r"spec\.training\.rollout\.stop .* nothing to train on; .*, or set "
        "maskTruncatedResponses: false"
    )
    with pytest.raises(ConfigurationError, match=message):
        check_responses(training(".*", masks=True), folder, [row()])
    check_responses(training(".*"), folder, [row()])
    assert "every response is truncated at rollout.maxNewTokens" in caplog.text
    check_responses(training(".*", masks=True, stop=("\n",)), folder, [row()])


def test_a_stop_text_that_the_tokens_cannot_spell_ends_nothing(tmp_path: Path) -> None:
    for file in DIGITS.iterdir():
        if file.suffix == ".json":
            document = json.loads(file.read_text())
            document = {key: value for key, value in document.items() if key not in ("eos_token", "eos_token_id")}
            (tmp_path / file.name).write_text(json.dumps(document))
    with pytest.raises(ConfigurationError, match="maskTruncatedResponses"):
        check_responses(training(".*", masks=True, stop=("END",)), tmp_path, [row()])
    check_responses(training(".*", masks=True, stop=("END", "12")), tmp_path, [row()])


def test_a_template_that_ends_turns_without_an_end_token_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    chat_models.save(tmp_path, chat_models.CHATML.replace("BEGINNING", ""))
    tokens = {name: 256 + number for number, name in enumerate(chat_models.STRUCTURE)}
    check_responses(training(".*"), tmp_path, [row()])
    check_responses(training(".*", stop=("<|im_end|>",)), tmp_path, [row(is_chat=True)])
    assert not caplog.records
    check_responses(training(".*"), tmp_path, [row(is_chat=True)])
    assert f"add token {tokens['<|im_end|>']} to eos_token_id in generation_config.json" in caplog.text
    caplog.clear()
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [tokens["<|im_end|>"]]}))
    check_responses(training(".*", masks=True), tmp_path, [row(is_chat=True)])
    assert not caplog.records
