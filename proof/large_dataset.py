"""Shows that a run draws prompts from 20 million rows with little memory, and continues exactly after SIGKILL.

    python proof/large_dataset.py [--folder FOLDER] [--files 20] [--rows-per-file 1000000] [--rows-per-group 10000]

Writes Parquet files (about 500 MB for a million rows) and a tokenizer, unless the folder has them. Then a process
filters the rows, draws most of the stream as row numbers, and the last batches before and after the kill as prompts,
which it reads and tokenizes. No model is trained. The process is killed, another one resumes from its last saved
position, and a third one runs without a kill. The exit code is 1 if the prompts differ, or if the process needs more
than 2 GiB.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.compute
import pyarrow.parquet
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import decoders, models, pre_tokenizers, trainers

from rljob_api.v1alpha1.dataset import Dataset
from rljob_proof.runs import REPOSITORY
from rljob_trainer.datasets.cursor import CursorState, PromptCursor
from rljob_trainer.datasets.filter_processes import FilterPass
from rljob_trainer.datasets.filters import FilterReport, HeldOut
from rljob_trainer.datasets.indexed_rows import IndexedRows
from rljob_trainer.datasets.parquet_files import ParquetFiles
from rljob_trainer.datasets.prompts import PromptMaker, PromptRow
from rljob_trainer.datasets.row_index import IndexState, RowIndex, opened_or_built
from rljob_trainer.models.tokenizer import Tokenizer
from rljob_trainer.rewards.answer_values import why_unusable

WHERE = "spec.training.dataset"
MAX_BYTES = 2 * 2**30
BATCH_SIZES = (64, 256, 512)
NUM_BATCHES = 4
"""Batches of each size that are drawn before the kill, and again after it."""
KILL_FRACTION = 0.35
"""The kill is after this fraction of the first epoch: at row 7 million of 20 million."""
PART = 100_000


def main() -> int:
    """Runs the program. The exit code is 1 if something does not hold."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=REPOSITORY / "runs" / "proof" / "large_dataset")
    parser.add_argument("--files", type=int, default=20)
    parser.add_argument("--rows-per-file", type=int, default=1_000_000)
    parser.add_argument("--rows-per-group", type=int, default=10_000)
    parser.add_argument("--unfiltered", action="store_true", help="keep all rows; the filters need an hour of one core")
    parser.add_argument("--run", metavar="NAME", help="used by the program itself: run as this process")
    options = parser.parse_args()
    folder = options.folder.resolve()
    if options.run:
        draw(folder, options.run, is_filtered=not options.unfiltered)
        return 0
    write_data(folder, options.files, options.rows_per_file, options.rows_per_group)
    write_tokenizer(folder)
    for name in ("killed", "whole"):
        (folder / f"{name}.jsonl").unlink(missing_ok=True)
        (folder / f"{name}.json").unlink(missing_ok=True)
    arguments = ("--unfiltered",) if options.unfiltered else ()
    killed = started(folder, "killed", *arguments)
    for line in lines_of(killed):
        if line["event"] == "half":
            killed.kill()
            break
    killed.wait()
    for name in ("killed", "whole"):
        process = started(folder, name, *arguments)
        list(lines_of(process))
        if process.wait():
            return 1
    drawn = {name: prompts_of(folder / f"{name}.jsonl") for name in ("killed", "whole")}
    print(f"prompts of the killed and of the other run: {len(drawn['killed'])}, {len(drawn['whole'])}")
    peak = max(json.loads((folder / f"{name}.json").read_text())["peakBytes"] for name in ("killed", "whole"))
    found = {
        "the run that was killed has drawn the same prompts": drawn["killed"] == drawn["whole"],
        f"no process needed more than 2 GiB: {peak / 2**30:.2f} GiB": peak < MAX_BYTES,
    }
    for text, holds in found.items():
        print(f"{'holds' if holds else 'WRONG'}: {text}")
    return 0 if all(found.values()) else 1


