"""`rljob init`, `rljob plot`, and how fast the command starts."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

from rljob_api.constants import CONTRACT_VERSION
from rljob_api.job_file import load_job_file
from rljob_testing.command_line import Workplace

REPOSITORY = Path(__file__).parents[2]


def finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    output, _ = process.communicate(timeout=60)
    return process.returncode, output


def test_the_version_is_that_of_the_package_and_of_what_it_speaks(workplace: Workplace) -> None:
    project = tomllib.loads((REPOSITORY / "operator" / "pyproject.toml").read_text())["project"]
    code, output = finish(workplace.command("--version"))
    assert (code, output) == (0, f"rljob {project['version']}, rljob.dev/v1alpha1, contract {CONTRACT_VERSION}\n")


def test_a_misspelled_command_is_told_which_was_meant_and_another_is_not(workplace: Workplace) -> None:
    code, output = finish(workplace.command("submt"))
    assert code == 2
    assert "No such command 'submt'. Did you mean 'submit'?" in output
    code, output = finish(workplace.command("start"))
    assert code == 2
    assert "No such command 'start'." in output
    assert "status" not in output


def test_the_starter_file_is_valid_and_is_not_overwritten(workplace: Workplace) -> None:
    code, output = finish(workplace.command("init", "mine.yaml"))
    assert (code, output) == (0, "wrote mine.yaml; next: rljob validate mine.yaml, then rljob run mine.yaml\n")
    assert load_job_file(workplace.folder / "mine.yaml").metadata.name == "my-first-run"
    code, output = finish(workplace.command("validate", "mine.yaml"))
    assert code == 0, output
    (workplace.folder / "mine.yaml").write_text("my changes")
    code, output = finish(workplace.command("init", "mine.yaml"))
    assert code == 2
    assert output == "error: mine.yaml: exists already; give another name\n"
    assert (workplace.folder / "mine.yaml").read_text() == "my changes"


def test_the_starter_file_trains_as_the_example_that_was_measured(workplace: Workplace) -> None:
    finish(workplace.command("init", "mine.yaml"))
    mine = load_job_file(workplace.folder / "mine.yaml").spec.training
    example = load_job_file(REPOSITORY / "examples" / "smollm2-arithmetic.yaml").spec.training
    for part in ("model", "dataset", "rewards", "optimizer", "steps", "batch_size"):
        assert mine.model_dump()[part] == example.model_dump()[part]
    assert mine.rollout.group_size == example.rollout.group_size


def test_the_starter_file_can_only_be_written_where_there_is_a_folder(workplace: Workplace) -> None:
    code, output = finish(workplace.command("init", "nowhere/job.yaml"))
    assert code == 2
    assert "nowhere/job.yaml: cannot be written (No such file or directory)" in output


def test_plots_are_drawn_again_from_the_metrics(workplace: Workplace) -> None:
    workplace.run()
    code, output = finish(workplace.command("plot", "runs/small"))
    assert code == 0, output
    assert (workplace.run_folder / "plots" / "overview.png").exists()
    assert (workplace.run_folder / "plots" / "reward.png").exists()


def test_plotting_something_else_is_refused(workplace: Workplace) -> None:
    code, output = finish(workplace.command("plot", "code"))
    assert code == 2
    assert "metrics.jsonl: no such file" in output


def test_the_command_line_loads_neither_the_trainer_nor_its_libraries() -> None:
    heavy = ("torch", "ray", "numpy", "rljob_trainer", "matplotlib", "transformers", "kubernetes", "rljob_operator")
    program = f"import sys, rljob_cli.__main__; print([name for name in {heavy} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout == "[]\n"
