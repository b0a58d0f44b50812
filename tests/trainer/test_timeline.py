"""Spans, idle time, and the file of a timeline."""

from __future__ import annotations

import itertools
import json
import threading
from pathlib import Path
from typing import cast

import pytest

from rljob_trainer.controller import step_records
from rljob_trainer.controller.step_records import StepTimeline
from rljob_trainer.groups.worker_processes import WorkerProcesses
from rljob_trainer.observability.idle_time import with_idle_time
from rljob_trainer.observability.memory_plot import MemoryStep, draw_memory, read_memory
from rljob_trainer.observability.spans import MAX_KEPT, Counts, Span, SpanRecorder, longest
from rljob_trainer.observability.timeline import (
    MEMORY_PEAK_TRACK,
    MEMORY_TRACK,
    ProcessSpans,
    newest_timeline_file,
    timeline_file,
    write_timeline,
)


def test_spans_nest_and_are_taken_once() -> None:
    recorder = SpanRecorder()
    with recorder.span("outer"), recorder.span("inner"):
        pass
    inner, outer = recorder.take()
    assert isinstance(inner, Span)
    assert isinstance(outer, Span)
    assert (inner.name, outer.name) == ("inner", "outer")
    assert outer.started <= inner.started <= inner.ended <= outer.ended
    assert inner.thread == outer.thread == threading.get_native_id()
    assert recorder.take() == []


def test_a_span_that_raises_is_marked() -> None:
    recorder = SpanRecorder()
    with pytest.raises(ValueError, match="no"), recorder.span("fails"):
        raise ValueError("no")
    [span] = recorder.take()
    assert isinstance(span, Span)
    assert span.name == "fails"


def test_the_oldest_spans_are_dropped() -> None:
    recorder = SpanRecorder()
    for number in range(MAX_KEPT + 1):
        with recorder.span(str(number)):
            pass
    oldest = recorder.take()[0]
    assert isinstance(oldest, Span)
    assert oldest.name == "1"


def test_of_many_spans_the_longest_and_all_counter_values_are_taken() -> None:
    recorder = SpanRecorder()
    recorder.count("memory (MiB)", "generate", {"parameters": 1.0})
    records = [Span(str(seconds), 100.0, 100.0 + seconds, 1) for seconds in (3, 1, 4, 2)]
    kept = longest([*recorder.take(), *records], 2)
    assert [each.name if isinstance(each, Span) else each.track for each in kept] == ["memory (MiB)", "3", "4"]


def test_idle_time_is_named_by_what_a_worker_waits_for() -> None:
    """Two workers: the second has less to generate, and waits for scores and for the update of the first one."""
    controller = [
        Span("rollout", 100.0, 110.0, 1),
        Span("reward", 110.0, 113.0, 1),
        # Between two phases.
        Span("update_actor", 114.0, 120.0, 1),
    ]
    first = [
        Span("hybrid.take", 100.0, 110.0, 1),
        Span("generate", 100.0, 110.0, 2),
        Span("reward.finish_scoring", 110.5, 113.0, 1),
        Span("actor.update_policy", 114.0, 119.0, 1),
        Span("read arguments", 119.0, 119.5, 1),
    ]
    second = [
        Span("hybrid.take", 100.0, 104.0, 1),
        Span("generate", 100.0, 104.0, 2),
        Span("actor.update_policy", 114.0, 117.0, 1),
    ]
    idle = idle_times(controller, first, second)
    assert idle == [
        [("idle: scores", 110.0, 113.0), ("idle: controller", 113.0, 114.0), ("idle: controller", 119.0, 120.0)],
        [
            ("idle: other workers generate", 104.0, 110.0),
            ("idle: scores", 110.0, 113.0),
            ("idle: controller", 113.0, 114.0),
            ("idle: other workers", 117.0, 120.0),
        ],
    ]


def idle_times(*processes: list[Span]) -> list[list[tuple[str, float, float]]]:
    """The idle times of each worker. `processes`: the spans of the controller, then of the workers."""
    _, *workers = with_idle_time([ProcessSpans(str(number), spans) for number, spans in enumerate(processes)])
    return [
        [(each.name, each.started, each.ended) for each in worker.spans if isinstance(each, Span) and each.thread == 0]
        for worker in workers
    ]


def test_workers_wait_for_scores_also_while_responses_may_still_be_requested() -> None:
    """With `refill: Continuous` the controller asks for scores again and again within the phase of the rollout. The
    first worker generates longer, and a third process scores."""
    first = [Span("generate", 100.0, 140.0, 2), Span("generate", 140.0005, 160.0, 2)]
    second = [Span("generate", 100.0, 110.0, 2)]
    third = [Span("reward.completed_ids", 120.0 + number, 120.9 + number, 1) for number in range(80)]
    idle = idle_times([Span("rollout", 100.0, 200.0, 1)], first, second, third)
    generates, scores = "idle: other workers generate", "idle: scores"
    assert idle == [
        [(scores, 160.0, 200.0)],
        [(generates, 110.0, 160.0), (scores, 160.0, 200.0)],
        [(generates, 100.0, 160.0), (scores, 160.0, 200.0)],
    ]


