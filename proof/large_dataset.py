"""Shows that a run draws prompts from 20 million rows with little memory, and continues exactly after SIGKILL.

    python proof/large_dataset.py [--folder FOLDER] [--files 20] [--rows-per-file 1000000] [--rows-per-group 10000]

Writes Parquet files (about 210 MB for a million rows) and a tokenizer, unless the folder has them. No model is trained.

1. A process filters the rows (too long, duplicates, answers) and is killed after a fifth of them. It must leave no
   index.
2. A second process filters all rows, and draws the stream up to row 7 million (of 20 million). It draws most rows only
   as row numbers; it reads and tokenizes the last batches. Then it is killed.
3. A third process resumes at the last saved position of the second one; the filters do not run again. A fourth process
   draws the same rows without being killed.

The exit code is 1 if the prompts differ, if the filters drop other rows than the data was made for, or if a process
needs more than 2 GiB. With `--measure-reads`, prints only the time of one core per prompt that is read.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import random
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
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
from rljob_trainer.datasets.indexed_rows import MAX_ROWS_AHEAD, IndexedRows
from rljob_trainer.datasets.parquet_files import ParquetFiles
from rljob_trainer.datasets.prompts import PromptMaker, PromptRow
from rljob_trainer.datasets.row_index import IndexState, RowIndex, opened_or_built
from rljob_trainer.models.tokenizer import Tokenizer
from rljob_trainer.rewards.answer_values import why_unusable

WHERE = "spec.training.dataset"
MAX_MIB = 2048
BATCH_SIZES = (64, 256, 512)
NUM_BATCHES = 4
"""Batches of each size that are drawn before the kill, and again after it."""
KILL_FRACTION = 0.35
"""The kill is after this fraction of the first epoch: at row 7 million of 20 million."""
PART = 100_000
NUM_ROWS, MIN_READ = 20_000_000, 40
VOCABULARY = 16_000
NUM_WORDS, NUM_COMMON = 5000, 10_000
"""Number of different words of the data, and number of prompts that are repeated in all files."""


def main() -> int:
    """Runs the program. The exit code is 1 if something does not hold."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=REPOSITORY / "runs" / "proof" / "large_dataset")
    parser.add_argument("--files", type=int, default=20)
    parser.add_argument("--rows-per-file", type=int, default=1_000_000)
    parser.add_argument("--rows-per-group", type=int, default=10_000)
    parser.add_argument("--measure-reads", action="store_true", help="only measure how long reading prompts takes")
    parser.add_argument("--run", metavar="NAME", help="used by the program itself: run as this process")
    options = parser.parse_args()
    folder = options.folder.resolve()
    if options.run:
        draw(folder, options.run)
        return 0
    write_data(folder, options.files, options.rows_per_file, options.rows_per_group)
    write_model(folder)
    if options.measure_reads:
        measure_reads(folder)
        return 0
    for name in ("killed", "whole"):
        (folder / f"{name}.jsonl").unlink(missing_ok=True)
        (folder / f"{name}.json").unlink(missing_ok=True)
    shutil.rmtree(folder / "index", ignore_errors=True)
    num_rows = options.files * options.rows_per_file
    events = killed_at(folder, lambda event: int(str(event.get("numDone", 0))) > num_rows / 5)
    has_index = (folder / "index").exists()
    events += killed_at(folder, lambda event: event["event"] == "half")
    for name in ("killed", "whole"):
        process = started(folder, name)
        events += lines_of(process)
        if process.wait():
            return 1
    drawn = {name: prompts_of(folder / f"{name}.jsonl") for name in ("killed", "whole")}
    print(f"prompts of the killed and of the other run: {len(drawn['killed'])}, {len(drawn['whole'])}")
    peak, filter_peak = (
        max(int(str(event.get(name, 0))) for event in events) for name in ("peakMiB", "peakOfFilterProcessMiB")
    )
    dropped = json.loads((folder / "index" / "index.json").read_text())["report"]["dropped"]
    counts = {each["filter"]: each["numRows"] for each in dropped}
    found = {
        "the process that was killed while it filtered has left no index": not has_index,
        f"the filters have dropped the right numbers of rows: {counts}": counts == expected_drops(num_rows),
        "the run that was killed has drawn the same prompts": drawn["killed"] == drawn["whole"],
        f"no controller needed more than 2 GiB: {peak / 1024:.2f} GiB": peak < MAX_MIB,
        f"no filter process needed more than 2 GiB: {filter_peak / 1024:.2f} GiB": filter_peak < MAX_MIB,
    }
    for text, holds in found.items():
        print(f"{'holds' if holds else 'WRONG'}: {text}")
    return 0 if all(found.values()) else 1


