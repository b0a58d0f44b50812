"""A disk or a file system that fails, or is full, is no configuration error: another attempt may succeed.
/proc/self/mem plays a file on a failing disk: it can be opened, and reading from it gives EIO."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

import datasets
import huggingface_hub.errors
import pyarrow.parquet
import pytest

from rljob_api.v1alpha1.dataset import Dataset, DatasetType, FileDataset, HuggingFaceDataset, ReasoningGymDataset
from rljob_trainer.datasets import hugging_face_rows, reasoning_gym_tasks
from rljob_trainer.datasets.rows import RawRow, read_rows
from rljob_trainer.engines.train.model import read_config
from rljob_trainer.errors import ConfigurationError, DatasetError, ResourceError, storage_checked, storage_failure
from rljob_trainer.models import download, gguf_conversion
from rljob_trainer.models.model_files import read_json_object, reading_model
from rljob_trainer.models.source import converted_gguf, fingerprint
from rljob_trainer.models.tokenizer import Tokenizer

MODEL = Path(str(files("rljob_trainer"))) / "assets/sort_digits/model"
FAILING = "/proc/self/mem"


def of(number: int, *, path: str = "file") -> OSError:
    return OSError(number, os.strerror(number), path)


def raised(error: Exception, cause: Exception | None = None, context: Exception | None = None) -> Exception:
    error.__cause__, error.__context__ = cause, context
    return error


@pytest.mark.parametrize(
    ("error", "failure"),
    [
        (of(errno.EIO), "[Errno 5] Input/output error: 'file'"),
        (of(errno.ENOSPC), "[Errno 28] No space left on device: 'file'"),
        (of(errno.ESTALE), "[Errno 116] Stale file handle: 'file'"),
        (of(errno.EDQUOT), "[Errno 122] Disk quota exceeded: 'file'"),
        (of(errno.EMFILE), "[Errno 24] Too many open files: 'file'"),
        (of(errno.ENOMEM), "[Errno 12] Cannot allocate memory: 'file'"),
        (of(errno.ETIMEDOUT), "[Errno 110] Connection timed out: 'file'"),
        (of(errno.EREMOTEIO), "[Errno 121] Remote I/O error: 'file'"),
        (raised(ValueError("x"), cause=of(errno.EIO)), "[Errno 5] Input/output error: 'file'"),
        (raised(ValueError("x"), context=raised(KeyError("y"), cause=of(errno.EIO))), "[Errno 5] Input/output error:"),
        (Exception("Input/output error (os error 5)"), "Input/output error (os error 5)"),
        (of(errno.ENOENT), None),
        (of(errno.EACCES), None),
        (OSError("no errno"), None),
        (Exception("No such file or directory (os error 2)"), None),
        (raised(ValueError("x"), cause=of(errno.EISDIR), context=ValueError("5")), None),
    ],
)
def test_storage_failures_are_distinguished_from_other_errors(error: Exception, failure: str | None) -> None:
    found = storage_failure(error)
    assert found is None if failure is None else found is not None and found.startswith(failure)


def test_cyclic_errors_terminate() -> None:
    error = ValueError("x")
    assert storage_failure(raised(error, cause=raised(KeyError("y"), cause=error))) is None


def test_own_errors_are_passed_through() -> None:
    with pytest.raises(DatasetError, match=r"^as it was$"), storage_checked("here"):
        raise DatasetError("as it was") from of(errno.EIO)


def read(dataset: Dataset, folder: Path) -> list[RawRow]:
    return list(read_rows(dataset, folder, "spec.training.dataset"))


def test_parquet_files_are_covered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["1"]}), tmp_path / "rows.parquet")
    dataset = Dataset(type=DatasetType.FILE, file=FileDataset(path="rows.parquet"))

    def batches(_file: object, **_settings: object) -> Iterator[object]:
        yield pyarrow.record_batch({"prompt": ["1"]})
        raise of(errno.EIO)

    monkeypatch.setattr(pyarrow.parquet.ParquetFile, "iter_batches", batches)
    with pytest.raises(ResourceError, match=r"rows\.parquet: .*file system .*\(\[Errno 5\] Input/out"):
        read(dataset, tmp_path)


def hugging_face(folder: Path) -> list[RawRow]:
    (folder / "corpus").mkdir(exist_ok=True)
    source = HuggingFaceDataset(path="./corpus")
    return read(Dataset(type=DatasetType.HUGGING_FACE, hugging_face=source), folder)


@pytest.mark.parametrize(
    "error",
    [
        of(errno.ENOSPC),
        raised(datasets.exceptions.DatasetGenerationError("An error occurred"), cause=of(errno.EIO)),
        OSError("Not enough disk space. Needed: 9 GiB (download: 1 GiB, generated: 8 GiB)"),
    ],
)
def test_hugging_face_datasets_are_covered_while_loading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def load_dataset(*_args: object, **_settings: object) -> None:
        raise error

    monkeypatch.setattr(hugging_face_rows, "load_dataset", load_dataset)
    with pytest.raises(ResourceError, match=r"^spec\.training\.dataset\.huggingFace: .*corpus.* file system"):
        hugging_face(tmp_path)


def test_hugging_face_datasets_are_covered_while_reading_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def rows() -> Iterator[dict[str, str]]:
        yield {"prompt": "1"}
        raise of(errno.EIO)

    monkeypatch.setattr(hugging_face_rows, "load_dataset", lambda *_args, **_settings: rows())
    with pytest.raises(ResourceError, match=r"^spec\.training\.dataset\.huggingFace: .*corpus.*Input/output error"):
        hugging_face(tmp_path)


def test_reasoning_gym_tasks_are_covered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Task:
        def __iter__(self) -> Iterator[dict[str, object]]:
            yield {"question": "1", "answer": "2"}
            raise of(errno.EMFILE)

    monkeypatch.setattr(reasoning_gym_tasks, "create_task", lambda *_args: Task())
    dataset = Dataset(type=DatasetType.REASONING_GYM, reasoning_gym=ReasoningGymDataset(task="leg_counting"))
    with pytest.raises(ResourceError, match=r"reasoningGym: the task leg_counting: .*Too many open files"):
        read(dataset, tmp_path)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The quickstart's model."""
    return Path(shutil.copytree(MODEL, tmp_path / "model"))


