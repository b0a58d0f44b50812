"""The driver log as the second container of the head pod prints and stores it."""

from __future__ import annotations

import io
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rljob_trainer.pod import log_copy
from rljob_trainer.pod.driver_log import DriverLogs, copy_of
from rljob_trainer.pod.log_copy import LogCopy


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "session_latest" / "logs"


def add(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(text)


def test_lines_are_printed_when_they_are_complete(folder: Path) -> None:
    output = io.BytesIO()
    logs = DriverLogs(folder, output, None)
    logs.print_new()
    assert output.getvalue() == b""
    add(folder / "job-driver-a-1-1.log", "one\ntw")
    add(folder / "raylet.out", "not a driver's\n")
    logs.print_new()
    assert output.getvalue() == b"one\n"
    add(folder / "job-driver-a-1-1.log", "o\nthree")
    logs.print_new()
    assert output.getvalue() == b"one\ntwo\n"
    logs.close()
    assert output.getvalue() == b"one\ntwo\nthree\n"


def test_an_endless_line_is_not_kept_in_memory(folder: Path) -> None:
    output = io.BytesIO()
    logs = DriverLogs(folder, output, None)
    path = folder / "job-driver-a-1-1.log"
    add(path, "x" * 65_536)
    logs.print_new()
    assert output.getvalue() == b""
    add(path, "y")
    logs.print_new()
    assert output.getvalue() == b"x" * 65_536 + b"y"
    add(path, "z\nnext\n")
    logs.close()
    assert output.getvalue() == b"x" * 65_536 + b"yz\nnext\n"


def test_submissions_are_printed_one_after_the_other(folder: Path) -> None:
    output = io.BytesIO()
    logs = DriverLogs(folder, output, None)
    # Two exist already; sorted by name they are in the opposite order of their times.
    add(folder / "job-driver-b.log", "first\n")
    add(folder / "job-driver-a.log", "second\n")
    os.utime(folder / "job-driver-b.log", (1000, 1000))
    logs.print_new()
    add(folder / "job-driver-0.log", "third\n")
    logs.print_new()
    assert output.getvalue() == b"first\nsecond\nthird\n"


@pytest.mark.parametrize("how", ["replaced", "cut", "gone for a while"])
def test_a_truncated_file_is_read_from_its_beginning(folder: Path, how: str) -> None:
    output = io.BytesIO()
    logs = DriverLogs(folder, output, None)
    path = folder / "job-driver-a.log"
    add(path, "old one\n")
    logs.print_new()
    if how == "replaced":
        add(path, "old two\n")
        add(folder / "new", "new\n")
        # The last lines of the old file are still read through the open handle.
        (folder / "new").replace(path)
        expected = b"old one\nold two\nnew\n"
    elif how == "cut":
        path.write_text("new\n")
        expected = b"old one\nnew\n"
    else:
        path.unlink()
        folder.rmdir()
        logs.print_new()
        add(path, "new\n")
        expected = b"old one\nnew\n"
    logs.print_new()
    assert output.getvalue() == expected


def test_another_session_of_ray_is_followed(tmp_path: Path) -> None:
    # The head's container restarts: the link to the newest session points elsewhere.
    output = io.BytesIO()
    logs = DriverLogs(tmp_path / "session_latest" / "logs", output, None)
    add(tmp_path / "session_1" / "logs" / "job-driver-a-1-1.log", "one\n")
    (tmp_path / "session_latest").symlink_to(tmp_path / "session_1")
    logs.print_new()
    add(tmp_path / "session_1" / "logs" / "job-driver-a-1-1.log", "two\n")
    add(tmp_path / "session_2" / "logs" / "job-driver-a-1-2.log", "three\n")
    (tmp_path / "session_latest").unlink()
    (tmp_path / "session_latest").symlink_to(tmp_path / "session_2")
    logs.print_new()
    assert output.getvalue() == b"one\ntwo\nthree\n"


def test_the_copy_is_the_file_byte_for_byte(folder: Path, tmp_path: Path) -> None:
    text = "".join(f"line {number}\n" for number in range(20_000)) + "end \xff without a newline"
    add(folder / "job-driver-a-1-1.log", text[:100_000])
    logs = DriverLogs(folder, io.BytesIO(), tmp_path / "run")
    logs.print_new()
    add(folder / "job-driver-a-1-1.log", text[100_000:])
    logs.close()
    assert (tmp_path / "run" / "logs" / "attempt-1" / "driver.log").read_text() == text


def test_a_restart_prints_everything_and_copies_nothing_twice(folder: Path, tmp_path: Path) -> None:
    add(folder / "job-driver-a.log", "one\ntwo\n")
    DriverLogs(folder, io.BytesIO(), tmp_path).print_new()
    # The container is killed here, and starts again later.
    add(folder / "job-driver-a.log", "three\n")
    output = io.BytesIO()
    DriverLogs(folder, output, tmp_path).print_new()
    assert output.getvalue() == b"one\ntwo\nthree\n"
    assert {path.name: path.read_text() for path in (tmp_path / "logs").iterdir()} == {
        "driver-a.log": "one\ntwo\nthree\n"
    }


def test_the_log_of_a_recreated_job_does_not_mix_with_the_former(folder: Path, tmp_path: Path) -> None:
    copies = tmp_path / "logs" / "attempt-7"
    add(copies / "driver.log", "of the former job, and longer\n")
    add(folder / "job-driver-a-7-1.log", "of this job\n")
    DriverLogs(folder, io.BytesIO(), tmp_path).print_new()
    assert (copies / "driver.log").read_text() == "of this job\n"
    assert (copies / "driver.old.log").read_text() == "of the former job, and longer\n"


@pytest.mark.parametrize(
    ("name", "copy"),
    [
        ("job-driver-a-b-3-12-1.log", "attempt-12/driver.log"),
        ("job-driver-a-12-2.log", "attempt-12/driver-2.log"),
        ("job-driver-a-12-1-stacks.log", "driver-a-12-1-stacks.log"),
        ("job-driver-raysubmit_x.log", "driver-raysubmit_x.log"),
    ],
)
def test_each_attempt_has_a_folder(name: str, copy: str) -> None:
    assert copy_of(name, Path("/run")) == Path("/run/logs") / copy


def test_a_long_log_keeps_its_beginning_and_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_copy, "PART_BYTES", 10)
    monkeypatch.setattr(log_copy, "FIRST_BYTES", 4)
    source, path = tmp_path / "source.log", tmp_path / "copies" / "driver.log"

    def kept() -> dict[str, str]:
        return {file.name: file.read_text() for file in path.parent.iterdir()}

    text = "".join(f"{number:02}," for number in range(14))
    source.write_text(text)
    copy = LogCopy(path, source)
    copy.write(text[:12].encode())
    assert kept() == {"driver.part-0.log": "00,01,02,0", "driver.log": "3,"}
    copy.write(text[12:25].encode())
    assert kept() == {"driver.first.log": "00,0", "driver.part-1.log": "3,04,05,06", "driver.log": ",07,0"}
    # The container is killed here, and starts again.
    copy = LogCopy(path, source)
    copy.write(text[:23].encode())
    copy.write(text[23:].encode())
    expected = {"driver.first.log": "00,0", "driver.part-3.log": "10,11,12,1", "driver.log": "3,"}
    assert kept() == expected
    # Between two of the operations that finish a part.
    (path.parent / "driver.log").unlink()
    LogCopy(path, source).write(text.encode())
    assert kept() == expected
    source.write_text("another job's")
    LogCopy(path, source).write(b"another job's")
    assert kept() == {"driver.old.log": "3,", "driver.part-0.log": "another jo", "driver.log": "b's"}


