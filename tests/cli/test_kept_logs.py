"""`rljob logs --storage`: the logs of a job in its claim. The files are written by the trainer's own code."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from rljob_cli.cluster import kept_logs
from rljob_testing.messages import Mentions
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
    assert errors == Mentions("attempt 2:", f"{folder / 'driver.log'}, {folder / 'driver-2.log'}")


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
    ("arguments", "parts"),
    [
        (["--attempt", "4"], ("1, 2, 3", "--attempt 4", "newest ten")),
        (["--pool", "main"], ("worker 0", "pool main", "'attempt-1', 'attempt-2', 'attempt-3', 'worker-1.log'")),
        (["--pool", "main", "--index", "1", "--attempt", "1"], ("worker 1", "driver.log", "--attempt")),
        (["--follow"], ("--follow:", "--storage", "remove")),
        (["--container", "ray"], ("--container ray:", "--storage", "driver's log")),
    ],
)
def test_a_missing_attempt_is_reported_with_the_existing_ones(
    claim: Path, rljob: Rljob, arguments: list[str], parts: tuple[str, ...]
) -> None:
    code, output, errors = rljob("logs", "small", "--storage", str(claim), *arguments)
    assert (code, output) == (2, "")
    assert errors == Mentions("error:", *parts)


@pytest.mark.parametrize("name", ["", ".", "..", "small/..", "/etc"])
def test_a_name_that_leads_out_of_the_storage_is_rejected(claim: Path, rljob: Rljob, name: str) -> None:
    code, output, errors = rljob("logs", name, "--storage", str(claim))
    assert (code, output, errors) == (2, "", Mentions("error: NAME:", f"'{name}'", "valid Kubernetes name"))


def test_a_folder_without_a_job_is_reported(claim: Path, rljob: Rljob) -> None:
    code, _, errors = rljob("logs", "other", "--storage", str(claim))
    assert code == 2
    where = f"error: --storage {claim}:"
    assert errors == Mentions(where, str(claim / "other" / LOGS), str(claim / LOGS), "small", "mounted", "subPath")
    assert rljob("logs", "small", "--storage", str(claim / "none"))[2] == Mentions("there is no ", "none")


def test_the_files_of_a_long_driver_log_are_printed_in_their_order(claim: Path, rljob: Rljob) -> None:
    folder = claim / "small" / LOGS / "attempt-1"
    for name in ("driver.first.log", "driver.part-3.log", "driver.log", "driver-2.log"):
        (folder / name).write_text(f"{name}\n")
    assert rljob("logs", "small", "--storage", str(claim), "--attempt", "1")[1].split() == [
        "driver.first.log",
        "driver.part-3.log",
        "driver.log",
        "driver-2.log",
    ]


def test_an_attempt_without_a_driver_log_is_reported(claim: Path, rljob: Rljob) -> None:
    folder = claim / "small" / LOGS / "attempt-1"
    (folder / "driver.log").rename(folder / "stacks-0.txt")
    code, output, errors = rljob("logs", "small", "--storage", str(claim), "--attempt", "1")
    assert (code, output, errors) == (2, "", Mentions(f"error: {folder}:", "no driver.log", "stacks-0.txt"))


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


def test_the_log_of_the_previous_attempt_can_be_printed(claim: Path, rljob: Rljob) -> None:
    assert rljob("logs", "small", "--storage", str(claim), "--previous")[:2] == (0, "first\n")
    newer = claim / "small" / LOGS / "attempt-1" / "driver.log"
    os.utime(newer, (900, 900))
    code, output, errors = rljob("logs", "small", "--storage", str(claim), "--previous")
    assert (code, output, errors) == (2, "", Mentions("error:", "attempt 1", "no previous", "--previous"))
    code, _, errors = rljob("logs", "small", "--storage", str(claim), "--since", "10m")
    assert (code, errors) == (2, Mentions("error: --since: cannot be combined with --storage", "--tail"))
