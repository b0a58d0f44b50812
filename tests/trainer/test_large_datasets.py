"""Parquet files with more rows than fit into memory: the filters run once, and drawn rows are read from the files."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import pyarrow
import pyarrow.parquet
import pytest

from rljob_api.v1alpha1.training import Training
from rljob_trainer.controller import prompt_sets
from rljob_trainer.controller.prompt_sets import Prompts, load_all_prompts, prompt_cursor
from rljob_trainer.datasets import filter_processes, row_index
from rljob_trainer.datasets.filter_processes import FilterPass
from rljob_trainer.datasets.filters import HeldOut
from rljob_trainer.datasets.parquet_files import ParquetFiles, RowGroup
from rljob_trainer.datasets.row_index import opened_or_built
from rljob_trainer.errors import DatasetError
from rljob_trainer.source_paths import local_path

MODEL = local_path("package://rljob_trainer/assets/sort_digits/model", Path("."), "model")
NUM_FILES, NUM_ROWS = 3, 40
"""Files of the dataset, and rows of each."""


def prompt(number: int) -> str:
    """Every fifth row has the prompt of the row before, and every seventh a long one."""
    number -= number % 5 == 4
    return f"{number:04d}>" if number % 7 else f"{number:020d}>"


def write_files(folder: Path, answers: Sequence[object] = ()) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for file in range(NUM_FILES):
        numbers = range(file * NUM_ROWS, (file + 1) * NUM_ROWS)
        rows = {
            "prompt": [prompt(number) for number in numbers],
            "answer": answers or [str(number) for number in numbers],
            "level": list(numbers),
        }
        pyarrow.parquet.write_table(pyarrow.table(rows), folder / f"part-{file}.parquet", row_group_size=8)


def job(folder: Path, duplicates: str = "Drop", fields: Mapping[str, object] = MappingProxyType({})) -> Training:
    dataset = {"type": "File", "file": {"path": str(folder)}, "maxPromptTokens": 10, "overlongPrompt": "Drop"}
    return Training.from_wire(
        {
            "model": {"source": str(MODEL)},
            "dataset": {**dataset, **fields},
            "filters": {"duplicates": duplicates},
            "rewards": [{"type": "MathAnswer"}],
            "steps": 1,
        }
    )


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with files that count as large."""
    monkeypatch.setattr(prompt_sets, "MAX_ROWS_PARSED", 100)
    write_files(tmp_path / "files")
    return tmp_path / "files"


def load(folder: Path, duplicates: str = "Drop", **fields: object) -> Prompts:
    return load_all_prompts(job(folder, duplicates, fields), MODEL, folder, folder.parent / "data")


def drawn(prompts: Prompts, num_batches: int, size: int = 16) -> list[tuple[int, str, object]]:
    cursor = prompt_cursor(prompts, 3, None)
    return [
        (each.ordinal, each.row.prompt, each.row.answer) for _ in range(num_batches) for each in cursor.next_batch(size)
    ]


