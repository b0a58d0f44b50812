"""Dataset files that are damaged or hold unusable values: each is a data error with file, row and column."""

from __future__ import annotations

import json
from pathlib import Path

import datasets
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rljob_api.v1alpha1.dataset import Dataset, DatasetType, FileDataset, HuggingFaceDataset, ReasoningGymDataset
from rljob_trainer.datasets import hugging_face_rows, reasoning_gym_tasks
from rljob_trainer.datasets.rows import RawRow, read_rows
from rljob_trainer.errors import DatasetError, ResourceError

WHERE = "spec.training.dataset"
NOT_UTF8 = b"\xff\xfe"


def read(path: Path, **fields: object) -> list[RawRow]:
    dataset = Dataset.model_validate({"type": DatasetType.FILE, "file": FileDataset(path=str(path)), **fields})
    return list(read_rows(dataset, path.parent, WHERE))


def read_folder(folder: Path, **fields: object) -> list[RawRow]:
    source = HuggingFaceDataset(path=str(folder))
    dataset = Dataset.model_validate({"type": DatasetType.HUGGING_FACE, "hugging_face": source, **fields})
    return list(read_rows(dataset, folder.parent, WHERE))


def strings(*values: bytes) -> pyarrow.Array:
    """A column of strings that are not checked to be UTF-8."""
    binary = pyarrow.array(values, pyarrow.binary())
    return pyarrow.Array.from_buffers(pyarrow.string(), len(values), binary.buffers())


def table(num_rows: int, **columns: pyarrow.Array) -> pyarrow.Table:
    return pyarrow.table({"prompt": [str(row) for row in range(num_rows)]} | columns)


def timestamps(*seconds: int) -> pyarrow.Array:
    return pyarrow.array([1000 * each for each in seconds], pyarrow.timestamp("ms"))


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"prompt": strings(b"1", b"2", NOT_UTF8)}, "row 3: column 'prompt' cannot be read .*UnicodeDecodeError"),
        ({"solution": strings(b"1", NOT_UTF8, b"3")}, "row 2: column 'solution' cannot be read .*UnicodeDecodeError"),
        (
            {"reward_model": pyarrow.StructArray.from_arrays([strings(b"1", b"2", NOT_UTF8)], ["ground_truth"])},
            "row 3: column 'reward_model' cannot be read .*'utf-8' codec can't decode byte 0xff",
        ),
        ({"day": timestamps(0, 2**50, 0)}, "row 2: column 'day' cannot be read .*OverflowError"),
    ],
)
def test_a_parquet_value_that_python_cannot_represent_is_named(
    tmp_path: Path, columns: dict[str, pyarrow.Array], message: str
) -> None:
    pyarrow.parquet.write_table(table(3, **columns), tmp_path / "rows.parquet")
    with pytest.raises(DatasetError, match=r"rows\.parquet, " + message):
        read(tmp_path / "rows.parquet")


def test_the_first_row_is_named_if_columns_fail_in_different_ways(tmp_path: Path) -> None:
    """The library fails at the first column, in row 2; row 1 has another fault."""
    columns = {"day": timestamps(0, 10**15), "prompt": strings(NOT_UTF8, b"2")}
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "rows.parquet")
    with pytest.raises(
        DatasetError, match=r"rows\.parquet, row 1: column 'prompt' cannot be read \(UnicodeDecodeError"
    ):
        read(tmp_path / "rows.parquet")


def test_rows_are_counted_across_record_batches(tmp_path: Path) -> None:
    texts = [b"1"] * 3000
    texts[2500] = NOT_UTF8
    pyarrow.parquet.write_table(table(3000, other=strings(*texts)), tmp_path / "rows.parquet")
    with pytest.raises(DatasetError, match=r"rows\.parquet, row 2501: column 'other' cannot be read"):
        read(tmp_path / "rows.parquet")


def test_damaged_parquet_pages_are_found_while_reading(tmp_path: Path) -> None:
    file = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(table(5000), file, compression="snappy")
    content = bytearray(file.read_bytes())
    for position in range(200, len(content) - 2000, 97):
        content[position] ^= 0xFF
    file.write_bytes(content)
    with pytest.raises(DatasetError, match=r"rows\.parquet: not a readable Parquet file \(.*\); write the file again"):
        read(file)


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (b"1", "bytes"),
        ([b"1"], "a list with bytes, images"),
    ],
)
@pytest.mark.parametrize("field", ["prompt_field", "answer_field"])
def test_bytes_as_prompt_or_answer_are_named_as_such(tmp_path: Path, value: object, kind: str, field: str) -> None:
    """They used to be dropped, and the column was reported as missing."""
    pyarrow.parquet.write_table(pyarrow.table({"text": ["1"], "picture": [value]}), tmp_path / "rows.parquet")
    assert [row.columns for row in read(tmp_path / "rows.parquet")] == [{"text": "1"}]
    allowed = "prompts, answers, sources and tools must be strings"
    with pytest.raises(DatasetError, match=rf"rows\.parquet, row 1: column 'picture' contains {kind}.*{allowed}"):
        read(tmp_path / "rows.parquet", **{field: "picture"})
    with pytest.raises(DatasetError, match=r"rows\.parquet, row 1: column 'picture' contains"):
        read(tmp_path / "rows.parquet", **{field: "picture.bytes"})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"prompt": "1"}\n{"prompt": "\xe9"}\n', r"line 2: not UTF-8 text \(invalid continuation byte at byte 13\)"),
        (
            '{"prompt": "1"}\n'.encode("utf-16"),
            r"line 1: not UTF-8 text \(invalid start byte at byte 1\); save .* UTF-8",
        ),
        (b'{"prompt": "1"}\n"text"\n', r"line 2: not a JSON object but a str; write \{\.\.\.\}"),
        (b'{"prompt": "1"}\nnull\n', r"line 2: not a JSON object but a NoneType"),
    ],
)
def test_lines_that_are_not_json_objects_in_utf8_are_rejected(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "rows.jsonl").write_bytes(content)
    with pytest.raises(DatasetError, match=r"rows\.jsonl, " + message):
        read(tmp_path / "rows.jsonl")