class Workers:
    """Two workers, of which the second has little to generate."""

    handles = (0, 1)

    def drop_spans(self) -> None:
        """See WorkerProcesses."""

    def take_spans(self) -> list[tuple[str, list[Span]]]:
        """See WorkerProcesses."""
        return [("10.0.0.1", [Span("generate", 100.0, 200.0, 2)]), ("10.0.0.2", [Span("generate", 100.0, 110.0, 2)])]


@pytest.mark.parametrize("seconds_between", [0.0001, 0.005])
def test_idle_time_is_that_of_the_whole_step_although_short_spans_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds_between: float
) -> None:
    """The controller takes finished responses 1,000 times in a step of 100 seconds."""
    monkeypatch.setattr(step_records, "SPANS", recorder := SpanRecorder())
    timeline = StepTimeline(tmp_path, [], cast(dict[str, WorkerProcesses], {"main": Workers()}))
    timeline.max_spans = 100
    timeline.begin(1, is_recorded=True)
    # The later ones are shorter.
    moments = [100 + number / 9 - number**2 / 90_000 for number in range(1001)]
    recorder._records.extend(
        Span("rollout", begin, end - seconds_between, 1) for begin, end in itertools.pairwise(moments)
    )
    timeline.end(1)
    events = json.loads(newest_timeline_file(tmp_path).read_text())["traceEvents"]
    spans = [(each["pid"], each["name"], each["dur"] // 10**6) for each in events if each["ph"] == "X"]
    assert [each for each in spans if each[1].startswith("idle")] == [(2, "idle: other workers generate", 89)]
    assert len([name for process, name, _ in spans if process == 0]) == (1 if seconds_between < 0.001 else 100)


def test_the_file_has_a_row_per_process_and_microseconds_from_the_first_span(tmp_path: Path) -> None:
    path = timeline_file(tmp_path, 3)
    rows = [
        ProcessSpans("controller", [Span("rollout", 100.5, 102.0, 7)]),
        ProcessSpans("main, rank 0", [Span("generate", 101.0, 101.25, 8), Span("hybrid.generate", 100.0, 101.5, 8)]),
    ]
    write_timeline(path, 3, rows)
    assert path == tmp_path / "timelines" / "step-000003.json"
    document = json.loads(path.read_text())
    assert document["step"] == 3
    events = document["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {0: "controller", 1: "main, rank 0"}
    spans = [event for event in events if event["ph"] == "X"]
    assert [(event["name"], event["pid"], event["tid"], event["ts"], event["dur"]) for event in spans] == [
        ("rollout", 0, 7, 500_000, 1_500_000),
        ("hybrid.generate", 1, 8, 0, 1_500_000),
        ("generate", 1, 8, 1_000_000, 250_000),
    ]
    assert spans[1]["cat"] == "hybrid"


def test_counts_are_counters_at_their_time(tmp_path: Path) -> None:
    counts = Counts("memory (MiB)", 100.75, "generate", {"parameters": 3.0, "kv_cache": 0.5})
    write_timeline(
        tmp_path / "one.json", 1, [ProcessSpans("main, rank 0", [counts, Span("generate", 100.0, 101.0, 8)])]
    )
    *_, counter = json.loads((tmp_path / "one.json").read_text())["traceEvents"]
    assert counter == {
        "ph": "C",
        "name": "memory (MiB)",
        "cat": "generate",
        "pid": 0,
        "tid": 0,
        "ts": 750_000,
        "args": {"parameters": 3.0, "kv_cache": 0.5},
    }


def test_memory_is_taken_from_the_first_process_that_reports_it(tmp_path: Path) -> None:
    recorder = SpanRecorder()
    for after, num_parameters, peak in (("sleep", 4.0, 9.0), ("update", 2.0, 6.0)):
        recorder.count(MEMORY_TRACK, after, {"parameters": num_parameters, "gradients": 1.0})
        recorder.count(MEMORY_PEAK_TRACK, after, {"since the last boundary": peak})
    path = timeline_file(tmp_path, 2)
    write_timeline(path, 2, [ProcessSpans("controller", []), ProcessSpans("main, rank 0", recorder.take())])
    assert read_memory(path) == MemoryStep(
        "main, rank 0", ["sleep", "update"], {"parameters": [4.0, 2.0], "gradients": [1.0, 1.0]}, [9.0, 6.0]
    )
    (tmp_path / "plots").mkdir()
    [picture] = draw_memory(tmp_path, tmp_path / "plots")
    assert picture.name == "memory-step-000002.png"
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_an_empty_timeline_is_valid(tmp_path: Path) -> None:
    write_timeline(tmp_path / "empty.json", 1, [ProcessSpans("controller", [])])
    assert len(json.loads((tmp_path / "empty.json").read_text())["traceEvents"]) == 2


def test_a_failed_write_leaves_no_partial_file(tmp_path: Path) -> None:
    (tmp_path / "step.json").mkdir()
    with pytest.raises(OSError, match="directory"):
        write_timeline(tmp_path / "step.json", 1, [ProcessSpans("controller", [])])
    assert [path.name for path in tmp_path.iterdir()] == ["step.json"]