def write_data(folder: Path, num_files: int, num_rows: int, rows_per_group: int) -> None:
    """Writes the files that are missing: prompts of 100 to 400 characters, an answer, and three other columns."""
    (folder / "data").mkdir(parents=True, exist_ok=True)
    letters = np.random.default_rng(0)
    words = pyarrow.array(
        [
            "".join(letters.choice(list("abcdefghijklmnopqrstuvwxyz"), size=int(n)))
            for n in letters.integers(2, 10, 5000)
        ]
    )
    for file in range(num_files):
        path = folder / "data" / f"part-{file:03d}.parquet"
        if path.exists():
            continue
        tables = (
            table(words, first, min(PART, num_rows)) for first in range(file * num_rows, (file + 1) * num_rows, PART)
        )
        new = path.with_suffix(".new")
        writer: pyarrow.parquet.ParquetWriter | None = None
        for each in tables:
            writer = writer or pyarrow.parquet.ParquetWriter(new, each.schema)
            writer.write_table(each, row_group_size=rows_per_group)
        assert writer is not None
        writer.close()
        new.rename(path)


def table(words: pyarrow.Array, first: int, num_rows: int) -> pyarrow.Table:
    """Rows with the numbers from `first` on."""
    generator = np.random.default_rng([7, first])

    def texts(low: int, high: int) -> pyarrow.Array:
        lengths = generator.integers(low, high, num_rows)
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        chosen = (generator.random(int(offsets[-1])) ** 3 * len(words)).astype(np.int32)
        lists = pyarrow.ListArray.from_arrays(pyarrow.array(offsets), words.take(pyarrow.array(chosen)))
        return pyarrow.compute.binary_join(lists, " ")

    numbers = np.arange(first, first + num_rows)
    titles = pyarrow.compute.binary_join_element_wise("Problem", pyarrow.array(numbers).cast(pyarrow.string()), " ")
    return pyarrow.table(
        {
            "id": numbers,
            "prompt": pyarrow.compute.binary_join_element_wise(titles, texts(16, 64), ": "),
            "answer": pyarrow.array(generator.integers(0, 10**6, num_rows)).cast(pyarrow.string()),
            "source": generator.choice(["a", "b", "c"], num_rows),
            "solution": texts(40, 120),
            "difficulty": generator.random(num_rows),
        }
    )