def fail(file: Path) -> None:
    file.unlink()
    file.symlink_to(FAILING)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "generation_config.json"])
def test_tokenizer_files_are_covered(folder: Path, name: str) -> None:
    fail(folder / name)
    with pytest.raises(ResourceError, match=r"^spec\.training\.model\.source: .*model.* failed \(.*Input/output error"):
        Tokenizer(folder)


def test_the_model_configuration_is_covered(folder: Path) -> None:
    fail(folder / "config.json")
    with pytest.raises(ResourceError, match=r"^spec\.training\.model\.source: .*model.* failed \(.*Input/output error"):
        read_config(folder)
    with pytest.raises(ResourceError, match=r"config\.json: .*Input/output error"):
        read_json_object(folder / "config.json")
    with pytest.raises(ResourceError, match=r"config\.json: .*Input/output error"):
        fingerprint(folder)


def test_wrapped_library_errors_are_covered(folder: Path) -> None:
    with pytest.raises(ResourceError, match="file system"), reading_model(folder, "what", "advice"):
        raise TypeError("the library's own") from of(errno.EIO)
    with (
        pytest.raises(ConfigurationError, match=r"what \(.*not there.*\); advice"),
        reading_model(folder, "what", "advice"),
    ):
        raise of(errno.ENOENT, path="not there")


def test_weight_files_are_covered(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rljob_trainer.engines.train import weight_loading
    from rljob_trainer.engines.train.model import build_on_meta

    def safe_open(*_args: object, **_settings: object) -> None:
        raise OSError("Input/output error (os error 5)")

    model = build_on_meta(folder)
    monkeypatch.setattr(weight_loading, "safe_open", safe_open)
    with pytest.raises(ResourceError, match=r"^spec\.training\.model\.source: .*\(os error 5\)"):
        weight_loading.load_weights(model, model, folder, "")


def test_conversions_are_covered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def convert_gguf(_file: Path, folder: Path) -> None:
        folder.mkdir()
        raise RuntimeError("cannot write") from of(errno.ENOSPC)

    monkeypatch.setattr(gguf_conversion, "convert_gguf", convert_gguf)
    (tmp_path / "small.gguf").write_bytes(b"weights")
    with pytest.raises(ResourceError, match=r"converting .*small\.gguf into .* \(\[Errno 28\] No space left"):
        converted_gguf(tmp_path / "small.gguf", tmp_path / "cache")
    assert [path.suffix for path in (tmp_path / "cache" / "models").iterdir()] == [".lock"]
    fail(tmp_path / "small.gguf")
    with pytest.raises(ResourceError, match=r"small\.gguf: .*Input/output error"):
        converted_gguf(tmp_path / "small.gguf", tmp_path / "cache")


def test_downloads_are_covered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the job may not use the hub: the error used to be about the model's name."""
    found: list[Exception] = [of(errno.ENOSPC)]

    def snapshot_download(*_args: object, **_settings: object) -> str:
        raise found[0]

    monkeypatch.setattr(download, "snapshot_download", snapshot_download)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ResourceError, match=r"'owner/name' cannot be stored in the local cache .*No space left on"):
        download.download_model("owner/name", None, "here", ["*"])
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    timeout = huggingface_hub.errors.LocalEntryNotFoundError("not cached")
    for error in (raised(timeout, context=of(errno.ETIMEDOUT)), of(errno.ETIMEDOUT)):
        found[0] = error
        with pytest.raises(ResourceError, match="the Hugging Face hub is unreachable"):
            download.download_model("owner/name", None, "here", ["*"])
