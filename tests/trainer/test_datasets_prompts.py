"""From dataset blocks to prompts with tokens: every source and every error. The tokenizer is the quickstart's."""

from __future__ import annotations

import datetime
import decimal
import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from rljob_api.v1alpha1.dataset import (
    Dataset,
    DatasetType,
    FileDataset,
    HuggingFaceDataset,
    OverlongPrompt,
    ReasoningGymDataset,
)
from rljob_testing.training.prompts import load_prompts
from rljob_trainer.datasets.filters import DropCounts, HeldOut
from rljob_trainer.datasets.loading import without_dropped
from rljob_trainer.datasets.prompts import PromptRow
from rljob_trainer.errors import ConfigurationError, DatasetError
from rljob_trainer.models.tokenizer import Tokenizer
from rljob_trainer.source_paths import local_path

WHERE = "spec.training.dataset"
MODEL = local_path("package://rljob_trainer/assets/sort_digits/model", Path("."), "model")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """Tokens: 0 padding, 1 end, 2 `>`, 3 to 12 the digits; anything else is unknown (0)."""
    return Tokenizer(MODEL)


@pytest.fixture(scope="module")
def chat_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """The same with a chat template: every message is between `>`s, and the assistant's turn begins with an 8."""
    folder = tmp_path_factory.mktemp("chat_model")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_text((MODEL / name).read_text())
    (folder / "chat_template.jinja").write_text(
        "{% for message in messages %}>{{ message.content }}>{% endfor %}{% if add_generation_prompt %}8{% endif %}"
    )
    return Tokenizer(folder)


def file_dataset(path: str, **fields: object) -> Dataset:
    return Dataset.model_validate({"type": DatasetType.FILE, "file": FileDataset(path=path), **fields})


def write_lines(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines))
    return path


def test_json_lines_become_prompts(tmp_path: Path, tokenizer: Tokenizer) -> None:
    write_lines(
        tmp_path / "a.jsonl", '{"prompt": "12>", "answer": "3", "level": 2}', "", '{"prompt": "9", "answer": 4}'
    )
    rows = load_prompts(file_dataset("a.jsonl"), tokenizer, tmp_path, WHERE)
    assert rows == [
        PromptRow(0, "12>", "12>", (4, 5, 2), "3", {"prompt": "12>", "answer": "3", "level": 2}),
        PromptRow(1, "9", "9", (12,), 4, {"prompt": "9", "answer": 4}),
    ]


def test_columns_and_template_follow_the_job(tmp_path: Path, tokenizer: Tokenizer) -> None:
    write_lines(tmp_path / "a.jsonl", '{"q": "12", "a": "3"}')
    dataset = file_dataset("a.jsonl", prompt_field="q", answer_field="a", prompt_template="0{prompt}>")
    (row,) = load_prompts(dataset, tokenizer, tmp_path, WHERE)
    assert (row.prompt, row.source_prompt, row.token_ids, row.answer) == ("012>", "12", (3, 4, 5, 2), "3")


def test_a_row_without_an_answer_has_none(tmp_path: Path, tokenizer: Tokenizer) -> None:
    write_lines(tmp_path / "a.jsonl", '{"prompt": "1"}')
    assert load_prompts(file_dataset("a.jsonl"), tokenizer, tmp_path, WHERE)[0].answer is None


def test_an_answer_column_that_the_job_names_must_exist(tmp_path: Path, tokenizer: Tokenizer) -> None:
    write_lines(tmp_path / "rows.jsonl", '{"prompt": "1", "solution": "2"}')
    dataset = file_dataset("rows.jsonl", answer_field="solutoin")
    message = r"rows\.jsonl, line 1: no column 'solutoin' \(.*answerField\); the columns are: prompt, solution"
    with pytest.raises(DatasetError, match=message):
        load_prompts(dataset, tokenizer, tmp_path, "spec.training.dataset")


VERL_ROWS = [
    {
        "data_source": "openai/gsm8k",
        "prompt": [{"content": "12", "role": "user"}],
        "ability": "math",
        "reward_model": {"ground_truth": "72", "style": "rule"},
        "extra_info": {"answer": "... #### 72", "index": 0, "question": "5", "split": "train"},
    },
    {
        "data_source": "openai/gsm8k",
        "prompt": [{"content": "1", "role": "system"}, {"content": "3", "role": "user"}],
        "ability": "math",
        "reward_model": {"ground_truth": "10", "style": "rule"},
        "extra_info": {"answer": "... #### 10", "index": 1, "question": "6", "split": "train"},
    },
]