def test_printing_continues_where_no_copy_can_be_written(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "logs").write_text("a file where a folder should be")
    output = io.BytesIO()
    logs = DriverLogs(folder, output, tmp_path)
    for line in ("one\n", "two\n"):
        add(folder / "job-driver-a.log", line)
        logs.print_new()
    assert output.getvalue() == b"one\ntwo\n"
    printed = capsys.readouterr().err
    assert len(re.findall("cannot write the copy of the driver's log", printed)) == 1


PROGRAM = """
import sys
from pathlib import Path
from rljob_trainer.pod import driver_log
driver_log.POD_RAY_LOG_FOLDER = sys.argv[1]
driver_log.DASHBOARD_PORT = int(sys.argv[2])
sys.exit(driver_log.main())
"""


def test_the_program_prints_remaining_lines_and_ends_on_sigterm(folder: Path, tmp_path: Path) -> None:
    # Nothing listens on port 1, as after the end of the head's container.
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(folder), "1"],
        env={"RLJOB_RUN_FOLDER": str(tmp_path / "run"), "RLJOB_GRACE_SECONDS": "600"},
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    add(folder / "job-driver-a.log", "one\n")
    assert process.stdout.readline() == b"one\n"
    add(folder / "job-driver-a.log", "two")
    process.send_signal(signal.SIGTERM)
    # It does not wait for the grace period.
    assert process.communicate(timeout=300) == (b"two\n", None)
    assert process.returncode == 0
    assert (tmp_path / "run" / "logs" / "driver-a.log").read_text() == "one\ntwo"
