"""`rljob` where its output accepts few characters, or is closed."""

from __future__ import annotations

import subprocess
import sys

import pytest

from rljob_api.job_file import load_job_text
from rljob_testing.cli.rljob_command import JobFolder
from rljob_testing.messages import Mentions
from rljob_testing.settings import inherited_environment

FEW_CHARACTERS = [
    {"PYTHONIOENCODING": "ascii"},
    {"PYTHONIOENCODING": "latin-1"},
    {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
]


@pytest.mark.parametrize("variables", FEW_CHARACTERS, ids=["ascii", "latin-1", "locale C"])
def test_a_message_with_any_text_is_printed(workplace: JobFolder, variables: dict[str, str]) -> None:
    text = workplace.job_file.read_text().replace("steps: 3", "steps: 十")
    workplace.job_file.write_text(text, encoding="utf-8")
    process = workplace.command("validate", "job.yaml", **variables)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 2
    message, line = output.splitlines()[:2]
    assert message == Mentions("job.yaml:8:12: spec.training.steps:", '(seen: "\\u5341")')
    assert line == "    8 |     steps: \\u5341"


@pytest.mark.parametrize("arguments", [("validate", "job.yaml"), ("--version",), ("plan", "--help"), ("bogus",)])
def test_a_terminal_of_zero_columns_gets_the_same_output(workplace: JobFolder, arguments: tuple[str, ...]) -> None:
    outputs = [workplace.command(*arguments, COLUMNS=columns).communicate(timeout=60)[0] for columns in ("0", "80")]
    assert outputs[0] == outputs[1] != ""


def test_machine_readable_output_is_utf8(workplace: JobFolder) -> None:
    text = workplace.job_file.read_text() + "  checkpoint: {storage: {persistentVolumeClaim: results}}\n"
    text += "  env: [{name: GREETING, value: '你好 😀'}]\n"
    workplace.job_file.write_text(text, encoding="utf-8")
    process = workplace.command("validate", "--resolved", "job.yaml", PYTHONIOENCODING="ascii")
    output, _ = process.communicate(timeout=60)
    verdict, _, resolved = output.partition("\n")
    assert (process.returncode, verdict) == (0, "job.yaml: RLJob small is valid (pool main: 1 node x 1 GPU)")
    assert load_job_text(resolved).spec.env[0].value == "你好 😀"


def test_a_run_whose_output_is_closed_continues(workplace: JobFolder) -> None:
    command = [sys.executable, "-m", "rljob_cli", "run", "job.yaml", "--code", "code"]
    done = subprocess.run(
        ["sh", "-c", 'exec "$@" >&-', "sh", *command],
        cwd=workplace.folder,
        env=inherited_environment(),
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")
    # The first file that is opened would get the number of the standard output, and everything that is printed.
    assert (workplace.run_folder / ".lock").read_text().strip().isdecimal()
    assert len((workplace.run_folder / "metrics.jsonl").read_text().splitlines()) == 3