def test_files_of_verl_are_read_unchanged(tmp_path: Path, chat_tokenizer: Tokenizer) -> None:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(VERL_ROWS), tmp_path / "train.parquet")
    dataset = file_dataset("train.parquet", prompt_field="prompt", answer_field="reward_model.ground_truth")
    rows = load_prompts(dataset, chat_tokenizer, tmp_path, WHERE)
    assert [row.answer for row in rows] == ["72", "10"]
    assert [row.prompt for row in rows] == [">12>8", ">1>>3>8"]
    assert [row.location for row in rows] == [f"{tmp_path}/train.parquet, row {number}" for number in (1, 2)]
    assert rows[1].row == VERL_ROWS[1]


@pytest.mark.parametrize(
    ("prompt_field", "answer_field", "prompt", "answer"),
    [
        ("extra_info.question", "reward_model.ground_truth", "5", "72"),
        ("prompt.0.content", "extra_info.index", "12", 0),
        ("dotted.name", "dotted.other.name", "7", "8"),
    ],
)
def test_fields_may_be_nested_in_dictionaries_and_lists(
    tmp_path: Path, tokenizer: Tokenizer, prompt_field: str, answer_field: str, prompt: str, answer: object
) -> None:
    """A column whose name contains the dots takes precedence."""
    row = {**VERL_ROWS[0], "dotted": {"name": "9"}, "dotted.name": "7", "dotted.other.name": "8"}
    write_lines(tmp_path / "a.jsonl", json.dumps(row))
    dataset = file_dataset("a.jsonl", prompt_field=prompt_field, answer_field=answer_field)
    (found,) = load_prompts(dataset, tokenizer, tmp_path, WHERE)
    assert (found.prompt, found.answer) == (prompt, answer)


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ("reward_model.ground_truht", "no column 'reward_model.ground_truht' (F); the keys of 'reward_model' are: G"),
        (
            "reward.ground_truth",
            "no column 'reward.ground_truth' (F); the columns are: data_source, prompt, R",
        ),
        ("prompt.1.content", "no column 'prompt.1.content' (F); 'prompt' is a list (number of entries: 1)"),
        ("prompt.first", "no column 'prompt.first' (F); 'prompt' is a list (number of entries: 1)"),
        ("ability.0", "no column 'ability.0' (F); 'ability' is not a dictionary ('math')"),
        (
            "reward_model.style.",
            "no column 'reward_model.style.' (F); 'reward_model.style' is not a dictionary ('rule')",
        ),
    ],
)
def test_a_missing_nested_field_error_lists_what_exists(
    tmp_path: Path, tokenizer: Tokenizer, field: str, message: str
) -> None:
    write_lines(tmp_path / "a.jsonl", json.dumps(VERL_ROWS[0]))
    for name, fields in (
        ("promptField", {"prompt_field": field}),
        ("answerField", {"prompt_field": "extra_info.question", "answer_field": field}),
    ):
        with pytest.raises(DatasetError) as caught:
            load_prompts(file_dataset("a.jsonl", **fields), tokenizer, tmp_path, WHERE)
        expected = message.replace("(F)", f"({WHERE}.{name})")
        expected = expected.replace(": G", ": ground_truth, style").replace(
            ", R", ", ability, reward_model, extra_info"
        )
        assert str(caught.value) == f"{tmp_path}/a.jsonl, line 1: {expected}"


def test_numbers_of_a_file_are_read_as_numbers_and_decimals_as_digits(tmp_path: Path, tokenizer: Tokenizer) -> None:
    numbers = ("1e-05", "1E16", "72", "-0.5", "12345678901234567890")
    write_lines(tmp_path / "a.jsonl", *(f'{{"prompt": "1", "answer": {number}}}' for number in numbers))
    answers = [row.answer for row in load_prompts(file_dataset("a.jsonl"), tokenizer, tmp_path, WHERE)]
    assert answers == [1e-05, 1e16, 72, -0.5, 12345678901234567890]
    assert [type(answer) for answer in answers] == [float, float, int, float, int]
    for values, expected in (
        (pyarrow.array([1e-05, 72.0]), [1e-05, 72.0]),
        (pyarrow.array([72, -1], pyarrow.int8()), [72, -1]),
        (pyarrow.array([0.5, 2.0], pyarrow.float32()), [0.5, 2.0]),
        (
            pyarrow.array([decimal.Decimal("0E-10"), decimal.Decimal("1E-7")], pyarrow.decimal128(38, 10)),
            ["0.0000000000", "0.0000001000"],
        ),
    ):
        table = pyarrow.table({"prompt": ["1", "2"], "answer": values})
        pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
        rows = load_prompts(file_dataset("a.parquet"), tokenizer, tmp_path, WHERE)
        assert [row.answer for row in rows] == expected
        assert [type(row.answer) for row in rows] == [type(value) for value in expected]


