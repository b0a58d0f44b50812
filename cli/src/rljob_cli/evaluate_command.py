"""The command `rljob evaluate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rljob_cli import arguments
from rljob_cli.application import app, console
from rljob_cli.arguments import JobFile

CheckpointToEvaluate = Annotated[
    str | None,
    typer.Option(
        "--checkpoint",
        metavar="FOLDER",
        help="Folder of a run for its newest checkpoint, RUN@step-20 for that of step 20, or the folder of an exported "
        "model.",
        show_default="the job's own model",
    ),
]
EvaluationNames = Annotated[
    list[str] | None,
    typer.Option("--evaluation", metavar="NAME", help="Run only this evaluation. Can be repeated."),
]
EvaluationFolder = Annotated[
    Path | None, typer.Option("--run-folder", help="Folder for results.", show_default="runs/<name>-evaluation-<n>")
]


@app.command("evaluate")
def evaluate(
    file: JobFile,
    checkpoint: CheckpointToEvaluate = None,
    evaluations: EvaluationNames = None,
    workers: arguments.Workers = None,
    run_folder: EvaluationFolder = None,
    code: arguments.Code = None,
    ray: arguments.RayAddress = None,
    values: arguments.SetValues = None,
) -> None:
    """Run the evaluations of a job on this machine, without training, and print their metrics.

    Examples:

    rljob evaluate job.yaml --checkpoint runs/x

    rljob evaluate job.yaml --checkpoint runs/x@step-40 --evaluation gsm8k

    rljob evaluate job.yaml --checkpoint runs/x/export-best
    """
    from rljob_cli.local.evaluation_job import EvaluationOptions
    from rljob_cli.local.run import run
    from rljob_cli.local.run_options import RunOptions

    evaluation = EvaluationOptions(checkpoint, tuple(evaluations or ()))
    changes = arguments.changes(None, values)
    raise typer.Exit(
        run(RunOptions(file, workers, False, run_folder, code, ray, changes, evaluation=evaluation), console())
    )
