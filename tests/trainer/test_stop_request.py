"""A stop that arrives while Python runs a callback, which drops exceptions, is raised again later."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import os, signal, sys, time
from rljob_trainer.controller.stop_request import StopRequest

class Interrupted:
    def __del__(self):
        signal.raise_signal(signal.SIGINT)

StopRequest().install()
try:
    Interrupted()
    print("lost at first", flush=True)
    time.sleep(600)
    sys.exit(1)
except KeyboardInterrupt:
    sys.exit(130)
"""


def test_a_stop_in_a_callback_is_not_lost() -> None:
    ended = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 130, ended.stderr
    assert ended.stdout == "lost at first\n"
    assert ended.stderr == ""
