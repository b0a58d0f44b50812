"""The page of a run with damaged files, odd values or too much content."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from rljob_cli.local.view import ViewOptions, write_view
from rljob_page.conversations import sample_entries
from rljob_page.page import PageOptions, write_page
from rljob_page.page_data import Difference, OtherRun
from rljob_page.run_files import MAX_SAMPLES, Json, read_files, read_metrics
from rljob_page.small_page import MAX_PAGE_BYTES, script_json
from rljob_testing.cli.run_folders import (
    RunRecord,
    conversation,
    document_of,
    metrics_lines,
    sample,
    samples_of,
    timeline,
    write_lines,
)


def test_a_half_written_last_line_is_not_an_error_and_damaged_extras_are_named(tmp_path: Path) -> None:
    folder = RunRecord(samples=samples_of(4, 30), timelines={"step-000003": timeline()}).write(tmp_path / "run")
    for name in ("metrics.jsonl", "samples.jsonl"):
        with (folder / name).open("a") as file:
            file.write('{"step": 31, "cri')
    assert write_page(read_files(folder)).omitted == ()
    samples = (folder / "samples.jsonl").read_text()
    (folder / "samples.jsonl").write_text('damaged\n["no sample"]\n' + samples)
    (folder / "timelines" / "step-000004.json").write_text("[")
    (folder / "tokens" / "training.json").write_text('{"step": 3, "conversations": [{"tokens": {"text": ["a"]}}]}')
    (folder / "attempts.jsonl").write_bytes(b"\0\xff")
    omitted = "\n".join(write_page(read_files(folder)).omitted)
    assert "attempts.jsonl is damaged" in omitted
    assert "2 damaged lines of samples.jsonl" in omitted
    assert "timelines/step-000004.json is left out" in omitted
    assert "1 damaged conversations of tokens/training.json" in omitted
    assert len(document_of(folder / "view.html")["samples"]) == 4  # type: ignore[arg-type]


def test_the_newest_samples_are_shown_and_a_note_says_if_there_are_more(tmp_path: Path) -> None:
    folder = RunRecord().write(tmp_path / "run")
    few = [{"step": step} for step in range(MAX_SAMPLES + 1)]
    for samples, num_shown, note in (
        (few[:-1], MAX_SAMPLES, ""),
        (few, MAX_SAMPLES, "only the newest samples are shown; older ones are in samples.jsonl"),
        (
            [{"step": 1}, {"step": 2, "response": "x" * 9 * 2**20}],
            0,
            "the last line of samples.jsonl has more than 8 MiB",
        ),
    ):
        write_lines(folder / "samples.jsonl", samples)
        files = read_files(folder)
        assert len(files.samples) == num_shown
        assert note in "".join(files.notes)
        assert len(files.notes) == bool(note)


def test_a_page_that_would_be_too_large_says_what_was_left_out(tmp_path: Path) -> None:
    samples = samples_of(300, 30, response="long " * 5000 + "{}")
    folder = RunRecord(num_steps=600, total_steps=600, samples=samples).write(tmp_path / "run")
    page = write_page(read_files(folder))
    assert page.num_bytes <= MAX_PAGE_BYTES
    oldest, curves, texts = page.omitted
    assert "the 44 oldest samples, those before step" in oldest
    assert "points of the curves" in curves
    assert "parts of 256 texts of samples that have more than 4,000 characters" in texts
    data = document_of(page.path)
    assert data["omitted"] == list(page.omitted)
    assert len(data["curves"]["critic/rewards/mean"]["index"]) <= 200  # type: ignore[call-overload, index]


def test_a_page_stays_small_whatever_a_run_wrote(tmp_path: Path) -> None:
    samples = [sample(30, f"prompt {index}", "x" * 300_000, 0.0, found={"a": "y" * 300_000}) for index in range(20)]
    long = conversation(["prompt"], ["tok" * 20] * 1000)
    record = RunRecord(samples=samples, tokens={"training": {"step": 30, "conversations": [long] * 32}})
    page = write_page(read_files(record.write(tmp_path / "run")), max_bytes=2**20)
    assert page.num_bytes <= 2**20
    assert page.omitted[-1].endswith("the conversations with tokens; they are in the folder tokens/")


def test_a_long_name_and_many_damaged_files_do_not_make_a_page_large(tmp_path: Path) -> None:
    tokens: dict[str, Json] = {f"damaged-{number}": {"conversations": [None]} for number in range(100)}
    folder = RunRecord(name="n" * 6_000_000, tokens=tokens | {"training": {}}).write(tmp_path / "run")
    (folder / "job.yaml").unlink()
    page = write_page(read_files(folder))
    assert page.num_bytes < 2**20
    assert page.omitted == ("1 damaged conversations of tokens/training.json are left out",)


def test_the_newest_timelines_of_the_trainer_are_shown_and_a_note_says_if_there_are_more(tmp_path: Path) -> None:
    names = [*(f"step-00000{step}" for step in range(1, 6)), "newest"]
    others = ["step-\x1b[31m9", "other"]
    files = read_files(RunRecord(timelines=dict.fromkeys(names + others, timeline())).write(tmp_path / "run"))
    assert [*files.timelines] == names[2:]
    assert files.notes == ("only the newest 4 timelines are shown; all are in timelines/",)


def test_text_in_the_document_cannot_end_its_script() -> None:
    text = "</script><!--<script>&\u2028\ud800\x00"
    assert "<" not in script_json([text])
    assert script_json([text]).isprintable()
    assert json.loads(script_json([text])) == [text]


def test_a_value_that_is_nested_too_deeply_is_named() -> None:
    value: list[object] = []
    for _ in range(100_000):
        value = [value]
    [entry] = sample_entries([{"step": 1, "response": value}])
    assert entry["response"] == "(nested too deeply)"


def test_a_timeline_without_duration_is_left_out(tmp_path: Path) -> None:
    process = {"ph": "M", "pid": 1, "name": "process_name", "args": {"name": "controller"}}
    document: Json = {"traceEvents": [process, {"ph": "X", "pid": 1, "tid": 1, "name": "a", "ts": 0, "dur": 0}]}
    write_page(read_files(RunRecord(timelines={"newest": document}).write(tmp_path / "run")))
    assert document_of(tmp_path / "run" / "view.html")["timelines"] == {}


@pytest.mark.parametrize(
    "event",
    [
        {"ph": "M", "name": "process_name", "pid": [1], "args": {"name": "x"}},
        {"ph": "X", "name": "a", "pid": 1, "tid": {}, "ts": 1, "dur": 1},
        {"ph": "X", "name": "a", "pid": 1, "tid": 1, "ts": math.inf, "dur": 1},
        {"ph": "C", "name": "memory (MiB)", "pid": 1, "ts": math.nan, "args": {"a": 1}},
        {"ph": "C", "name": "memory (MiB)", "pid": 1, "ts": 10**400, "args": {"a": 10**400}},
    ],
)
def test_damaged_events_of_a_timeline_are_skipped(event: Json, tmp_path: Path) -> None:
    document = timeline()
    events = document["traceEvents"]
    assert isinstance(events, list)
    events.append(event)
    page = write_page(read_files(RunRecord(timelines={"newest": document}).write(tmp_path / "run")))
    assert page.omitted == ()


def test_values_whose_sum_is_infinite_count_as_not_finite(tmp_path: Path) -> None:
    document = timeline()
    events = document["traceEvents"]
    assert isinstance(events, list)
    events += [{"ph": "X", "name": "idle: scores", "pid": 1, "tid": 0, "ts": 0, "dur": 1.7e308}] * 2000
    folder = RunRecord(timelines={"newest": document}).write(tmp_path / "run")
    names = ("critic/rewards/mean", "response_length/mean", "timing_s/generate", "timing_s/step")
    rows = [row | dict.fromkeys(names, -1.7e308) for row in metrics_lines(30)]
    write_lines(folder / "metrics.jsonl", rows)
    page = write_view(ViewOptions(folder))
    data = document_of(page.path)
    assert data["timelines"]["newest"]["processes"][1]["idle"] == {"scores": 30}  # type: ignore[call-overload, index]
    assert data["curves"]["critic/rewards/mean"]["data"] == [None] * 31  # type: ignore[call-overload, index]
    assert "not finite: critic/rewards/mean since step 0" in page.path.read_text()
    assert read_metrics(folder / "metrics.jsonl")[1].keys().isdisjoint(names)


def test_integers_too_large_for_float_are_ignored(tmp_path: Path) -> None:
    huge = "1" + "0" * 400
    token = {name: [None] for name in ("isTrained", "isSampled", "trainerLogprob", "age")}
    chat = {"tokens": {"text": ["a"], "advantage": [10**400], "rolloutLogprob": [math.inf], **token}}
    tokens: Json = {"step": math.nan, "conversations": [chat]}
    record = RunRecord(tokens={"training": tokens}, samples=[sample(10**400, "a", "b", 0.5), sample(30, "a", "b", 0.5)])
    folder = record.write(tmp_path / "run")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(f'{{"step": 31, "critic/rewards/mean": {huge}, "timing_s/step": {huge}}}\n')
        file.write(f'{{"step": {huge}, "a": 1}}\n')
    write_page(read_files(folder))
    data = document_of(folder / "view.html")
    assert data["curves"]["critic/rewards/mean"]["index"][-1] == 30  # type: ignore[call-overload, index]
    assert data["conversations"]["training"]["step"] is None  # type: ignore[call-overload, index]
    assert len(data["samples"]) == 1  # type: ignore[arg-type]


@pytest.mark.parametrize("num_letters", [13_000, 17_000])
def test_a_job_and_a_comparison_count_for_the_size_of_a_page(num_letters: int, tmp_path: Path) -> None:
    quotes = 'metadata: {annotations: {example.com/x: "' + "<&>'" * 50_000 + '"}, '
    job = RunRecord().job.replace("metadata: {", quotes, 1)
    assert job != RunRecord().job
    record = RunRecord(job=job, samples=samples_of(250, 30, response="y" * num_letters))
    files = read_files(record.write(tmp_path / "run"))
    other = OtherRun(files, (Difference("spec", "<" * 100_000, "&" * 100_000),))
    page = write_page(files, PageOptions(other=other))
    assert page.num_bytes <= MAX_PAGE_BYTES
    assert page.omitted
