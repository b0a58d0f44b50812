"""The processes of trackers: W&B offline and MLflow's folder are read back; processes that hang, or that end, change
nothing for the trainer."""

from __future__ import annotations

import io
import json
import logging
import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from rljob_api.v1alpha1.tracker import Tracker, TrackerType
from rljob_testing.cluster.kubectl import wait_for
from rljob_testing.messages import Mentions
from rljob_testing.process_tree import descendants
from rljob_testing.training import tracker_files
from rljob_trainer.settings import Settings, read_settings
from rljob_trainer.trackers import tracker_process, trackers
from rljob_trainer.trackers.messages import (
    REPORT_PREFIX,
    Begin,
    End,
    Message,
    MetricsRow,
    Redaction,
    RunFacts,
    SampleTable,
    decode,
    encode,
)
from rljob_trainer.trackers.tracker_process import TrackerProcess
from rljob_trainer.trackers.trackers import Trackers

SILENT = "rljob_testing.training.silent_tracker"
END = End(0, sends_page=True)


class LogLines:
    """The lines of the trainer's log."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        self._caplog = caplog

    def warnings(self) -> list[str]:
        """The messages of the warnings."""
        return [record.getMessage() for record in self._caplog.records if record.levelname == "WARNING"]


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> LogLines:
    monkeypatch.setattr(logging.getLogger("rljob_trainer"), "propagate", True)
    return LogLines(caplog)


MESSAGES: list[Message] = [
    Begin(RunFacts("j", None, "id", 2, "/run", "/run/state", 4, "kind: RLJob\n"), Tracker(type=TrackerType.MLFLOW)),
    MetricsRow(3, 12.5, {"a/b": 1.5, "c": -2.0}),
    SampleTable("samples", 3, ["prompt", "score"], [["unpaired \ud800", None]]),
    End(75, sends_page=True),
]


@pytest.mark.parametrize("message", MESSAGES, ids=[type(message).__name__ for message in MESSAGES])
def test_a_message_is_one_line_and_arrives_unchanged(message: Message) -> None:
    line = encode(message)
    assert line.count(b"\n") == 1
    assert decode(line) == message


def test_values_of_secret_variables_and_passwords_in_addresses_are_redacted() -> None:
    hidden = Redaction({"MLFLOW_TRACKING_PASSWORD": "longpass", "WANDB_API_KEY": "longpassword", "HOME": "/home/me"})
    text = "longpassword of longpass at https://user:word@host/path in /home/me, a@b"
    assert hidden(text) == "*** of *** at https://***@host/path in /home/me, a@b"
    assert hidden("https://user:p@ss@host/a@b") == "https://***@host/a@b"


@pytest.mark.parametrize(
    ("value", "text", "shown"),
    [
        ("0123456789\n", "the key 0123456789 is rejected", "the key *** is rejected"),
        (" 0123456789\r\n", "[0123456789]", "[***]"),
        ("first-line\n  second-line\n", "second-line\n", "***\n"),
        ("first-line\nsecond-line\n", "first-line\nsecond-line", "***"),
        ("first-line\nsecond-line", r"first-line\nsecond-line", "***"),
        (" \n\n", "a text\n \n\n", "a text\n \n\n"),
    ],
)
def test_a_secret_is_hidden_without_the_space_around_it_and_line_by_line(value: str, text: str, shown: str) -> None:
    assert Redaction({"WANDB_API_KEY": value})(text) == shown


@pytest.mark.parametrize("password", ['p"ssw0rd1', "back\\slash1", "pässwort1"])
def test_a_password_is_hidden_in_reports_and_in_json(silent: TrackerProcess, log: LogLines, password: str) -> None:
    silent._redaction = Redaction({"MLFLOW_TRACKING_PASSWORD": password})
    output = f"{REPORT_PREFIX}{json.dumps(['warning', f'failed with {password}'])}\n{json.dumps([password])}\n"
    silent._read_output(io.BytesIO(output.encode()), written := NotClosed())
    assert log.warnings() == ["failed with ***"]
    assert written.getvalue() == 'failed with ***\n["***"]\n'


class NotClosed(io.StringIO):
    """Can be read after it was closed."""

    def close(self) -> None:
        """Does nothing."""


def test_the_run_id_of_a_folder_stays(tmp_path: Path) -> None:
    first = trackers.local_run_id(tmp_path)
    assert trackers.local_run_id(tmp_path) == first
    (tmp_path / "other").mkdir()
    assert trackers.local_run_id(tmp_path / "other") != first
    (tmp_path / trackers.RUN_ID_FILE).write_bytes(b"\xff/..")
    assert trackers.local_run_id(tmp_path).isalnum()


@pytest.fixture
def silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TrackerProcess]:
    """A process that never reads, with a small limit of messages that wait for it."""
    monkeypatch.setattr(tracker_process, "MAX_WAITING_BYTES", 500_000)
    process = TrackerProcess(TrackerType.MLFLOW, tmp_path / "tracker.log", tracker_files.ENVIRONMENT, SILENT)
    yield process
    process.kill()


def living(process: TrackerProcess) -> list[int]:
    """The processes of its group that still run."""
    found = []
    for folder in Path("/proc").iterdir():
        with suppress(OSError):
            if folder.name.isdecimal():
                state, _, group = (folder / "stat").read_text().rpartition(")")[2].split()[:3]
                found += [int(folder.name)] if state != "Z" and int(group) == process.group else []
    return found


def wait_for_end(process: TrackerProcess) -> None:
    wait_for(lambda: not living(process), "the process to end", 60, 0.01)


def test_messages_that_are_not_read_are_left_out_and_counted(silent: TrackerProcess, log: LogLines) -> None:
    row = MetricsRow(1, 0.0, {f"metric/{number}": 1.0 for number in range(100)})
    num_sent = 0
    while silent.num_dropped < 10:
        silent.send(row)
        num_sent += 1
        assert num_sent < 10_000
    # The limit, and what is in the pipe.
    assert num_sent > 500_000 // len(encode(row))
    assert log.warnings() == [Mentions("MLflow", "metrics.jsonl", str(silent.log_file))]
    silent.end(END)
    silent.wait(lambda: 0.0)
    wait_for_end(silent)
    assert log.warnings()[1:] == [Mentions("MLflow", "in time"), Mentions("10 rows")]


def test_the_output_of_the_library_is_kept_without_passwords(silent: TrackerProcess) -> None:
    wait_for(lambda: silent.log_file.read_text(), "the first line", 60, 0.02)
    assert silent.log_file.read_text() == "started with http://***@server\n"


def test_a_second_stop_request_ends_the_wait_and_the_process(silent: TrackerProcess, log: LogLines) -> None:
    silent.end(END)

    def interrupted() -> float:
        raise KeyboardInterrupt

    silent.wait(interrupted)
    wait_for_end(silent)
    assert log.warnings() == [Mentions("MLflow", "second stop request")]


def test_a_process_that_has_ended_is_reported_once(silent: TrackerProcess, log: LogLines) -> None:
    os.killpg(silent.group, signal.SIGKILL)
    wait_for_end(silent)
    for _ in range(3):
        silent.send(MetricsRow(1, 0.0, {}))
    wait_for(log.warnings, "the warning", 60, 0.01)
    assert silent._waiting.empty()
    silent.send(MetricsRow(2, 0.0, {}))
    num_dropped = silent.num_dropped
    silent.end(END)
    silent.wait(lambda: 60.0)
    assert log.warnings()[0] == Mentions("MLflow", "process has ended", str(silent.log_file))
    assert [line for line in log.warnings()[1:] if "ended" in line] == []
    # The end of the run is not a row.
    assert silent.num_dropped == num_dropped > 0


def test_the_process_is_not_below_the_trainer_when_ray_stops_all_processes_below_it(silent: TrackerProcess) -> None:
    [pid] = living(silent)
    assert pid not in {each.pid for each in descendants(os.getpid())}


def test_trackers_that_did_not_begin_are_ended_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trackers, "TrackerProcess", partial(TrackerProcess, program=SILENT))
    started = Trackers()
    started.start([Tracker(type=TrackerType.WANDB)], settings_of(tmp_path, monkeypatch))
    [(_, process)] = started._processes
    started.end(2, lambda: False)
    wait_for_end(process)


@pytest.mark.parametrize("is_stopped", [False, True])
def test_a_tracker_that_hangs_delays_the_end_by_a_limited_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log: LogLines, is_stopped: bool
) -> None:
    monkeypatch.setattr(trackers, "TrackerProcess", partial(TrackerProcess, program=SILENT))
    monkeypatch.setattr(trackers, "STOP_SECONDS" if is_stopped else "END_SECONDS", 0.1)
    monkeypatch.setattr(trackers, "END_SECONDS" if is_stopped else "STOP_SECONDS", 3600.0)
    settings = settings_of(tmp_path, monkeypatch)
    hanging = Trackers()
    kinds = [Tracker(type=TrackerType.WANDB), Tracker(type=TrackerType.MLFLOW)]
    hanging.start(kinds, settings)
    hanging.begin(tracker_files.job(), settings, None)
    hanging.write(1, {"a": 1.0})
    processes = [process for _, process in hanging._processes]
    hanging.end(0, lambda: is_stopped)
    for process in processes:
        wait_for_end(process)
    assert log.warnings() == [Mentions("WandB", "in time"), Mentions("MLflow", "in time")]


def settings_of(folder: Path, patch: pytest.MonkeyPatch) -> Settings:
    for name, value in {**tracker_files.ENVIRONMENT, "RLJOB_SPEC": "x", "RLJOB_RUN_FOLDER": str(folder)}.items():
        patch.setenv(name, value)
    return read_settings()