def test_chat_messages_use_the_chat_template(tmp_path: Path, tokenizer: Tokenizer, chat_tokenizer: Tokenizer) -> None:
    messages = [{"role": "system", "content": "1"}, {"role": "user", "content": "2"}]
    write_lines(tmp_path / "a.jsonl", json.dumps({"prompt": messages}), '{"prompt": "3"}')
    dataset = file_dataset("a.jsonl", apply_chat_template=True)
    first, second = load_prompts(dataset, chat_tokenizer, tmp_path, WHERE)
    assert (first.prompt, first.source_prompt, first.token_ids) == (">1>>2>8", "1\n2", (2, 4, 2, 2, 5, 2, 11))
    assert (second.prompt, second.source_prompt) == (">3>8", "3")
    with pytest.raises(DatasetError, match=rf"{WHERE}.applyChatTemplate: the model's tokenizer has no chat template"):
        load_prompts(dataset, tokenizer, tmp_path, WHERE)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "1"', r"bad\.jsonl, line 2: not valid JSON \(Expecting ',' delimiter at column 15, near"),
        ("[1, 2]", r"bad\.jsonl, line 2: not a JSON object but a list"),
        ('{"text": "1", "answer": "2"}', r"bad\.jsonl, line 2: no column 'prompt' .*; the columns are: text, answer"),
        (
            '{"prompt": 5}',
            r"bad\.jsonl, line 2: column 'prompt' contains a int \(5\); it must be a string, or a list of chat",
        ),
        ('{"prompt": [{"role": "user"}]}', r"bad\.jsonl, line 2: column 'prompt' contains a list"),
        ('{"prompt": ""}', r"bad\.jsonl, line 2: the prompt is empty"),
        (
            '{"prompt": "1\\ud8002"}',
            r"bad\.jsonl, line 2: the prompt contains an unpaired surrogate \(at character 1\)",
        ),
        ("[" * 100_000, r"bad\.jsonl, line 2: JSON that cannot be parsed"),
        (
            '{"prompt": "1", "extra": ' + "[" * 101 + '"x"' + "]" * 101 + "}",
            r"bad\.jsonl, line 2: column 'extra' has more than 100 levels of nested lists or dictionaries",
        ),
        ('{"prompt": "1", "answer": ' + "9" * 5000 + "}", r"bad\.jsonl, line 2: JSON that cannot be parsed"),
        (
            '{"prompt": "1234"}',
            r"bad\.jsonl, line 2: the prompt has 4 tokens, more than .*maxPromptTokens \(3\); .*Drop",
        ),
    ],
)
def test_a_bad_row_is_named_by_file_and_line(tmp_path: Path, tokenizer: Tokenizer, line: str, message: str) -> None:
    write_lines(tmp_path / "bad.jsonl", '{"prompt": "1"}', line, '{"prompt": "2"}')
    with pytest.raises(DatasetError, match=message):
        load_prompts(file_dataset("bad.jsonl", max_prompt_tokens=3), tokenizer, tmp_path, WHERE)


def test_text_that_is_not_utf8_is_named_by_line(tmp_path: Path, tokenizer: Tokenizer) -> None:
    (tmp_path / "bad.jsonl").write_bytes(b'{"prompt": "1"}\n{"prompt": "\xff"}\n')
    with pytest.raises(DatasetError, match=r"bad\.jsonl, line 2: not UTF-8 text"):
        load_prompts(file_dataset("bad.jsonl"), tokenizer, tmp_path, WHERE)


