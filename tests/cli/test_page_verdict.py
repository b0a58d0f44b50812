"""The verdict and the curves of the page of a run."""

from __future__ import annotations

import json
import math
import tracemalloc
from datetime import timedelta
from pathlib import Path
from statistics import fmean

import pytest

from rljob_api.conditions import Reason
from rljob_api.explanations import EXPLANATIONS
from rljob_page.curves import MAX_METRICS, charts_of, curves_of, held_out_scores, moving_average, phase_seconds, thinned
from rljob_page.page import write_page
from rljob_page.page_data import page_content
from rljob_page.run_files import read_files
from rljob_page.verdict import Verdict
from rljob_testing.cli.run_folders import (
    WRITTEN_AT,
    RunRecord,
    metrics_lines,
    write_lines,
)

RUNNING = {"phase": "Running", "exit_code": None, "num_steps": 12}
CUT_OFF = {
    "reason": "ResponsesCutOff",
    "value": 0.9,
    "message": "90 % of the responses were truncated at the token limit (usual: below 50 %); increase the limit",
    "sinceStep": 3,
    "step": 12,
}


def verdict(folder: Path, minutes_later: float = 0) -> Verdict:
    """The verdict some minutes after the trainer's last state."""
    return page_content(read_files(folder), now=WRITTEN_AT + timedelta(minutes=minutes_later)).verdict


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        (RunRecord(), "Complete at step 30 of 30: held-out score 0.2 → 0.9"),
        (RunRecord(**RUNNING), "Running at step 12 of 30: held-out score 0.2 → 0.783"),
        (RunRecord(phase="Starting", exit_code=None, num_steps=0), "Starting at step 0 of 30: held-out score 0.2"),
        (RunRecord(**RUNNING, alarms=[CUT_OFF]), "Running with 1 alarm at step 12 of 30: 90 % of the responses were"),
        (RunRecord(alarms=[CUT_OFF, CUT_OFF]), "Complete with 2 alarms at step 30 of 30: 90 % of the responses were"),
        (RunRecord(phase="Stopped", exit_code=130, num_steps=12), "Stopped on request at step 12 of 30"),
        (
            RunRecord(
                phase="Failed", exit_code=75, num_steps=4, error={"kind": "WorkerDiedError", "message": "rank 0"}
            ),
            "Failed at step 4 of 30: Worker died error",
        ),
        (
            RunRecord(phase="Failed", num_steps=4, exit_code=None),
            "Failed at step 4 of 30: the trainer reported no error",
        ),
        (RunRecord(phase="Running", exit_code=137, num_steps=4), "Failed at step 4 of 30: the trainer was killed"),
    ],
)
def test_the_verdict_names_the_state_and_its_number(record: RunRecord, expected: str, tmp_path: Path) -> None:
    assert verdict(record.write(tmp_path / "run")).title.startswith(expected)


def test_a_run_that_writes_nothing_for_long_makes_no_progress(tmp_path: Path) -> None:
    folder = RunRecord(**RUNNING).write(tmp_path / "run")
    assert verdict(folder, minutes_later=4).title.startswith("Running at step 12")
    silent = verdict(folder, minutes_later=6)
    assert (silent.title, silent.is_active) == ("No progress at step 12 of 30: silent for 6 min", True)
    (folder / ".lock").write_text("99999999\n")
    ended = verdict(folder, minutes_later=6)
    assert ("its process ended" in ended.title, ended.is_active) == (True, False)


def test_thinned_curves_keep_the_smallest_and_the_largest_value() -> None:
    values = [float(index % 7) for index in range(10_000)]
    values[1234], values[5678] = 1000.0, -1000.0
    steps, kept = thinned((list(range(10_000)), values), 800)
    assert len(steps) <= 800
    assert {1000.0, -1000.0} <= set(kept)
    assert steps == sorted(steps)
    assert [steps[0], steps[-1]] == [0, 9999]
    assert [values[step] for step in steps] == kept


def test_averages_and_phases_are_those_of_the_steps() -> None:
    assert moving_average(([1, 2, 3, 4], [1.0, 3.0, 5.0, 7.0]), 2) == ([1, 2, 3, 4], [1.0, 2.0, 4.0, 6.0])
    values = [float(index) for index in range(25)]
    means = [fmean(values[max(0, index - 9) : index + 1]) for index in range(25)]
    assert moving_average((range(25), values), 10)[1] == pytest.approx(means)
    assert moving_average((range(40), [0.5] * 10 + [1e17] + [0.75] * 29), 10)[1][20:] == [0.75] * 20
    lines = [{"step": step, "timing_s/step": 1.0, "timing_s/generate": 0.25 * step} for step in (1, 2, 3)]
    phases = phase_seconds(curves_of(lines), max_steps=2)
    assert phases is not None
    assert phases.steps == [2, 3]
    assert phases.seconds == {"generation": [0.375, 0.75], "other": [0.625, 0.25]}


