"""The `rljob` command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from rljob_api.contract import ExitCode
from rljob_api.errors import ContractError
from rljob_cli import plot as plotting
from rljob_cli import run as running
from rljob_cli import starter, validate
from rljob_cli.errors import CliError

app = typer.Typer(
    name="rljob",
    help="Reinforcement-learning post-training jobs: one file, on this machine or on a cluster.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

JobFile = Annotated[Path, typer.Argument(metavar="FILE", help="A job file (YAML).")]


@app.command("init")
def init_command(
    file: Annotated[Path, typer.Argument(metavar="[FILE]", help="The file to write.")] = Path("job.yaml"),
) -> None:
    """Write a commented job file to start from."""
    starter.write_starter(file)
    _console().print(Text(f"wrote {file}; next: rljob validate {file}, then rljob run {file}"), soft_wrap=True)


@app.command("validate")
def validate_command(file: JobFile) -> None:
    """Check a job file; prints every error with its line."""
    if validate.validate_file(file, _console()) is None:
        raise typer.Exit(ExitCode.CONFIGURATION)


@app.command("run")
def run_command(
    file: JobFile,
    workers: Annotated[
        int | None,
        typer.Option(min=1, help="Workers per pool; else its size, at most the devices found."),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest complete checkpoint.")] = False,
    run_folder: Annotated[Path | None, typer.Option(help="Where results go.", show_default="runs/<name>")] = None,
    code: Annotated[
        Path | None, typer.Option(help="A further folder with Python for rewards; the job file's is always used.")
    ] = None,
) -> None:
    """Run a job on this machine."""
    options = running.RunOptions(file, workers, resume, run_folder, code)
    raise typer.Exit(running.run(options, _console()))


@app.command("plot")
def plot_command(
    run_folder: Annotated[Path, typer.Argument(metavar="RUN_FOLDER", help="Such as runs/<name>.")],
) -> None:
    """Draw the curves of a run again."""
    raise typer.Exit(plotting.plot(run_folder))


def main() -> None:
    """Runs the command; errors that the user can mend are one text on standard error, without a traceback."""
    try:
        app()
    except CliError as error:
        Console(stderr=True).print(Text(f"error: {error}"), soft_wrap=True)
        raise SystemExit(error.exit_code) from None
    except ContractError as error:
        Console(stderr=True).print(Text(str(error)), soft_wrap=True)
        raise SystemExit(ExitCode.CONFIGURATION) from None


def _console() -> Console:
    return Console(highlight=False)


if __name__ == "__main__":
    main()
