"""Scoring processes: order, limits, crashes, and cleanup. Real processes, user code from a file."""

from __future__ import annotations

import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import pytest

from rljob_trainer.errors import ConfigurationError, ResourceError, RewardError
from rljob_trainer.rewards.base import RewardOutcome, RewardRequest, ScorerSpec
from rljob_trainer.rewards.format import FormatScorer
from rljob_trainer.rewards.function import FunctionScorer
from rljob_trainer.rewards.math_answer import MathAnswerScorer
from rljob_trainer.rewards.process_pool import ScorerPool
from rljob_trainer.rewards.scorer_environment import scorer_environment

Found = TypeVar("Found")
USER_CODE = """
import ctypes, os, signal, stat, subprocess, sys, time

class Leaves(float):
    def __float__(self):
        sys.exit(0)

class Interrupts:
    def __repr__(self):
        raise KeyboardInterrupt

class Unspeakable(Exception):
    def __str__(self):
        raise RuntimeError

def fails():
    raise Unspeakable

def half():
    raise ValueError("half of a character: \\ud83d" + "x" * 100_000)

def recursive():
    return [recursive()]

ODD = {
    "large": lambda: 10**400, "digits": lambda: 10**5000, "leaves": Leaves, "interrupts": Interrupts,
    "fails": fails, "half": half, "text": lambda: "\\ud83d", "long": lambda: "x" * (20 << 20), "recursive": recursive,
}

def score(prompt, response, answer, row):
    verb, _, rest = response.partition(" ")
    if verb == "number":
        return float(rest)
    if verb == "print":
        print(rest)
        return 1.0
    if verb == "hang":
        child = subprocess.Popen(["sleep", "600"])
        print("grandchild", child.pid)
        time.sleep(600)
    if verb == "hang_in_c":
        ctypes.PyDLL(None).sleep(600)
    if verb == "raise":
        raise ValueError("cannot score " + prompt)
    if verb == "text":
        return "1.0"
    if verb == "odd":
        return ODD[rest]()
    if verb == "leave":
        sys.exit(0)
    if verb == "exit":
        print("about to exit")
        os._exit(7)
    if verb == "exit_with_child":
        if os.fork() == 0:
            time.sleep(600)
        os._exit(7)
    if verb == "crash":
        ctypes.string_at(0)
    if verb in ("scribble", "flood"):
        garbage = bytes(range(256)) + b"\\n" if verb == "scribble" else b"x" * (20 << 20)
        # The connection has the number that it has in the process that started this one.
        for descriptor in sorted(map(int, os.listdir("/proc/self/fd")))[3:]:
            try:
                if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                    continue
                os.set_blocking(descriptor, True)
                while garbage:
                    garbage = garbage[os.write(descriptor, garbage):]
            except OSError:
                continue
        return 1.0
    if verb == "modules":
        return sum(name in sys.modules for name in ("torch", "ray", "numpy", "pydantic", "transformers"))
    if verb == "environment":
        return rest in os.environ
    if verb == "row":
        return row["pair"] == (1, 2) and answer == {"x": None}
    if verb == "big":
        return len(prompt)
    if verb == "terminated":
        # As the stop of a Ray job does to every process below the trainer.
        os.kill(os.getpid(), signal.SIGTERM)
        return 1.0
    if verb == "terminates":
        begun, tells = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(tells, b"!")
            time.sleep(600)
        os.read(begun, 1)
        os.kill(child, signal.SIGTERM)
        program = subprocess.Popen(["sleep", "600"])
        program.terminate()
        return (os.waitpid(child, 0)[1], program.wait()) == (signal.SIGTERM, -signal.SIGTERM)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "user_rewards.py").write_text(USER_CODE)
    (tmp_path / "broken_rewards.py").write_text("import os\nprint('loading')\nos._exit(5)\n")
    (tmp_path / "slow_rewards.py").write_text("import time\ntime.sleep(600)\n")
    return tmp_path


def make_pool(
    folder: Path,
    path: str = "user_rewards:score",
    *,
    num_processes: int = 2,
    timeout_seconds: float = 30.0,
    start_timeout_seconds: float = 60.0,
    output_encoding: str = "utf-8",
    spec: ScorerSpec | None = None,
) -> ScorerPool:
    return ScorerPool(
        spec or FunctionScorer(path, "spec.training.rewards[0].function.path (reward score)"),
        name="score",
        num_processes=num_processes,
        timeout_seconds=timeout_seconds,
        start_timeout_seconds=start_timeout_seconds,
        log_folder=folder / "logs",
        environment=scorer_environment(
            {
                **{name: os.environ[name] for name in ("PATH", "PYTHONPATH") if name in os.environ},
                "SECRET": "s",
                "JUDGE": "j",
                "PYTHONIOENCODING": output_encoding,
            },
            ["JUDGE", "PYTHONIOENCODING"],
            [folder],
        ),
    )


@pytest.fixture
def pool(folder: Path) -> Iterator[ScorerPool]:
    with make_pool(folder) as pool:
        yield pool


def run(pool: ScorerPool, *responses: str) -> list[RewardOutcome]:
    return pool.submit([RewardRequest("p", response, None, {}) for response in responses]).result(timeout=60)


def statuses(outcomes: list[RewardOutcome]) -> str:
    """One letter per outcome."""
    return "".join(outcome.status[0] for outcome in outcomes)


def test_outcomes_come_in_the_order_of_the_requests(pool: ScorerPool) -> None:
    first = pool.submit([RewardRequest("p", f"number {n}", None, {}) for n in range(300)])
    second = pool.submit([RewardRequest("p", f"number {-n}", None, {}) for n in range(7)])
    assert [outcome.score for outcome in second.result(timeout=60)] == [-n for n in range(7)]
    assert [outcome.score for outcome in first.result(timeout=60)] == list(range(300))
    assert pool.submit([]).result(timeout=60) == []


def test_a_hanging_scorer_fails_only_its_own_response_and_dies_with_its_children(folder: Path) -> None:
    with make_pool(folder, timeout_seconds=0.5) as pool:
        pool.wait_until_ready()
        started = time.monotonic()
        outcomes = run(pool, "number 1", "hang", "number 2", "hang_in_c", *["number 3"] * 8)
        assert time.monotonic() - started < 60, "as long as a hang in C lasts, or longer"
    assert statuses(outcomes) == "OTOT" + "O" * 8
    assert outcomes[1].detail == "ran longer than 0.5 s and was killed"
    assert outcomes[1].score is None
    assert [outcome.score for outcome in outcomes[4:]] == [3.0] * 8
    assert is_gone(grandchild(folder))


def test_a_stop_signal_ends_no_scoring_and_still_ends_processes_of_user_code(pool: ScorerPool) -> None:
    outcomes = run(pool, "terminated", "terminates", "terminated")
    assert statuses(outcomes) == "OOO"
    assert [outcome.score for outcome in outcomes] == [1.0, 1.0, 1.0]


def test_a_dying_scorer_fails_only_its_own_response_and_the_end_of_its_output_is_kept(pool: ScorerPool) -> None:
    outcomes = run(pool, "number 1", "exit", "number 2", "crash", "exit_with_child", *["number 3"] * 8)
    assert statuses(outcomes) == "ODODD" + "O" * 8
    assert "ended its process (exit code 7)" in outcomes[1].detail
    assert "about to exit" in outcomes[1].detail
    assert "ended its process (signal SIGSEGV)" in outcomes[3].detail
    assert "in score" in outcomes[3].detail
    assert "ended its process (exit code 7)" in outcomes[4].detail


@pytest.mark.parametrize("how", ["scribble", "flood"])
def test_a_scorer_that_writes_to_the_score_channel_fails_only_its_own_response(pool: ScorerPool, how: str) -> None:
    outcomes = run(pool, "number 1", how, "number 3", "number 4")
    assert [outcome.score for outcome in outcomes] == [1.0, None, 3.0, 4.0]
    assert outcomes[1].detail.startswith("wrote into the connection")


def test_errors_name_the_exception_and_the_line(pool: ScorerPool) -> None:
    outcomes = run(pool, "raise", "text", "leave", "number 4")
    raised, text, left, fine = outcomes
    assert statuses([raised, text, left, fine]) == "EEEO"
    assert raised.detail.startswith("raised ValueError: cannot score p\n")
    assert 'raise ValueError("cannot score " + prompt)' in raised.detail
    assert text.detail == "returned a str ('1.0'); return a finite number (int, float, True or False)"
    assert left.detail.startswith("raised SystemExit: 0")


def test_invalid_scores_are_errors_of_their_responses(pool: ScorerPool) -> None:
    """One process scores all of them: no value kills it."""
    beginnings = {
        "large": "returned a int (1000",
        "digits": "returned a int (its repr raises ValueError)",
        "leaves": "raised SystemExit: 0",
        "interrupts": "raised KeyboardInterrupt",
        "fails": "raised user_rewards.Unspeakable: <exception str() failed>",
        "half": r"raised ValueError: half of a character: \ud83dxxx",
        "text": r"returned a str ('\ud83d')",
        "long": f"returned a str ('{'x' * 99} ... ",
        "recursive": "raised RecursionError: maximum recursion depth exceeded",
    }
    pool.wait_until_ready()
    process_ids = pool.process_ids()
    found = run(pool, *(f"odd {name}" for name in beginnings), "number 0.5")
    for outcome, (name, beginning) in zip(found, beginnings.items(), strict=False):
        assert (outcome.status, outcome.score, outcome.detail[: len(beginning)]) == ("ERROR", None, beginning), name
        outcome.detail.encode()
        assert len(outcome.detail) < 10_000
    assert found[-1].score == 0.5
    assert pool.process_ids() == process_ids


def test_a_reward_may_print_any_response(folder: Path) -> None:
    with make_pool(folder, num_processes=1, output_encoding="ascii") as pool:
        [outcome] = run(pool, "print 你好")
    assert (outcome.score, outcome.detail) == (1.0, "")
    assert "\\u4f60\\u597d" in "".join(log.read_text() for log in (folder / "logs").iterdir())


def test_scoring_processes_are_light_and_see_only_allowed_variables(pool: ScorerPool) -> None:
    outcomes = run(pool, "modules", "environment SECRET", "environment JUDGE", "environment OMP_NUM_THREADS")
    assert [outcome.score for outcome in outcomes] == [0.0, 0.0, 1.0, 1.0]


def test_large_rows_arrive_complete(pool: ScorerPool) -> None:
    row = pool.submit([RewardRequest("p", "row", {"x": None}, {"pair": (1, 2)})]).result(timeout=60)
    assert row[0].score == 1.0
    large = pool.submit([RewardRequest("p" * 500_000, "big", None, {}) for _ in range(6)]).result(timeout=60)
    assert [outcome.score for outcome in large] == [500_000.0] * 6


def test_a_row_that_cannot_be_sent_is_rejected_at_once(pool: ScorerPool) -> None:
    with pytest.raises(RewardError, match=r"cannot be sent to the reward: .*bytes"):
        pool.submit([RewardRequest("p", "row", None, {"image": b"\0"})])


def test_a_scorer_that_cannot_be_loaded_is_reported_before_any_work(folder: Path) -> None:
    with make_pool(folder, "user_rewards:scor") as pool:
        with pytest.raises(ConfigurationError, match=r"has no 'scor'; did you mean score\?"):
            pool.wait_until_ready()
        with pytest.raises(ConfigurationError):
            pool.submit([RewardRequest("p", "number 1", None, {})])


def test_a_module_that_exits_or_blocks_the_process_is_reported(folder: Path) -> None:
    with (
        make_pool(folder, "broken_rewards:score") as pool,
        pytest.raises(RewardError, match=r"(?s)broken_rewards:score ended its process \(exit code 5\).*loading"),
    ):
        pool.wait_until_ready()
    with (
        make_pool(folder, "slow_rewards:score", start_timeout_seconds=0.5) as pool,
        pytest.raises(RewardError, match=r"slow_rewards:score did not load within 0\.5 s"),
    ):
        pool.wait_until_ready()


@pytest.mark.parametrize("spec", [MathAnswerScorer("here"), FormatScorer("x", "here")])
def test_a_built_in_scorer_killed_while_loading_is_no_configuration_error(folder: Path, spec: ScorerSpec) -> None:
    (folder / "sitecustomize.py").write_text("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    message = rf"(?s)^here: {re.escape(spec.name)} ended its process \(signal SIGKILL\).*\n.* out of memory$"
    with make_pool(folder, spec=spec) as pool, pytest.raises(ResourceError, match=message):
        pool.wait_until_ready()


def test_closing_kills_the_processes_and_fails_unfinished_requests(folder: Path) -> None:
    with make_pool(folder) as pool:
        pool.wait_until_ready()
        process_ids = pool.process_ids()
        waiting = pool.submit([RewardRequest("p", "hang", None, {})])
    with pytest.raises(RewardError, match="closed before all responses were scored"):
        waiting.result(timeout=10)
    assert len(process_ids) == 2
    assert all(is_gone(process_id) for process_id in process_ids)


PARENT = """
import sys, time
sys.path.insert(0, {tests!r})
from pathlib import Path
from test_rewards_processes import make_pool
from rljob_trainer.rewards.base import RewardRequest
pool = make_pool(Path({folder!r}))
pool.wait_until_ready()
pool.submit([RewardRequest("p", "hang", None, {{}}), RewardRequest("p", "hang_in_c", None, {{}})])
print(*pool.process_ids(), flush=True)
time.sleep(600)
"""


def test_nothing_outlives_a_killed_parent(folder: Path) -> None:
    script = PARENT.format(tests=str(Path(__file__).parent), folder=str(folder))
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        process_ids = [int(word) for word in parent.stdout.readline().split()]
        process_ids.append(grandchild(folder))
        parent.send_signal(signal.SIGKILL)
    assert len(process_ids) == 3
    assert all(is_gone(process_id) for process_id in process_ids)


def test_hundreds_of_easy_responses_take_milliseconds(pool: ScorerPool) -> None:
    pool.wait_until_ready()
    requests = [RewardRequest("p" * 50, "number 1", "182", {"prompt": "p" * 50, "answer": "182"})] * 512
    seconds = [math.inf]
    # About 20 ms on two idle cores; a machine that is busy now is not busy all the time.
    while min(seconds) >= 0.4 and len(seconds) <= 50:
        started = time.monotonic()
        pool.submit(requests).result(timeout=60)
        seconds.append(time.monotonic() - started)
    assert min(seconds) < 0.4, seconds


def wait_for(ask: Callable[[], Found]) -> Found:
    give_up_at = time.monotonic() + 60
    while not (found := ask()):
        assert time.monotonic() < give_up_at
        time.sleep(0.01)
    return found


def grandchild(folder: Path) -> int:
    """The process that the hanging scorer has started, as printed by it."""
    logs = folder / "logs"
    found = wait_for(lambda: re.search(r"grandchild (\d+)\n", "".join(path.read_text() for path in logs.iterdir())))
    return int(found[1]) if found else 0


def is_gone(process_id: int) -> bool:
    """Whether the process ends."""
    return wait_for(lambda: state_of(process_id) in ("", "Z"))


def state_of(process_id: int) -> str:
    with suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0]
    return ""