def test_a_metric_that_is_no_longer_finite_is_an_alarm_with_its_first_step(tmp_path: Path) -> None:
    folder = RunRecord(**RUNNING).write(tmp_path / "run")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        if line["step"] in (3, *range(10, 13)) and "critic/rewards/mean" in line:
            line["critic/rewards/mean"] = None
    write_lines(folder / "metrics.jsonl", lines)
    found = verdict(folder)
    title = "Running with 1 alarm at step 12 of 30: not finite: critic/rewards/mean since step 10"
    assert (found.level, found.title, found.is_healthy) == ("alarm", title, False)
    content = page_content(read_files(folder), now=WRITTEN_AT).data
    curve = content["curves"]["critic/rewards/mean"]  # type: ignore[index]
    assert [step for step, value in zip(curve["index"], curve["data"], strict=True) if value is None] == [3, 10, 11, 12]
    assert ["Training reward", "not finite since step 10"] in content["facts"]  # type: ignore[operator]


def test_thinned_curves_and_averages_keep_the_gaps() -> None:
    values = [float(index % 7) for index in range(10_000)]
    values[1234], values[5678], values[5000:5100] = 1000.0, -1000.0, [math.nan] * 100
    steps, kept = thinned((range(10_000), values), 800)
    assert len(steps) <= 800
    assert {1000.0, -1000.0} <= set(kept)
    assert {step for step, value in zip(steps, kept, strict=True) if math.isnan(value)} <= {*range(5000, 5100)}
    assert any(map(math.isnan, kept))
    averages = moving_average(([1, 2, 3, 4], [1.0, math.nan, 3.0, 5.0]), 2)
    assert averages == ([1, 3, 4], [1.0, 2.0, 4.0])


def test_of_many_metrics_those_of_the_charts_are_shown_and_the_rest_is_counted(tmp_path: Path) -> None:
    folder = RunRecord().write(tmp_path / "run")
    lines = [{f"user/{number}": 1.0 for number in range(500)} | line for line in metrics_lines(30)]
    write_lines(folder / "metrics.jsonl", lines)
    data = page_content(read_files(folder)).data
    curves = data["curves"]
    assert isinstance(curves, dict)
    assert len(curves) == MAX_METRICS
    assert {"critic/rewards/mean", "eval/heldout/greedy"} <= curves.keys()
    assert "generation" in data["phases"]["seconds"]  # type: ignore[index]
    [note] = [line for line in data["omitted"] if "of the metrics" in line]  # type: ignore[attr-defined]
    num_metrics = 500 + len({name for line in metrics_lines(30) for name in line} - {"step", "wall_time"})
    assert note.startswith(f"{num_metrics - MAX_METRICS} of the metrics: at most {MAX_METRICS} are shown")


def test_metrics_are_read_into_columns_and_not_into_an_object_for_each_value(tmp_path: Path) -> None:
    row = {f"user/{number}": number / 7 for number in range(50)}
    write_lines(tmp_path / "metrics.jsonl", ({"step": step, **row} for step in range(1000)))
    tracemalloc.start()
    read_files(tmp_path)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 40 * 50 * 1000


def test_a_run_that_was_killed_before_its_first_state_makes_no_progress(tmp_path: Path) -> None:
    folder = RunRecord(**RUNNING).write(tmp_path / "run")
    (folder / "rljob-run-state.json").unlink()
    (folder / "metrics.jsonl").unlink()
    assert verdict(folder, 60).title == "Starting before the first step"
    (folder / ".lock").write_text("99999999\n")
    # The attempt began 5 minutes before.
    found = verdict(folder, 60)
    title = "No progress before the first step: its process ended 1 h 5 min ago or more"
    assert (found.title, found.is_active) == (title, False)


def test_metrics_alone_do_not_say_whether_the_run_goes_on(tmp_path: Path) -> None:
    write_lines(tmp_path / "metrics.jsonl", metrics_lines(30))
    found = verdict(tmp_path)
    title = "State unknown at step 30: held-out score 0.2 → 0.9"
    assert (found.title, found.level, found.is_active) == (title, "info", True)


def test_a_state_that_is_older_than_the_metrics_is_no_silence(tmp_path: Path) -> None:
    folder = RunRecord(**RUNNING).write(tmp_path / "run")
    with (folder / "metrics.jsonl").open("a") as file:
        line = {"step": 20, "wall_time": WRITTEN_AT.timestamp() + 3500, "timing_s/step": 1.0}
        file.write(json.dumps(line) + "\n")
    assert verdict(folder, minutes_later=60).title.startswith("Running at step 20 of 30")


