"""The commands for results of jobs on a cluster. To start fast, each command imports its modules only when it runs."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Annotated

import typer

from rljob.results.selection import Part
from rljob_cli import arguments
from rljob_cli.application import app, console
from rljob_cli.arguments import Context, JobName, Kubeconfig, Namespace
from rljob_cli.errors import CliError

Image = Annotated[
    str | None,
    typer.Option(
        help="Image of the pod that reads the files; it needs only python3.", show_default="the image of the job's pods"
    ),
]


def _treat_termination_as_ctrl_c() -> None:
    """Makes these commands end as after Ctrl-C, with their pod deleted, also when the terminal is closed."""
    for name in ("SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, signal.default_int_handler)


@app.command("view")
def view_command(
    run: arguments.RunToView,
    against: arguments.Against = None,
    output: arguments.PageFile = None,
    json_file: arguments.PageJson = None,
    watch: arguments.WatchRun = False,
    is_job: arguments.IsJob = False,
    image: Image = None,
    context: Context = None,
    namespace: Namespace = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Write one HTML page about a run: verdict, curves, responses, tokens, timeline, memory and job.

    If there is no folder RUN, the run is a job on the cluster: the files that the page needs are copied first, as
    `rljob get-results` does it. RUN may also be the folder of a job in a bucket: s3://BUCKET/FOLDER.
    """
    from rljob_cli.local.view import ViewOptions, view

    options = ViewOptions(Path(run), against, output, json_file, watch)
    if run.startswith("s3://"):
        from rljob_cli.cluster.view_bucket import view_bucket

        raise typer.Exit(view_bucket(run, options, console()))
    if not is_job and ("/" in run or os.path.exists(run)):
        raise typer.Exit(view(options, console()))
    from rljob.cluster import ClusterOptions
    from rljob_cli.cluster.view_job import view_job

    _treat_termination_as_ctrl_c()
    cluster = ClusterOptions(context, namespace, kubeconfig)
    raise typer.Exit(view_job(cluster, run, image, options, console(), may_be_folder=not is_job))


@app.command("get-results")
def get_results_command(
    name: JobName,
    folder: Annotated[
        Path | None, typer.Argument(metavar="FOLDER", help="Folder for the copy.", show_default="results/NAME")
    ] = None,
    only: Annotated[
        list[Part] | None,
        typer.Option(
            metavar="PART",
            help=f"Copy only this part: {', '.join(Part)}. Can be repeated.",
            show_default="all except checkpoints and logs",
        ),
    ] = None,
    checkpoints: Annotated[bool, typer.Option("--checkpoints", help="Copy the complete checkpoints, too.")] = False,
    logs: Annotated[bool, typer.Option("--logs", help="Copy the logs, too.")] = False,
    image: Image = None,
    context: Context = None,
    namespace: Namespace = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Copy the results of a job from the cluster, and write the page of the run.

    Copies everything in the job's run folder except logs; checkpoints only with --checkpoints. With --only, the page is
    written only if `page` is one of the parts.

    A small pod in the job's namespace reads the job's claim, and is deleted at the end. A bucket is read without a pod,
    with the credentials in the environment. The folder looks like that of
    `rljob run`. A copy that was stopped continues when the command runs again; files that have not changed are not
    copied again. The job may still be running.

    Examples:

    rljob get-results my-job --only model

    rljob get-results my-job ./copy --checkpoints --logs
    """
    from rljob.cluster import ClusterOptions, connect
    from rljob.results.selection import selection_of
    from rljob_cli.cluster.results import ResultsOptions, get_results

    if only and (checkpoints or logs):
        raise CliError("--only: cannot be combined with --logs or --checkpoints; write --only model --only logs")
    _treat_termination_as_ctrl_c()
    options = ResultsOptions(folder, selection_of(only or (), checkpoints=checkpoints, logs=logs), image)
    cluster = connect(ClusterOptions(context, namespace, kubeconfig))
    raise typer.Exit(get_results(cluster, name, options, console()))


@app.command("dashboard")
def dashboard_command(
    name: JobName,
    port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="Port on this machine.", show_default="a free port")
    ] = None,
    context: Context = None,
    namespace: Namespace = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Open a connection to Ray's dashboard of a job, and print its URL and its token. Ctrl-C ends it."""
    from rljob.cluster import ClusterOptions, connect
    from rljob_cli.cluster.dashboard import show_dashboard

    _treat_termination_as_ctrl_c()
    cluster = connect(ClusterOptions(context, namespace, kubeconfig))
    raise typer.Exit(show_dashboard(cluster, name, port, console()))