def test_overlong_prompts_are_skipped_if_the_job_says_so(
    tmp_path: Path, tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    write_lines(tmp_path / "a.jsonl", '{"prompt": "1234"}', '{"prompt": "12"}')
    dataset = file_dataset("a.jsonl", max_prompt_tokens=3, overlong_prompt=OverlongPrompt.DROP)
    (row,) = load_prompts(dataset, tokenizer, tmp_path, WHERE)
    assert (row.index, row.prompt) == (1, "12")
    assert "1 of 2 prompts have more than 3 tokens and are dropped" in caplog.text
    short = file_dataset("a.jsonl", max_prompt_tokens=1, overlong_prompt=OverlongPrompt.DROP)
    with pytest.raises(DatasetError, match="all 2 prompts have more than 1 tokens; increase maxPromptTokens"):
        load_prompts(short, tokenizer, tmp_path, WHERE)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("missing.jsonl", r"spec\.training\.dataset\.file\.path: 'missing\.jsonl' not found \(looked for "),
        ("table.csv", r"'table\.csv' is neither a \.jsonl nor a \.parquet file"),
        ("empty.jsonl", r"the dataset has no rows; name another"),
        ("folder.jsonl", r"the folder .*folder\.jsonl has no \.parquet files; name a folder that has some"),
        ("fake.parquet", r"fake\.parquet: not a readable Parquet file"),
        ("package://no_such_package/a.jsonl", r"no Python package 'no_such_package' is installed"),
        ("package://rljob_trainer/assets/sort_digits/trian.jsonl", r"has no 'assets.*train\.jsonl"),
    ],
)
def test_unreadable_files_are_named(tmp_path: Path, tokenizer: Tokenizer, path: str, message: str) -> None:
    for name in ("table.csv", "empty.jsonl", "fake.parquet"):
        (tmp_path / name).write_text("" if name == "empty.jsonl" else "a,b\n")
    (tmp_path / "folder.jsonl").mkdir()
    with pytest.raises(DatasetError, match=message):
        load_prompts(file_dataset(path), tokenizer, tmp_path, WHERE)


def test_a_template_needs_its_placeholder_once(tmp_path: Path, tokenizer: Tokenizer) -> None:
    write_lines(tmp_path / "a.jsonl", '{"prompt": "1"}')
    for template in ("no place", "{prompt} {prompt}"):
        with pytest.raises(DatasetError, match=r"promptTemplate: must contain \{prompt\} exactly once \(seen: "):
            load_prompts(file_dataset("a.jsonl", prompt_template=template), tokenizer, tmp_path, WHERE)


def test_parquet_rows_are_plain_values(tmp_path: Path, tokenizer: Tokenizer) -> None:
    table = pyarrow.table(
        {
            "prompt": ["12>", "3"],
            "answer": [1.5, None],
            "day": [datetime.date(2026, 3, 1)] * 2,
            "price": [decimal.Decimal("1.10")] * 2,
            "image": [b"\x00"] * 2,
            "nested": [{"steps": [1, 2]}, None],
        }
    )
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    first, second = load_prompts(file_dataset("a.parquet"), tokenizer, tmp_path, WHERE)
    assert first.row == {
        "prompt": "12>",
        "answer": 1.5,
        "day": "2026-03-01",
        "price": "1.10",
        "nested": {"steps": [1, 2]},
    }
    assert (first.token_ids, second.answer) == ((4, 5, 2), None)
    pyarrow.parquet.write_table(pyarrow.table({"prompt": [1]}), tmp_path / "b.parquet")
    with pytest.raises(DatasetError, match=r"b\.parquet, row 1: column 'prompt' contains a int"):
        load_prompts(file_dataset("b.parquet"), tokenizer, tmp_path, WHERE)