@pytest.mark.parametrize(
    ("activity", "shown"),
    [
        ("waits for its next attempt (Evicted): quota", "for its next attempt (Evicted): quota"),
        ("waits (Evicted): quota", "Evicted: quota"),
    ],
)
def test_a_job_that_waits_is_neither_failed_nor_finished(activity: str, shown: str, tmp_path: Path) -> None:
    folder = RunRecord(phase="Starting", exit_code=None, num_steps=12, alarms=None).write(tmp_path / "run")
    state = json.loads((folder / "rljob-run-state.json").read_text())
    state["activity"] = activity
    (folder / "rljob-run-state.json").write_text(json.dumps(state))
    found = verdict(folder)
    title = f"Waiting at step 12 of 30: {shown}"
    assert (found.title, found.level, found.is_active, found.is_healthy) == (title, "info", True, True)
    [notice] = found.notices
    assert (notice.title, notice.docs) == ("Evicted", "troubleshooting.md#evicted")
    assert notice.explanation == f"{EXPLANATIONS[Reason.EVICTED].means} {EXPLANATIONS[Reason.EVICTED].advice}"


def test_failed_attempts_are_counted(tmp_path: Path) -> None:
    folder = RunRecord().write(tmp_path / "run")
    ends = [(1, 75), (2, None), (3, 130), (4, 0)]
    rows = [
        {"attempt": number, "started": "2026-11-27T11:00:00Z"}
        | ({} if code is None else {"ended": "2026-11-27T12:00:00Z", "exitCode": code})
        for number, code in ends
    ]
    write_lines(folder / "attempts.jsonl", rows)
    found = verdict(folder)
    [notice] = found.notices
    assert (found.level, notice.level, notice.title) == ("good", "info", "2 of 4 attempts failed")
    assert notice.text.startswith("attempt 1: a worker or device was lost")
    assert notice.text.endswith("; attempt 2: its process was killed.")
    write_page(read_files(folder), now=WRITTEN_AT)
    assert "2 of 4 attempts failed" in (folder / "view.html").read_text()


def test_charts_and_verdict_follow_the_names_of_the_evaluations(tmp_path: Path) -> None:
    folder = RunRecord().write(tmp_path / "run")
    lines = [line for line in metrics_lines(30) if "eval/heldout/greedy" not in line]
    for step in (0, 30):
        scores = {"eval/math/mean_at_4": 0.1 + step / 100, "eval/math/pass_at_4": 0.5, "eval/code/mean_at_1": 0.3}
        lines.append({"step": step, **scores, "eval/math/excluded_fraction": 0.1, "eval/math/response_length_mean": 9})
    write_lines(folder / "metrics.jsonl", lines)
    files = read_files(folder)
    assert verdict(folder).title == "Complete at step 30 of 30: held-out score math 0.1 → 0.4"
    charts = {
        chart.title: [line.label for line in chart.lines]
        for chart in charts_of(files.curves)
        if "eld-out" in chart.title
    }
    assert charts == {
        "Held-out score, math": ["mean@4", "pass@4"],
        "Held-out score, code": ["mean@1"],
        "Held-out responses": ["math, excluded"],
        "Length of held-out responses": ["math"],
    }
    facts = dict(page_content(files).data["facts"])  # type: ignore[call-overload]
    assert facts["Held-out score (math)"] == "0.4"
    assert list(facts) == [each for each in facts if "length" not in each]
    names = (
        "a/response_length_mean",
        "a/mean_at_4",
        "a/reward/format/greedy",
        "a/greedy",
        "b/pass_at_1",
        "b/mean_at_1",
    )
    assert held_out_scores({f"eval/{name}": ([], []) for name in names}) == {
        "a": "eval/a/greedy",
        "b": "eval/b/mean_at_1",
    }


@pytest.mark.parametrize("phase", ["Failed", "Complete", "Stopped"])
def test_the_state_of_an_earlier_attempt_does_not_end_the_newest(phase: str, tmp_path: Path) -> None:
    folder = RunRecord(phase=phase, exit_code=130, num_steps=12).write(tmp_path / "run")
    with (folder / "attempts.jsonl").open("a") as file:
        file.write('{"attempt": 2, "started": "2026-11-27T12:30:00Z"}\n')
    found = verdict(folder, minutes_later=31)
    assert (found.title.partition(":")[0], found.is_active) == ("Starting at step 12 of 30", True)
    assert verdict(folder, minutes_later=40).title.startswith("No progress at step 12 of 30: silent for 10 min")
