"""`rljob logs --storage`: the logs of a job in its claim. The files are written by the trainer's own code."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from rljob_cli.cluster import kept_logs
from rljob_trainer.attempt_logs import attempt_folder, keep_tail
from rljob_trainer.pod.driver_log import copy_of

Rljob = Callable[..., tuple[int, str, str]]
LOGS = Path("run/logs")


def write(file: Path, text: str, at: int) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    os.utime(file, (at, at))


@pytest.fixture
def claim(tmp_path: Path) -> Path:
    """The claim of a recreated job: attempts 1 and 2 are newer than 3. The second attempt was submitted twice, and a
    worker of it has failed."""
    run = tmp_path / "small" / "run"
    write(copy_of("job-driver-small-3-1.log", run), "third, of long ago\n", 100)
    write(copy_of("job-driver-small-1-1.log", run), "first\n", 200)
    write(copy_of("job-driver-small-2-1.log", run), "step 1 \x1b[32mok\x1b[0m\nstep 2\n", 300)
    write(copy_of("job-driver-small-2-2.log", run), "step 3\nstep 4", 400)
    write(run / "logs" / "worker-1.log", "of attempt 1\nof attempt 2\n", 400)
    kept = keep_tail(run / "logs" / "worker-1.log", attempt_folder(run, 2), "reward+actor", 1)
    os.utime(kept, (350, 350))
    return tmp_path


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "there-is-none"))


@pytest.mark.parametrize("within", ["", "small"])
def test_the_newest_driver_log_is_printed_unchanged(claim: Path, rljob: Rljob, within: str) -> None:
    folder = claim / "small" / LOGS / "attempt-2"
    code, output, errors = rljob("logs", "small", "--storage", str(claim / within))
    assert (code, output) == (0, "step 1 \x1b[32mok\x1b[0m\nstep 2\nstep 3\nstep 4")
    assert errors == f"attempt 2: {folder / 'driver.log'}, {folder / 'driver-2.log'}\n"


@pytest.mark.parametrize(
    ("arguments", "printed"),
    [
        (["--attempt", "3"], "third, of long ago\n"),
        (["--tail", "2"], "step 3\nstep 4"),
        (["--tail", "0"], ""),
        (["--pool", "main", "--index", "1"], "of attempt 1\nof attempt 2\n"),
        (["--pool", "main", "--index", "1", "--tail", "1"], "of attempt 2\n"),
        (["--pool", "main", "--index", "1", "--attempt", "2"], "of attempt 1\nof attempt 2\n"),
    ],
)
def test_other_logs_can_be_selected(claim: Path, rljob: Rljob, arguments: list[str], printed: str) -> None:
    assert rljob("logs", "small", "--storage", str(claim), *arguments)[:2] == (0, printed)


def test_workers_of_several_pools_have_a_folder_each(claim: Path, rljob: Rljob) -> None:
    write(claim / "small" / LOGS / "rollout" / "worker-1.log", "of pool rollout\n", 400)
    arguments = ("logs", "small", "--storage", str(claim), "--index", "1", "--pool")
    assert rljob(*arguments, "rollout")[:2] == (0, "of pool rollout\n")
    assert rljob(*arguments, "main")[:2] == (0, "of attempt 1\nof attempt 2\n")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--attempt", "4"], "has logs of attempts 1, 2, 3 (seen: --attempt 4); only the newest ten attempts are"),
        (
            ["--pool", "main"],
            "has no log of worker 0 of pool main; it contains attempt-1, attempt-2, attempt-3, worker-1.log",
        ),
        (
            ["--pool", "main", "--index", "1", "--attempt", "1"],
            "has no logs of a failed worker 1 (it contains driver.log); remove --attempt",
        ),
        (["--follow"], "--follow: cannot be combined with --storage; remove one of them"),
        (["--container", "ray"], "--container ray: not available with --storage, which has only the driver's log"),
    ],
)
def test_a_missing_attempt_is_reported_with_the_existing_ones(
    claim: Path, rljob: Rljob, arguments: list[str], said: str
) -> None:
    code, output, errors = rljob("logs", "small", "--storage", str(claim), *arguments)
    assert (code, output) == (2, "")
    assert errors.startswith("error: ")
    assert said in errors


def test_a_folder_without_a_job_is_reported(claim: Path, rljob: Rljob) -> None:
    code, _, errors = rljob("logs", "other", "--storage", str(claim))
    assert code == 2
    assert errors == (
        f"error: --storage {claim}: neither {claim / 'other' / LOGS} nor {claim / LOGS} exists (it contains small); use"
        " the folder where the claim is mounted or, if the job has a subPath, that folder in it\n"
    )
    assert "(the folder does not exist)" in rljob("logs", "small", "--storage", str(claim / "none"))[2]


def test_an_attempt_without_a_driver_log_is_reported(claim: Path, rljob: Rljob) -> None:
    folder = claim / "small" / LOGS / "attempt-1"
    (folder / "driver.log").rename(folder / "stacks-0.txt")
    code, output, errors = rljob("logs", "small", "--storage", str(claim), "--attempt", "1")
    assert (code, output, errors) == (2, "", f"error: {folder}: has no driver.log; it contains stacks-0.txt\n")


def test_a_line_without_an_end_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A progress bar, for example. In pieces of 64 bytes its 2 MiB took minutes while each piece was appended to all
    earlier ones."""
    monkeypatch.setattr(kept_logs, "PIECE_BYTES", 64)
    file, bar = tmp_path / "driver.log", b"=" * 2**21
    file.write_bytes(b"first\n" + bar + b"\n\n" + bar)
    begin = time.process_time()
    lines = list(kept_logs.pieces_of(kept_logs.KeptLog([file], ""), num_lines=3))
    assert lines == [bar + b"\n", b"\n", bar]
    assert time.process_time() - begin < 5
