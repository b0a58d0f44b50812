"""`rljob init`, `rljob plot`, and how fast the command starts."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from rljob_api.constants import CONTRACT_VERSION
from rljob_api.job_file import load_job_file
from rljob_cli.__main__ import main_of_kubectl
from rljob_cli.arguments import EXIT_CODES
from rljob_testing.cli.rljob_command import JobFolder
from rljob_testing.messages import Mentions

REPOSITORY = Path(__file__).parents[2]


Rljob = Callable[..., tuple[int, str, str]]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that the commands run in."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_version_shows_the_package_and_the_api_version(rljob: Rljob) -> None:
    project = tomllib.loads((REPOSITORY / "cli" / "pyproject.toml").read_text())["project"]
    code, output, _ = rljob("--version")
    documents = f"contract version {CONTRACT_VERSION} (documents between operator and trainer)"
    assert (code, output) == (0, f"rljob {project['version']}, rljob.dev/v1alpha1, {documents}\n")


def test_a_misspelled_command_gets_a_suggestion_and_an_unknown_one_does_not(rljob: Rljob) -> None:
    code, _, errors = rljob("submt")
    assert code == 2
    assert "No such command 'submt'. Did you mean 'submit'?" in errors
    code, _, errors = rljob("start")
    assert code == 2
    assert "No such command 'start'." in errors
    assert "status" not in errors


def test_the_help_of_every_command_has_the_exit_codes_of_the_page(
    rljob: Rljob, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "1000")
    section = (REPOSITORY / "docs/run-files.md").read_text().partition("| command | 0 |")[2]
    of_page: dict[str, set[str]] = {}
    for row in re.findall(r"^\| `rljob (.*)$", section, re.MULTILINE):
        names, zero, one, others = (cell.strip() for cell in row.split("|")[:4])
        codes = {code for code, meaning in (("0", zero), ("1", one)) if meaning} | set(re.findall(r"\b\d+\b", others))
        for name in re.findall(r"[a-z]+(?:-[a-z]+)*", re.sub("rljob|--watch", "", names)):
            of_page[name] = of_page.get(name, set()) | codes
    assert of_page.keys() == EXIT_CODES.keys()
    for name, codes in of_page.items():
        code, output, _ = rljob(name, "--help")
        assert code == 0
        [line] = [line for line in output.splitlines() if "Exit codes:" in line]
        assert set(re.findall(r"(?:: |; )(\d+) ", line.partition("Exit codes")[2])) == codes, name


def test_the_help_fits_the_width_of_the_terminal(rljob: Rljob, monkeypatch: pytest.MonkeyPatch) -> None:
    for columns in (80, 1000):
        monkeypatch.setenv("COLUMNS", str(columns))
        for name in EXIT_CODES:
            output = rljob(name, "--help")[1]
            head, _, arguments = output.partition("╭")
            assert "[[" not in head
            paragraphs = [each.strip().splitlines() for each in re.split(r"\n\s*\n", head.strip())]
            for lines in paragraphs:
                # A line ends only where the next word does not fit.
                for line, following in pairwise(map(str.strip, lines)):
                    assert len(f" {line} {following.split()[0]} ") > columns, name
            assert "<list[model" not in arguments, name


def test_an_option_with_a_wrong_word_is_reported_before_the_cluster_is_looked_for(rljob: Rljob, tmp_path: Path) -> None:
    config = ["--kubeconfig", str(tmp_path / "none")]
    for arguments, message in {
        ("wait", "x", "--for", "Nonsense"): "cannot wait for 'Nonsense'",
        ("logs", "x", "--since", "0s"): "--since: must be at least 1s (seen: 0s)",
        ("list", "--sort-by", "foo"): "--sort-by foo: there is no such column",
        ("get-results", "x", "--only", "model", "--logs"): "--only: cannot be combined with --logs or --checkpoints",
    }.items():
        assert rljob(*arguments, *config) == (2, "", Mentions(f"error: {message}")), arguments


def test_the_starter_file_is_valid_and_is_not_overwritten(rljob: Rljob, folder: Path) -> None:
    code, output, _ = rljob("init", "mine.yaml")
    assert (code, output) == (0, Mentions("wrote mine.yaml", "rljob validate mine.yaml", "rljob run mine.yaml"))
    assert load_job_file(folder / "mine.yaml").metadata.name == "my-first-run"
    assert rljob("validate", "mine.yaml")[0] == 0
    (folder / "mine.yaml").write_text("my changes")
    code, _, errors = rljob("init", "mine.yaml")
    assert code == 2
    assert errors == Mentions("error: mine.yaml:", "exists", "another name")
    assert (folder / "mine.yaml").read_text() == "my changes"


@pytest.mark.parametrize(
    ("name", "written"),
    [("my-job", "my-job.yaml"), ("jobs/v1.5", "jobs/v1.5.yaml"), ("my-job.yml", "my-job.yml"), ("a b", "a b.yaml")],
)
def test_the_starter_file_has_a_name_of_a_job_file(rljob: Rljob, folder: Path, name: str, written: str) -> None:
    (folder / "jobs").mkdir()
    code, output, _ = rljob("init", name)
    assert code == 0
    assert output.startswith(f"wrote {written}; next: rljob validate ")
    assert load_job_file(folder / written).metadata.name == "my-first-run"


def test_the_starter_file_trains_like_the_measured_example(rljob: Rljob, folder: Path) -> None:
    rljob("init", "mine.yaml")
    mine = load_job_file(folder / "mine.yaml").spec.training
    example = load_job_file(REPOSITORY / "examples" / "smollm2-arithmetic.yaml").spec.training
    for part in ("model", "dataset", "rewards", "optimizer", "steps", "batch_size"):
        assert mine.model_dump()[part] == example.model_dump()[part]
    assert mine.rollout.group_size == example.rollout.group_size


def test_the_starter_files_with_an_environment_are_the_example_that_was_measured(rljob: Rljob, folder: Path) -> None:
    code, output, _ = rljob("init", "game.yaml", "--environment")
    assert (code, output) == (0, Mentions("wrote game.yaml and guess_letter.py; next: rljob validate game.yaml"))
    assert rljob("validate", "game.yaml")[0] == 0
    mine = load_job_file(folder / "game.yaml").spec.training
    example = load_job_file(REPOSITORY / "examples" / "guess_letter/guess-letter.yaml").spec.training
    assert (folder / "guess_letter.py").read_text() == (
        REPOSITORY / "examples" / "guess_letter/guess_letter.py"
    ).read_text()
    assert mine.model == example.model
    assert mine.environment is not None
    assert example.environment is not None
    assert mine.environment.classes == example.environment.classes
    assert mine.environment.max_turns == example.environment.max_turns
    assert mine.rollout == example.rollout
    assert mine.optimizer == example.optimizer


def test_an_existing_environment_is_not_overwritten_and_no_job_is_written(rljob: Rljob, folder: Path) -> None:
    (folder / "guess_letter.py").write_text("mine")
    code, _, errors = rljob("init", "game", "--environment")
    assert (code, errors) == (2, Mentions("guess_letter.py:", "exists", "another folder"))
    assert (folder / "guess_letter.py").read_text() == "mine"
    assert not (folder / "game.yaml").exists()


def test_the_starter_file_needs_an_existing_folder(rljob: Rljob) -> None:
    code, _, errors = rljob("init", "nowhere/job.yaml")
    assert code == 2
    assert errors == Mentions("nowhere/job.yaml:", "written", "No such file or directory")


@pytest.mark.parametrize(
    ("name", "advice"), [(".", "job.yaml"), ("", "job.yaml"), ("..", "../job.yaml"), ("jobs", "jobs/job.yaml")]
)
def test_a_folder_is_not_a_starter_file(rljob: Rljob, folder: Path, name: str, advice: str) -> None:
    (folder / "jobs").mkdir()
    code, output, errors = rljob("init", name)
    assert (code, output, errors) == (2, "", Mentions("error:", "is a folder", f"such as {advice}"))
    assert errors.count("\n") == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ("init", "NAME"),
        ("plan", "--from-run", "NAME"),
        ("logs", "job", "--storage", "NAME"),
        ("list", "--kubeconfig", "NAME"),
    ],
)
@pytest.mark.usefixtures("folder")
def test_a_path_that_cannot_be_looked_at_is_an_error_without_a_traceback(
    rljob: Rljob, arguments: tuple[str, ...]
) -> None:
    name = "a" * 300
    code, _, errors = rljob(*(name if each == "NAME" else each for each in arguments))
    assert (code, errors) == (2, Mentions(f"error: {name}", "File name too long"))


def test_plots_are_drawn_again_from_the_metrics(workplace: JobFolder) -> None:
    workplace.run_folder.mkdir(parents=True)
    rows = ({"step": step, "wall_time": 0.0, "critic/rewards/mean": 0.5} for step in (1, 2, 3))
    (workplace.run_folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    process = workplace.command("plot", "runs/small")
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output
    assert (workplace.run_folder / "plots" / "overview.png").exists()
    assert (workplace.run_folder / "plots" / "reward.png").exists()


def test_plotting_a_foreign_folder_is_rejected(workplace: JobFolder) -> None:
    process = workplace.command("plot", "code")
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 2
    assert output == Mentions("metrics.jsonl:", "no such file")


def test_the_command_line_imports_neither_the_trainer_nor_its_libraries() -> None:
    """The module with the commands' names does not even import the contract's types."""
    heavy = ("torch", "ray", "numpy", "rljob_trainer", "matplotlib", "transformers", "kubernetes", "rljob_operator")
    program = (
        "import importlib, pkgutil, sys, rljob_cli.__main__\n"
        "print([name for name in ('pydantic', 'ruamel.yaml', 'rljob_api.v1alpha1') if name in sys.modules])\n"
        "for module in pkgutil.walk_packages(rljob_cli.__path__, 'rljob_cli.'): importlib.import_module(module.name)\n"
        f"print([name for name in {heavy} if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout == "[]\n[]\n"


def test_the_plugin_of_kubectl_is_the_same_command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("COLUMNS", "100")

    def run(*arguments: str) -> tuple[object, str, str]:
        monkeypatch.setattr(sys, "argv", ["kubectl-rljob", *arguments])
        with pytest.raises(SystemExit) as ended:
            main_of_kubectl()
        return ended.value.code, *capsys.readouterr()

    code, output, errors = run("status", "--help")
    assert (code, errors) == (0, "")
    assert "Usage: kubectl rljob status [OPTIONS]" in output
    # Options before and after the command select the cluster.
    config = str(tmp_path / "none")
    for arguments in (["--kubeconfig", config, "status", "x"], ["status", "x", "--kubeconfig", config]):
        assert run(*arguments) == (2, "", f"error: --kubeconfig {config}: no such file; correct it\n")
    code, _, errors = run("-n", "team-a", "init")
    assert code == 2
    assert "--namespace: the command init does not use a cluster" in errors
