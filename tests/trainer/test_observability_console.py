"""What people see: progress lines, log lines, durations."""

from __future__ import annotations

import io
import logging
import os
import subprocess
import sys

import pytest
from rich.console import Console

from rljob_api.v1alpha1.dataset import Evaluation, scores_of
from rljob_testing.messages import Mentions
from rljob_trainer.observability.log import printable, set_up_logging
from rljob_trainer.observability.progress import ProgressDisplay, duration


def test_without_a_terminal_each_step_is_one_line() -> None:
    stream = io.StringIO()
    moments = iter([0.0, 4.0])
    console, scores = Console(file=stream, width=60), scores_of([Evaluation()])
    display = ProgressDisplay(console, 10, num_devices=2, clock=lambda: next(moments), evaluations=scores)
    display.start(0)
    display.write(0, {"eval/heldout/greedy": 0.25})
    display.write(
        1,
        {
            "critic/rewards/mean": 0.5,
            "outcome/excluded_fraction": 0.25,
            "perf/throughput": 600.0,
            "timing_s/step": 4.0,
            "timing_s/rollout": 2.5,
            "timing_s/generate": 2.25,
            "timing_s/save": 0.1,
        },
    )
    display.close()
    assert stream.getvalue().splitlines() == [
        "step 0/10: eval 0.250",
        "step 1/10: reward 0.500, eval 0.250, 25% of the responses excluded, 1,200 tokens/s, ETA 36 s, 4.00 s (rollout "
        "2.50, save 0.10)",
    ]


@pytest.mark.parametrize("output", ["pipe", "/dev/full"])
def test_a_run_continues_when_its_output_cannot_be_written(output: str) -> None:
    program = (
        "import sys\n"
        "from rich.text import Text\n"
        "from rljob_trainer.observability.log import set_up_logging\n"
        "from rljob_trainer.observability.progress import LastingConsole\n"
        "set_up_logging()\n"
        "console = LastingConsole()\n"
        "for step in range(3):\n"
        "    console.print(Text('step'))\n"
        "    print('of user code')\n"
        "sys.exit(3)\n"
    )
    if output == "pipe":
        reads, writes = os.pipe()
        os.close(reads)
    else:
        writes = os.open(output, os.O_WRONLY)
    with open(writes, "wb") as closed:
        done = subprocess.run([sys.executable, "-c", program], stdout=closed, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 3
    [line] = done.stderr.splitlines()
    assert line == Mentions("standard output", "the run continues")


def test_log_lines_that_cannot_be_written_are_lost() -> None:
    program = (
        "import logging, sys\n"
        "from rljob_trainer.observability.log import set_up_logging\n"
        "log = set_up_logging()\n"
        "for step in range(3):\n"
        "    log.info('step')\n"
        "sys.exit(3)\n"
    )
    with open("/dev/full", "wb") as full:
        done = subprocess.run([sys.executable, "-c", program], stderr=full, stdout=subprocess.PIPE, text=True)
    assert (done.returncode, done.stdout) == (3, "")


def test_on_a_terminal_there_is_a_bar_with_the_step() -> None:
    stream = io.StringIO()
    console = Console(file=stream, width=120, force_terminal=True)
    display = ProgressDisplay(console, 10, num_devices=1, clock=iter(range(100)).__next__)
    display.start(4)
    display.write(5, {"critic/rewards/mean": 0.5})
    display.show("[bold]not markup")
    display.close()
    assert "5/10" in stream.getvalue()
    assert "reward 0.500" in stream.getvalue()
    assert "[bold]not markup" in stream.getvalue()


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0 s"), (59.6, "1 min 00 s"), (185, "3 min 05 s"), (7800, "2 h 10 min")]
)
def test_durations_are_readable(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain äß漢", "plain äß漢"),
        ("a\x1b[31mb\r\n\t", "a\\x1b[31mb\\r\\n\\t"),
        ("\u202egnp.exe\u2028", "\\u202egnp.exe\\u2028"),
        ("\ud83d", "\\ud83d"),
    ],
)
def test_text_is_made_printable(text: str, shown: str) -> None:
    assert printable(text, 100) == shown


def test_long_text_is_shortened_with_a_note() -> None:
    assert printable("abcdef", 4) == "abcd... (2 more characters)"


def test_log_lines_are_bounded_escaped_and_not_duplicated() -> None:
    stream = io.StringIO()
    set_up_logging(stream=stream)
    set_up_logging(stream=stream)
    logger = logging.getLogger("rljob_trainer.rewards")
    logger.info("reward said %s", "\x1b]0;title\x07" + "y" * 9000)
    logger.debug("not shown")
    lines = stream.getvalue().splitlines()
    assert len(lines) == 1
    assert "INFO rljob_trainer.rewards: reward said \\x1b]0;title\\x07yyy" in lines[0]
    assert len(lines[0]) < 4200