def expected_drops(num_rows: int) -> dict[str, int]:
    """The numbers of rows that the filters must drop, because `write_data` has made them so."""
    num_hundreds = num_rows // 100
    return {"overlongPrompt": num_rows // 1000, "duplicates": 2 * num_hundreds - min(num_hundreds, NUM_COMMON)}


def killed_at(folder: Path, is_end: Callable[[dict[str, object]], bool]) -> list[dict[str, object]]:
    """Starts a run and kills it (SIGKILL) at an event. Returns the events."""
    process = started(folder, "killed")
    events: list[dict[str, object]] = []
    for event in lines_of(process):
        events.append(event)
        if is_end(event):
            process.kill()
            break
    process.wait()
    return events


def write_data(folder: Path, num_files: int, num_rows: int, rows_per_group: int) -> None:
    """Writes the files that are missing. Each row has a prompt of 100 to 430 characters, an answer, and four other
    columns. In each thousand rows the prompt of row 24 is too long. In each hundred, row 49 has one of NUM_COMMON
    prompts, and row 99 has the prompt of the row before, with another white space."""
    assert num_rows % PART == 0, f"--rows-per-file must be a multiple of {PART}"
    (folder / "data").mkdir(parents=True, exist_ok=True)
    texts: Texts | None = None
    for file in range(num_files):
        path = folder / "data" / f"part-{file:03d}.parquet"
        if path.exists():
            continue
        texts = texts or random_texts()
        new = path.with_suffix(".new")
        writer: pyarrow.parquet.ParquetWriter | None = None
        for first in range(file * num_rows, (file + 1) * num_rows, PART):
            part = table(texts, first)
            repeated = ["source", "solution"]
            writer = writer or pyarrow.parquet.ParquetWriter(new, part.schema, use_dictionary=repeated)
            writer.write_table(part, row_group_size=rows_per_group)
        assert writer is not None
        writer.close()
        new.rename(path)


@dataclass(frozen=True)
class Texts:
    """Random texts of a part of the rows. All parts have the same texts, after titles with the number of the row."""

    prompts: pyarrow.Array
    long_prompts: pyarrow.Array
    solutions: pyarrow.Array


def random_texts() -> Texts:
    """Draws words with different frequencies."""
    generator = np.random.default_rng(0)
    letters = list("abcdefghijklmnopqrstuvwxyz")
    words = pyarrow.array(
        ["".join(generator.choice(letters, size=int(n))) for n in generator.integers(2, 10, NUM_WORDS)]
    )

    def texts(low: int, high: int, num_rows: int) -> pyarrow.Array:
        lengths = generator.integers(low, high, num_rows)
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        chosen = (generator.random(int(offsets[-1])) ** 3 * len(words)).astype(np.int32)
        lists = pyarrow.ListArray.from_arrays(pyarrow.array(offsets), words.take(pyarrow.array(chosen)))
        return pyarrow.compute.binary_join(lists, " ")

    return Texts(texts(14, 62, PART), texts(600, 800, PART // 1000), texts(30, 90, PART // 100))


def table(texts: Texts, first: int) -> pyarrow.Table:
    """The rows with the numbers from `first` on."""
    numbers = np.arange(first, first + PART)
    titles = pyarrow.compute.binary_join_element_wise("Problem", pyarrow.array(numbers).cast(pyarrow.string()), " ")
    prompts = pyarrow.compute.binary_join_element_wise(titles, texts.prompts, ": ").to_numpy(zero_copy_only=False)
    prompts[24::1000] = texts.long_prompts.to_numpy(zero_copy_only=False)
    prompts[49::100] = [
        f"Common problem number {number // 100 % NUM_COMMON} of the data" for number in numbers[49::100]
    ]
    prompts[99::100] = [f"  {prompt}" for prompt in prompts[98::100]]
    return pyarrow.table(
        {
            "id": numbers,
            "prompt": pyarrow.array(prompts, pyarrow.string()),
            "answer": pyarrow.array(numbers * 7919 % 1_000_003).cast(pyarrow.string()),
            "source": np.array(["a", "b", "c"])[numbers % 3],
            "solution": texts.solutions.take(pyarrow.array(numbers % len(texts.solutions))),
            "difficulty": numbers % 1000 / 1000,
        }
    )


def write_model(folder: Path) -> None:
    """Trains a tokenizer of 16,000 tokens on the first prompts, unless it exists. The model has no weights."""
    target = folder / "model"
    if (target / "tokenizer.json").exists():
        return
    tokenizer = RustTokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    file = pyarrow.parquet.ParquetFile(folder / "data" / "part-000.parquet")
    batch = next(file.iter_batches(batch_size=20_000, columns=["prompt"]))
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(batch.column(0).to_pylist(), trainer)
    target.mkdir()
    tokenizer.save(str(target / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>"}
    (target / "tokenizer_config.json").write_text(json.dumps(settings))
    (target / "config.json").write_text(json.dumps({"vocab_size": VOCABULARY}))


def started(folder: Path, name: str) -> subprocess.Popen[str]:
    """Starts this program as a run."""
    command = [sys.executable, __file__, "--folder", str(folder), "--run", name]
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


def draw(folder: Path, name: str) -> None:
    """One run: filters, then draws to the end, from the saved position if there is one."""
    began = time.perf_counter()
    dataset, index = filtered_rows(folder)
    tell("filtered", began, report=json.loads(index.state.report.model_dump_json()), coreSeconds=core_seconds())
    kill_at = int(KILL_FRACTION * len(index.numbers))
    saved = folder / f"{name}.json"
    first = drawn_as_numbers(index, kill_at) if not saved.exists() else None
    rows = indexed_rows(folder, dataset, index)
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


def dataset_and_files(folder: Path) -> tuple[Dataset, ParquetFiles]:
    """The block of a job, and its files."""
    dataset = Dataset.from_wire(
        {"type": "File", "file": {"path": "data"}, "maxPromptTokens": 512, "overlongPrompt": "Drop"}
    )
    return dataset, ParquetFiles(sorted((folder / "data").glob("*.parquet")))


def filtered_rows(folder: Path) -> tuple[Dataset, RowIndex]:
    """Runs the filters, or reads the index that they have left."""
    dataset, files = dataset_and_files(folder)
    settings = FilterPass(
        files.paths,
        dataset,
        WHERE,
        folder / "model",
        HeldOut.of(["A prompt of an evaluation"]),
        finds_duplicates=True,
        answers_needed_by="MathAnswer",
        why_unusable=why_unusable,
    )
    return dataset, opened_or_built(files, settings, folder / "index", tell_progress)


def indexed_rows(folder: Path, dataset: Dataset, index: RowIndex) -> IndexedRows:
    """The prompts with the columns of a job whose rewards do not need the others."""
    return IndexedRows(index, PromptMaker(dataset, Tokenizer(folder / "model"), WHERE), ["prompt", "answer"])


def measure_reads(folder: Path) -> None:
    """Prints the time of one core per prompt, by the number of prompts that are read together from 20 million rows. If
    the data has fewer rows, proportionally fewer prompts are read, so that as many prompts are in the same row group.
    """
    dataset, files = dataset_and_files(folder)
    report = FilterReport(dataset=WHERE, num_rows=files.num_rows, num_kept=files.num_rows)
    state = IndexState(key="", report=report, longest=0, largest_token=0)
    index = RowIndex(files, np.arange(files.num_rows, dtype=np.uint32), state)
    generator = random.Random(5)
    for num_rows in (1, 64, 512, MAX_ROWS_AHEAD):
        seconds, num_read = 0.0, 0
        while num_read < MIN_READ:
            rows = indexed_rows(folder, dataset, index)
            chosen = generator.sample(range(len(rows)), max(1, num_rows * len(rows) // NUM_ROWS))
            began = time.process_time()
            rows.read(chosen)
            seconds, num_read = seconds + time.process_time() - began, num_read + len(chosen)
        print(json.dumps({"promptsTogether": num_rows, "coreMilliseconds": round(seconds / num_read * 1000, 2)}))


def drawn_as_numbers(index: RowIndex, kill_at: int) -> CursorState:
    """Draws the beginning of the stream as row numbers, up to the batches that are drawn as prompts before the kill.
    Returns the position."""
    numbers = PromptCursor(range(len(index.numbers)), seed=3, shuffle=True, digest=index.state.key)
    digest = hashlib.sha256()
    while (left := kill_at - NUM_BATCHES * sum(BATCH_SIZES) - numbers.state().ordinal) > 0:
        batch = numbers.next_batch(min(PART, left))
        digest.update(index.numbers[[each.row for each in batch]].tobytes())
    tell("numbers", time.perf_counter(), ordinal=numbers.state().ordinal, digest=digest.hexdigest()[:12])
    return numbers.state()


def draw_batch(cursor: PromptCursor[PromptRow], size: int, log: Path, saved: Path) -> None:
    """Draws a batch, and saves the position."""
    began = time.perf_counter()
    batch = cursor.next_batch(size)
    tell("batch", began, size=size)
    digests = {
        str(each.ordinal): hashlib.sha256(repr((each.row.token_ids, each.row.answer)).encode()).hexdigest()[:16]
        for each in batch
    }
    with log.open("a") as file:
        file.write(json.dumps(digests) + "\n")
    state = json.loads(cursor.state().model_dump_json(by_alias=True))
    saved.with_suffix(".new").write_text(json.dumps({"cursor": state}))
    saved.with_suffix(".new").rename(saved)


def peak_mib(process: int | str = "self") -> int:
    """Peak of the resident memory of a process. The maximum of getrusage would include that of the process that started
    it."""
    [line] = [each for each in Path(f"/proc/{process}/status").read_text().splitlines() if each.startswith("VmHWM:")]
    return int(line.split()[1]) // 1024


def core_seconds() -> float:
    """Time of one core that this process and its ended children have used, in seconds."""
    return round(sum(os.times()[:4]), 1)


def tell(event: str, began: float, **values: object) -> None:
    """Prints an event with time and memory."""
    seconds = round(time.perf_counter() - began, 2)
    print(json.dumps({"event": event, "seconds": seconds, "peakMiB": peak_mib(), **values}), flush=True)


_LAST, _BEGAN = [0], time.perf_counter()


def tell_progress(text: str) -> None:
    """Prints the progress of the filters after every half million rows."""
    found = re.search(r"(\d+) of \d+ done", text)
    assert found is not None, text
    if int(found[1]) >= _LAST[0] + 500_000:
        _LAST[0] = int(found[1])
        peaks = [peak_mib(each.pid) for each in multiprocessing.active_children() if each.pid]
        tell("filters", _BEGAN, numDone=_LAST[0], peakOfFilterProcessMiB=max(peaks, default=0))


if __name__ == "__main__":
    sys.exit(main())