def test_a_large_dataset_draws_the_same_rows_as_one_in_memory(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    large = load(files)
    [source] = large.sources
    assert source.index is not None
    monkeypatch.setattr(prompt_sets, "MAX_ROWS_PARSED", 1000)
    small = load(files)
    assert small.sources[0].index is None
    # The two have the same rows, so also the same order; three epochs.
    assert [row.prompt for row in source.rows] == [row.prompt for row in small.sources[0].rows]
    assert drawn(large, 15) == drawn(small, 15)
    assert (large.longest, large.largest_token) == (small.longest, small.largest_token)
    report = json.loads((files.parent / "data" / "filters.json").read_text())
    assert "duplicates" in [each["filter"] for each in report[0]["dropped"]]


@pytest.mark.long
def test_several_processes_find_the_same_rows(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index = load(files).sources[0].index
    assert index is not None
    for name, value in (("ROWS_PER_PROCESS", 1), ("ROWS_PER_TASK", 20)):
        monkeypatch.setattr(filter_processes, name, value)
    monkeypatch.setattr(filter_processes, "num_usable_cores", lambda: 2)
    settings = FilterPass(
        index.files.paths, job(files).sources["dataset"], "x", MODEL, HeldOut(), finds_duplicates=True
    )
    other = opened_or_built(index.files, settings, files.parent / "other")
    assert other.numbers.tolist() == index.numbers.tolist()
    assert other.state.report.dropped == index.state.report.dropped


def test_the_report_names_the_first_dropped_rows_of_each_filter(files: Path) -> None:
    index = load(files).sources[0].index
    assert index is not None
    expected = [number for number in range(120) if len(prompt(number)) > 10]
    overlong, duplicates = index.state.report.dropped
    assert (overlong.filter, overlong.num_rows) == ("overlongPrompt", len(expected))
    assert overlong.examples[0] == f"{files / 'part-0.parquet'}, row 1"
    assert duplicates.filter == "duplicates"
    assert index.state.report.num_kept == 120 - overlong.num_rows - duplicates.num_rows


def test_a_second_run_reads_the_index_unless_files_or_settings_have_changed(
    files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = load(files)
    built = list[str]()
    build = row_index._build

    def counted(*arguments: object) -> object:
        built.append("again")
        return build(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(row_index, "_build", counted)
    assert drawn(load(files), 2) == drawn(first, 2)
    assert load(files, shuffle=False).sources[0].index is not None
    assert built == []
    load(files, duplicates="Keep")
    assert built == ["again"]
    pyarrow.parquet.write_table(
        pyarrow.table({"prompt": ["7>"] * 200, "answer": ["7"] * 200, "level": [0] * 200}), files / "part-1.parquet"
    )
    changed = load(files, duplicates="Keep")
    assert built == ["again"] * 2
    os.utime(files / "part-1.parquet", (1, 1))
    copied = load(files, duplicates="Keep")
    assert built == ["again"] * 3
    assert copied.sources[0].digest == changed.sources[0].digest
    assert changed.sources[0].digest != first.sources[0].digest


def test_the_sources_of_large_datasets_are_counted_before_the_run(files: Path) -> None:
    write_files(files, [str(number % 5) for number in range(NUM_ROWS)])
    prompts = load(files, sourceField="answer")
    assert {row.source for row in prompts.training} == {str(row.answer) for row in prompts.training}
    with pytest.raises(DatasetError, match=r"dataset\.sourceField: column 'level' has more than 50 different values"):
        load(files, sourceField="level")
    with pytest.raises(DatasetError, match=r"no column 'origin' \(spec.training.dataset.sourceField\)"):
        load(files, sourceField="origin")


def test_answers_of_a_wrong_type_are_found_before_the_run(files: Path) -> None:
    write_files(files, [None if number == 5 else "N/A" if number == 9 else "1" for number in range(NUM_ROWS)])
    with pytest.raises(DatasetError, match=r"(?s)answerField: .*MathAnswer.*row 10: the answer is .*'N/A'"):
        load(files)
    write_files(files, [None if number == 5 else "1" for number in range(NUM_ROWS)])
    with pytest.raises(DatasetError, match=r"answerField: 3 of 120 rows have no answer.*part-0\.parquet, row 6"):
        load(files)
    assert not list((files.parent / "data").glob("*/index.json"))


def test_answers_are_checked_again_for_another_reward(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The index of a job that only needs tests for Code says nothing about MathAnswer."""
    monkeypatch.setattr(prompt_sets, "NUM_ROWS_TO_CHECK", 0)
    write_files(files, [["assert f(1)"]] * NUM_ROWS)
    rewards: list[dict[str, object]] = [{"type": "Code", "name": "code"}]
    for expected in (contextlib.nullcontext(), pytest.raises(DatasetError, match="reward MathAnswer cannot score")):
        with expected:
            settings = Training.from_wire(job(files, "Keep").to_wire() | {"rewards": rewards})
            load_all_prompts(settings, MODEL, files, files.parent / "data")
        rewards.append({"type": "MathAnswer"})


def test_unusable_tests_of_code_are_found_before_the_run(files: Path) -> None:
    write_files(files, [["assert f(1)"] if number != 6 else ["assert f("] for number in range(NUM_ROWS)])
    settings = job(files, "Keep").to_wire() | {"rewards": [{"type": "Code"}]}
    with pytest.raises(DatasetError, match=r"(?s)answerField: .*reward Code .*part-0\.parquet, row 7: the answer is"):
        load_all_prompts(Training.from_wire(settings), MODEL, files, files.parent / "data")


def test_rows_are_read_in_advance_and_each_row_group_once(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decoded = list[RowGroup]()
    batches_of = ParquetFiles.batches_of

    def counted(self: ParquetFiles, group: RowGroup, columns: Sequence[str] | None) -> object:
        decoded.append(group)
        return batches_of(self, group, columns)

    prompts = load(files)
    [source] = prompts.sources
    assert source.index is not None
    num_rows = len(source.rows)
    monkeypatch.setattr(ParquetFiles, "batches_of", counted)
    assert drawn(prompts, num_rows // 4, size=4) == drawn(load(files), num_rows // 4, size=4)
    # Each of the two loadings has read the first batch, of at most four row groups, and then all others together.
    assert len(decoded) <= 2 * (4 + len(source.index.files.groups))


@pytest.mark.parametrize(
    ("reward", "names"),
    [
        ({"type": "MathAnswer"}, {"prompt", "answer"}),
        ({"type": "Function", "function": {"path": "rewards:score"}}, {"prompt", "answer", "level"}),
    ],
)
def test_columns_that_no_reward_reads_are_not_read(files: Path, reward: dict[str, object], names: set[str]) -> None:
    training = Training.from_wire({**job(files).to_wire(), "rewards": [reward]})
    prompts = load_all_prompts(training, MODEL, files, files.parent / "data")
    assert {frozenset(row.row) for row in prompts.sources[0].rows} == {frozenset(names)}


def filter_until_killed(folder: Path) -> None:
    """In a child process: ends by SIGKILL in the middle of the filter pass."""
    prompt_sets.MAX_ROWS_PARSED = 100  # type: ignore[attr-defined]
    row_index._add = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    load(folder)


def test_a_kill_during_the_filters_leaves_nothing_that_looks_valid(files: Path) -> None:
    process = multiprocessing.get_context("fork").Process(target=filter_until_killed, args=(files,))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    folder = files.parent / "data"
    assert [each.name.endswith(".new") for each in folder.iterdir()] == [True]
    prompts = load(files)
    assert prompts.sources[0].index is not None
    assert sorted(each.name for each in folder.iterdir()) == ["dataset", "filters.json"]