def write_tokenizer(folder: Path) -> None:
    """Trains a tokenizer of 16,000 tokens on the first prompts, unless it exists."""
    target = folder / "model"
    if (target / "tokenizer.json").exists():
        return
    tokenizer = RustTokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    file = pyarrow.parquet.ParquetFile(folder / "data" / "part-000.parquet")
    batch = next(file.iter_batches(batch_size=20_000, columns=["prompt"]))
    trainer = trainers.BpeTrainer(vocab_size=16_000, special_tokens=["<eos>"], show_progress=False)
    tokenizer.train_from_iterator(batch.column(0).to_pylist(), trainer)
    target.mkdir()
    tokenizer.save(str(target / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>"}
    (target / "tokenizer_config.json").write_text(json.dumps(settings))


def started(folder: Path, name: str, *arguments: str) -> subprocess.Popen[str]:
    """Starts this program as a run."""
    command = [sys.executable, __file__, "--folder", str(folder), "--run", name, *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def lines_of(process: subprocess.Popen[str]) -> Iterator[dict[str, object]]:
    """Prints and yields the events of a run."""
    assert process.stdout is not None
    for line in process.stdout:
        print(line, end="", flush=True)
        yield json.loads(line)


def prompts_of(path: Path) -> dict[int, str]:
    """The drawn prompts: ordinal and digest. A row that was drawn again after a kill must have the same digest."""
    found: dict[int, str] = {}
    for line in path.read_text().splitlines():
        for ordinal, digest in json.loads(line).items():
            assert found.setdefault(int(ordinal), digest) == digest, f"row {ordinal} was drawn differently"
    return found


def draw(folder: Path, name: str, *, is_filtered: bool) -> None:
    """One run: filters, then draws to the end, from the saved position if there is one."""
    began = time.perf_counter()
    dataset = Dataset.from_wire(
        {"type": "File", "file": {"path": "data"}, "maxPromptTokens": 256, "overlongPrompt": "Drop"}
    )
    files = ParquetFiles(sorted((folder / "data").glob("*.parquet")))
    settings = FilterPass(
        files.paths,
        dataset,
        WHERE,
        folder / "model",
        HeldOut(),
        finds_duplicates=True,
        answers_needed_by="MathAnswer",
        why_unusable=why_unusable,
    )
    if is_filtered:
        index = opened_or_built(files, settings, folder / "index", tell_progress)
    else:
        index = all_rows(files, folder / "all-rows.npy")
    tell("filtered", began, report=json.loads(index.state.report.model_dump_json()))
    kill_at = int(KILL_FRACTION * len(index.numbers))
    saved = folder / f"{name}.json"
    first = drawn_as_numbers(index, kill_at) if not saved.exists() else None
    rows = IndexedRows(index, PromptMaker(dataset, Tokenizer(folder / "model"), WHERE))
    cursor = PromptCursor(rows, seed=3, shuffle=True, digest=index.state.key)
    tell("order", began)
    cursor.restore(first or CursorState.from_wire(json.loads(saved.read_text())["cursor"]))
    end = kill_at + NUM_BATCHES * sum(BATCH_SIZES)
    sizes = [size for size in BATCH_SIZES for _ in range(NUM_BATCHES)]
    for size in sizes if cursor.state().ordinal < kill_at else []:
        draw_batch(cursor, size, folder / f"{name}.jsonl", saved)
    tell("half", began, ordinal=cursor.state().ordinal)
    while cursor.state().ordinal < end:
        draw_batch(cursor, min(BATCH_SIZES[-1], end - cursor.state().ordinal), folder / f"{name}.jsonl", saved)
    tell("end", began, ordinal=cursor.state().ordinal)


def all_rows(files: ParquetFiles, path: Path) -> RowIndex:
    """An index that keeps all rows, in a file that is mapped into memory as that of `row_index`."""
    if not path.exists():
        np.save(path, np.arange(files.num_rows, dtype=np.uint32))
    report = FilterReport(dataset=WHERE, num_rows=files.num_rows, num_kept=files.num_rows)
    state = IndexState(key=files.digest(), report=report, longest=0, largest_token=0)
    return RowIndex(files, np.load(path, mmap_mode="r"), state)


def drawn_as_numbers(index: RowIndex, kill_at: int) -> CursorState:
    """Draws the beginning of the stream as row numbers, and returns the position. The same rows are drawn as prompts
    for the last batches before the kill."""
    numbers = PromptCursor(range(len(index.numbers)), seed=3, shuffle=True, digest=index.state.key)
    digest = hashlib.sha256()
    while (left := kill_at - NUM_BATCHES * sum(BATCH_SIZES) - numbers.state().ordinal) > 0:
        batch = numbers.next_batch(min(PART, left))
        digest.update(index.numbers[[each.row for each in batch]].tobytes())
    tell("numbers", time.perf_counter(), ordinal=numbers.state().ordinal, digest=digest.hexdigest()[:12])
    return numbers.state()


def draw_batch(cursor: PromptCursor[PromptRow], size: int, log: Path, saved: Path) -> None:
    """Draws a batch, which was not read in advance, and saves the position."""
    began = time.perf_counter()
    batch = cursor.next_batch(size)
    seconds = time.perf_counter() - began
    digests = {
        str(each.ordinal): hashlib.sha256(repr((each.row.token_ids, each.row.answer)).encode()).hexdigest()[:16]
        for each in batch
    }
    with log.open("a") as file:
        file.write(json.dumps(digests) + "\n")
    state = json.loads(cursor.state().model_dump_json(by_alias=True))
    saved.with_suffix(".new").write_text(json.dumps({"cursor": state, "peakBytes": peak_bytes()}))
    saved.with_suffix(".new").rename(saved)
    print(json.dumps({"event": "batch", "size": size, "seconds": round(seconds, 2)}), flush=True)


def peak_bytes() -> int:
    """Peak of the resident memory of this process. The maximum of getrusage would include that of the process that
    started this one."""
    [line] = [each for each in Path("/proc/self/status").read_text().splitlines() if each.startswith("VmHWM:")]
    return int(line.split()[1]) * 1024


def tell(event: str, began: float, **values: object) -> None:
    """Prints an event with time and memory."""
    seconds = round(time.perf_counter() - began, 1)
    print(json.dumps({"event": event, "seconds": seconds, "peakMiB": peak_bytes() >> 20, **values}), flush=True)


_LAST = [0.0]


def tell_progress(text: str) -> None:
    """Prints the progress of the filters, at most every 20 seconds."""
    if time.perf_counter() - _LAST[0] > 20:
        _LAST[0] = time.perf_counter()
        print(json.dumps({"event": text, "peakMiB": peak_bytes() >> 20}), flush=True)


if __name__ == "__main__":
    sys.exit(main())