def test_a_byte_order_mark_is_accepted(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_bytes('\ufeff{"prompt": "é"}\n'.encode())
    assert [row.columns for row in read(tmp_path / "rows.jsonl")] == [{"prompt": "é"}]


def test_a_failing_disk_is_not_a_data_error(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").symlink_to("/proc/self/mem")
    with pytest.raises(ResourceError, match=r"rows\.jsonl: cannot be read \(Input/output error\); check the disk"):
        read(tmp_path / "rows.jsonl")


@pytest.fixture(scope="module")
def any_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("any") / "rows.jsonl"


@given(st.lists(st.one_of(st.binary(max_size=20), st.just(b"\n"), st.sampled_from([b'{"a": 1}', b'{"a":', b"[]"]))))
@settings(max_examples=100, deadline=None)
def test_any_bytes_are_rows_or_an_error_with_a_line(any_file: Path, parts: list[bytes]) -> None:
    any_file.write_bytes(b"".join(parts))
    try:
        message, rows = "", read(any_file)
    except DatasetError as error:
        message, rows = str(error), []
    assert message.startswith(f"{any_file}, line ") if message else all(type(row.columns) is dict for row in rows)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("train.jsonl", b'{"prompt": "1"}\n{"prompt":\n', r"huggingFace: cannot load .*because of .*JSON parse error"),
        ("train.jsonl", b'{"prompt": "1"}\n{"prompt": "\xff"}\n', r"huggingFace: row 1 of .* cannot be read .*Unicode"),
        ("train.jsonl", b"", r"huggingFace: cannot load .*; check the names and the files"),
        ("train.csv", b'prompt,answer\n1,2,3\n"', r"cannot load .*because of ParserError: Error tokenizing data"),
        ("README.md", b"---\nconfigs:\n- config_name: [\n---\n", r"cannot load .*ParserError: while parsing"),
        ("train.parquet", None, r"huggingFace: row 1 of .* cannot be read .*UnicodeDecodeError"),
        ("picture.png", b"no picture", r"huggingFace: row 0 of .* cannot be read .*UnidentifiedImageError"),
    ],
)
def test_damaged_files_of_a_hugging_face_folder_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, content: bytes | None, message: str
) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "corpus"
    folder.mkdir()
    if content is None:
        pyarrow.parquet.write_table(table(2, other=strings(b"1", NOT_UTF8)), folder / name)
    else:
        (folder / name).write_bytes(content)
    if name == "README.md":
        (folder / "train.jsonl").write_text(json.dumps({"prompt": "1"}))
    with pytest.raises(DatasetError, match=WHERE.replace(".", r"\.") + r"\." + r".*" + message):
        read_folder(folder)


def caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


class ReadTimeout(Exception):
    """Has the name of httpx's exception."""


class HTTPStatusError(Exception):
    """An error of a request that got a response."""


ReadTimeout.__module__ = HTTPStatusError.__module__ = "httpx"


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ConnectionError("no network"), ResourceError),
        (caused(datasets.exceptions.DatasetGenerationError("failed"), ReadTimeout("slow")), ResourceError),
        (caused(FileNotFoundError("no such dataset"), HTTPStatusError("404")), DatasetError),
        (caused(datasets.exceptions.DatasetGenerationError("failed"), ValueError("bad")), DatasetError),
    ],
)
def test_a_failing_network_is_not_a_data_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: Exception, kind: type[Exception]
) -> None:
    """Otherwise the operator would not retry."""

    def load_dataset(*_args: object, **_settings: object) -> None:
        raise error

    monkeypatch.setattr(hugging_face_rows, "load_dataset", load_dataset)
    with pytest.raises(kind, match="huggingFace: ") as raised:
        read_folder(tmp_path)
    assert type(raised.value) is kind


def test_a_task_that_fails_at_a_row_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Task:
        def __iter__(self) -> object:
            yield {"question": "1", "answer": "2"}
            raise IndexError("list index out of range")

    monkeypatch.setattr(reasoning_gym_tasks, "create_task", lambda *_args: Task())
    gym = ReasoningGymDataset(task="leg_counting")
    dataset = Dataset(type=DatasetType.REASONING_GYM, reasoning_gym=gym)
    with pytest.raises(
        DatasetError, match=r"reasoningGym: the task leg_counting fails at row 1 \(IndexError: list ind"
    ):
        list(read_rows(dataset, tmp_path, WHERE))


def test_a_folder_with_the_name_of_a_file_is_read(tmp_path: Path) -> None:
    """Spark writes such folders."""
    folder = tmp_path / "rows.parquet"
    folder.mkdir()
    pyarrow.parquet.write_table(table(2), folder / "part-0.parquet")
    pyarrow.parquet.write_table(table(1), folder / "part-1.PARQUET")
    (folder / "_SUCCESS").touch()
    assert len(read(folder)) == 3


def test_files_in_the_folders_of_a_folder_are_not_left_out_silently(tmp_path: Path) -> None:
    (tmp_path / "rows" / "more").mkdir(parents=True)
    for name in ("a.parquet", "more/b.parquet"):
        pyarrow.parquet.write_table(table(1), tmp_path / "rows" / name)
    with pytest.raises(DatasetError, match=r"would not be read \(seen: more/b\.parquet\); move all files"):
        read(tmp_path / "rows")