def test_a_local_folder_in_hugging_face_layout_is_read(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "corpus"
    folder.mkdir()
    write_lines(folder / "train.jsonl", '{"prompt": "1", "answer": "a"}')
    write_lines(folder / "test.jsonl", '{"prompt": "2", "answer": "b"}', '{"prompt": "3", "answer": "c"}')
    dataset = Dataset(type=DatasetType.HUGGING_FACE, hugging_face=HuggingFaceDataset(path=str(folder), split="test"))
    rows = load_prompts(dataset, tokenizer, tmp_path, WHERE)
    assert [(row.prompt, row.answer) for row in rows] == [("2", "b"), ("3", "c")]
    wrong = Dataset(type=DatasetType.HUGGING_FACE, hugging_face=HuggingFaceDataset(path="./corpus", split="dev"))
    with pytest.raises(DatasetError, match=r"huggingFace: cannot load .*split dev.*: Unknown split \"dev\""):
        load_prompts(wrong, tokenizer, tmp_path, WHERE)
    missing = Dataset(type=DatasetType.HUGGING_FACE, hugging_face=HuggingFaceDataset(path="./nothing"))
    with pytest.raises(DatasetError, match=r"huggingFace\.path: '\./nothing' not found"):
        load_prompts(missing, tokenizer, tmp_path, WHERE)


def test_reasoning_gym_rows_depend_only_on_task_seed_and_settings(tmp_path: Path, tokenizer: Tokenizer) -> None:
    def load(seed: int, size: int = 5) -> list[PromptRow]:
        gym = ReasoningGymDataset(task="leg_counting", seed=seed, size=size, config={"max_animals": 3})
        # Field names of the job have no effect here.
        dataset = Dataset(type=DatasetType.REASONING_GYM, reasoning_gym=gym, prompt_field="x", answer_field="y")
        return load_prompts(dataset, tokenizer, tmp_path, WHERE)

    rows = load(1)
    assert len(rows) == 5
    assert rows == load(1)
    assert rows[:3] == load(1, size=3)
    # Neighbouring seeds share all rows but one: without the check, held-out prompts would leak into training.
    assert [row.prompt for row in load(2)[:4]] == [row.prompt for row in rows[1:]]
    first = rows[0]
    assert (first.prompt, first.answer) == (first.row["question"], first.row["answer"])
    metadata = first.row["metadata"]
    assert isinstance(metadata, dict)
    assert metadata["source_dataset"] == "leg_counting"
    assert int(str(first.answer)) == metadata["total_legs"]


def test_an_unknown_task_gets_suggestions(tmp_path: Path, tokenizer: Tokenizer) -> None:
    gym = ReasoningGymDataset(task="leg_count")
    dataset = Dataset(type=DatasetType.REASONING_GYM, reasoning_gym=gym)
    with pytest.raises(
        DatasetError, match=r"spec\.training\.dataset\.reasoningGym: .*'leg_count'; did you mean leg_counting"
    ):
        load_prompts(dataset, tokenizer, tmp_path, WHERE)


def prompt_row(index: int, source_prompt: str) -> PromptRow:
    return PromptRow(index, f"[{source_prompt}]", source_prompt, (1,), None, {})


def test_held_out_prompts_are_kept_out_of_training_whatever_their_template_and_spacing() -> None:
    training = [prompt_row(0, "2 + 3"), prompt_row(1, "4 + 4"), prompt_row(2, " 2  +\n3 "), prompt_row(3, "2 + 33")]
    held_out = [PromptRow(0, "other template: 2 + 3", "2 + 3", (9,), None, {}), prompt_row(1, "5")]
    compared = HeldOut.of(row.source_prompt for row in held_out)
    kept, report = without_dropped(training, compared, WHERE, DropCounts())
    assert [row.index for row in kept] == [1, 3]
    assert [(each.filter, each.num_rows) for each in report.dropped] == [("heldOut", 2)]
    assert without_dropped(training, HeldOut(), WHERE, DropCounts())[0] == training


def test_the_tokenizer_knows_its_end_tokens(tokenizer: Tokenizer, chat_tokenizer: Tokenizer, tmp_path: Path) -> None:
    assert tokenizer.eos_token_ids == (1,)
    assert tokenizer.decode([4, 5, 2, 1]) == "12>"
    assert tokenizer.encode("12>") == [4, 5, 2]
    assert (tokenizer.has_chat_template, chat_tokenizer.has_chat_template) == (False, True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_text((MODEL / name).read_text())
    (tmp_path / "config.json").write_text('{"model_type": "qwen3", "eos_token_id": [1, 5]}')
    assert Tokenizer(tmp_path).eos_token_ids == (1, 5)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 1]}')
    assert Tokenizer(tmp_path).eos_token_ids == (7, 1)


def test_a_folder_without_tokenizer_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"spec\.training\.model\.source: no tokenizer can be read from "):
        Tokenizer(tmp_path)
    # transformers would create one here, of special tokens only.
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    with pytest.raises(ConfigurationError, match=r"has no tokenizer vocabulary; copy the model's tokenizer files"):
        Tokenizer(tmp_path)
