"""metrics.jsonl, samples.jsonl, TensorBoard events and plots, also after a crash and a resume."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rljob_testing.messages import Mentions
from rljob_trainer.observability.jsonl import JsonlWriter, read_rows, remove_rows_after
from rljob_trainer.observability.plots import draw_plots, main, moving_average, read_curves
from rljob_trainer.observability.samples import Sample, SampleKind, SampleLog, sample_table
from rljob_trainer.observability.sinks import JsonlSink, MetricLog, TensorBoardSink


def wall_clock() -> float:
    return 1_700_000_000.25


def test_metrics_are_on_disk_as_soon_as_they_are_written(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path, None, wall_clock)
    sink.write(1, {"critic/rewards/mean": 0.5, "actor/pg_loss": math.nan, "actor/grad_norm": math.inf})
    text = (tmp_path / "metrics.jsonl").read_text()
    assert json.loads(text) == {
        "step": 1,
        "wall_time": 1_700_000_000.25,
        "critic/rewards/mean": 0.5,
        "actor/pg_loss": None,
        "actor/grad_norm": None,
    }
    sink.close()


def test_a_resumed_run_drops_the_rows_that_it_repeats(tmp_path: Path) -> None:
    first = JsonlSink(tmp_path, None, wall_clock)
    for step in (1, 2, 3):
        first.write(step, {"actor/pg_loss": float(step)})
    first.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "actor/pg_l')
    second = JsonlSink(tmp_path, 2, wall_clock)
    second.write(3, {"actor/pg_loss": 30.0})
    second.close()
    assert read_curves(tmp_path)["actor/pg_loss"] == [(1, 1.0), (2, 2.0), (3, 30.0)]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3


def test_an_attempt_without_a_checkpoint_starts_the_files_anew(tmp_path: Path) -> None:
    first = JsonlSink(tmp_path, None, wall_clock)
    first.write(0, {"eval/heldout/greedy": 0.25})
    first.close()
    JsonlSink(tmp_path, None, wall_clock).close()
    assert list(read_rows(tmp_path / "metrics.jsonl")) == []


@pytest.mark.parametrize("line", ['{"step": ', '{"step": ' + "[" * 100_000, '{"step": ' + "9" * 5000 + "}"])
def test_a_damaged_line_in_the_middle_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"step": 1}}\n{line}\n{{"step": 3}}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl:2: not a line of JSON"):
        list(read_rows(path))


def test_a_resumed_run_drops_damaged_lines_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n{"st\xff\n[2]\n' + bytes(100) + b'\n{"step": 3}\n{"step": 4}\n{"ste')
    with caplog.at_level("WARNING"):
        assert remove_rows_after(path, 3) == 1
    assert path.read_text() == '{"step": 1}\n{"step": 3}\n'
    assert [record.getMessage() for record in caplog.records] == [
        Mentions("damaged line", f"{path}:{number}") for number in (2, 3, 4)
    ]


def test_truncating_a_missing_file_does_nothing(tmp_path: Path) -> None:
    assert remove_rows_after(tmp_path / "none.jsonl", 3) == 0
    assert list(tmp_path.iterdir()) == []


def test_an_unpaired_surrogate_survives_the_file(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    writer = JsonlWriter(path)
    writer.append({"step": 1, "text": "a\ud800b"})
    writer.close()
    remove_rows_after(path, 1)
    assert list(read_rows(path)) == [{"step": 1, "text": "a\ud800b"}]


def test_tensorboard_reads_what_was_written_and_forgets_superseded_steps(tmp_path: Path) -> None:
    first = MetricLog([TensorBoardSink(tmp_path, None, lambda: 1_000.0)])
    for step in (1, 2, 3):
        first.write(step, {"actor/pg_loss": float(step)})
    first.close()
    second = MetricLog([TensorBoardSink(tmp_path, 1, lambda: 2_000.0)])
    second.write(2, {"actor/pg_loss": 20.0})
    second.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(point.step, point.value) for point in events.Scalars("actor/pg_loss")] == [(1, 1.0), (2, 20.0)]


def test_tensorboard_forgets_an_attempt_that_left_no_checkpoint(tmp_path: Path) -> None:
    for value in (1.0, 2.0):
        attempt = TensorBoardSink(tmp_path, None, lambda value=value: 1_000.0 * value)
        for step in (0, 1):
            attempt.write(step, {"actor/pg_loss": value})
        attempt.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(point.step, point.value) for point in events.Scalars("actor/pg_loss")] == [(0, 2.0), (1, 2.0)]


def test_samples_are_logged_and_shown_without_control_characters(tmp_path: Path) -> None:
    log = SampleLog(tmp_path, None)
    sample = Sample(
        3, SampleKind.GREEDY, 7, "[red]prompt[/red]", "\x1b[2Jwiped\n" + "x" * 500, "1", 0.5, {"a": 0.75, "b": -2.5}
    )
    log.write([sample])
    log.close()
    assert list(read_rows(tmp_path / "samples.jsonl")) == [
        {
            "step": 3,
            "kind": "eval_greedy",
            "group": 7,
            "prompt": sample.prompt,
            "response": sample.response,
            "answer": "1",
            "score": 0.5,
            "rewards": {"a": 0.75, "b": -2.5},
            "found": {},
            "outcome": "",
            "statuses": {},
            "source": "",
        }
    ]
    console = Console(width=400, record=True, file=(tmp_path / "console").open("w"))
    console.print(sample_table("evaluation", [sample]))
    shown = console.export_text()
    assert "[red]prompt[/red]" in shown
    assert "\\x1b[2Jwiped\\n" in shown
    assert "more characters" in shown
    header, row = (line for line in shown.splitlines() if "score" in line or "prompt[" in line)
    assert header.replace("┃", " ").split()[-3:] == ["score", "a", "b"]
    assert row.replace("│", " ").split()[-3:] == ["0.5", "0.75", "-2.5"]


def test_extracted_answers_are_logged_and_shown(tmp_path: Path) -> None:
    log = SampleLog(tmp_path, None)
    found = [{"a": "17"}, {"a": ""}, {}, {"a": "17", "b": "[/red]"}]
    samples = [Sample(1, SampleKind.TRAIN, 0, "p", "r", "18", 0.0, {"a": 0.0}, each) for each in found]
    log.write(samples)
    log.close()
    assert [row["found"] for row in read_rows(tmp_path / "samples.jsonl")] == found
    console = Console(width=200, record=True, file=(tmp_path / "console").open("w"))
    console.print(sample_table("evaluation", samples))
    rows = [line.replace("┃", "│").split("│")[1:-1] for line in console.export_text().splitlines()]
    cells = [[cell.strip() for cell in row] for row in rows if len(row) == 5]
    assert cells == [
        ["prompt", "response", "found", "answer", "score"],
        ["p", "r", "17", "18", "0"],
        ["p", "r", "", "18", "0"],
        ["p", "r", "", "18", "0"],
        ["p", "r", "a: 17, b: [/red]", "18", "0"],
    ]


def test_plots_are_drawn_from_metrics_alone(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path, None, wall_clock)
    sink.write(0, {"eval/heldout/greedy": 0.1, "eval/heldout/mean_at_1": 0.05})
    for step in range(1, 15):
        sink.write(step, {"critic/rewards/mean": step / 15, "response_length/mean": 5.0, "actor/entropy": 1.0})
    sink.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 15, "critic/rew')
    files = draw_plots(tmp_path)
    assert [file.name for file in files] == [
        "overview.png",
        "reward.png",
        "evaluation_heldout.png",
        "entropy.png",
        "response_length.png",
    ]
    for png in files:
        assert png.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert not list((tmp_path / "plots").glob("*.tmp"))


def test_the_moving_average_only_looks_back() -> None:
    assert moving_average([(1, 2.0), (2, 4.0), (3, 9.0)], window=2) == [(1, 2.0), (2, 3.0), (3, 6.5)]


def test_plotting_a_folder_without_metrics_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 2
    assert "metrics.jsonl: no such file" in capsys.readouterr().err
