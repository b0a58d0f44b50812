"""The `rljob` command."""

from __future__ import annotations

import errno
import os
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from rljob_api.constants import ExitCode
from rljob_api.errors import ContractError
from rljob_api.standard_streams import accept_all_characters
from rljob_cli import init, validate, versions
from rljob_cli.arguments import Commands, Context, JobFile, JobName, Kubeconfig, Namespace
from rljob_cli.cluster import delete, explain, listing, logs, printed_objects, submit, watching
from rljob_cli.cluster import status as statuses
from rljob_cli.cluster.client import ClusterOptions, connect
from rljob_cli.cluster.log_options import Container, LogOptions
from rljob_cli.cluster.steering import Steering
from rljob_cli.errors import CliError
from rljob_cli.local import plot as plotting
from rljob_cli.local import run as running
from rljob_cli.plan import arguments as of_plan

app = typer.Typer(
    name="rljob",
    cls=Commands,
    suggest_commands=False,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Wait = Annotated[bool, typer.Option("--wait", help="Return when it is so, or when the job has ended.")]
Watch = Annotated[bool, typer.Option("--watch", help="Show it until it has ended: 0 for Complete, 1 for Failed.")]


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
        _console().print(Text(versions.version_text()), soft_wrap=True)
        raise typer.Exit


@app.callback()
def every_command(
    _version: Annotated[
        bool, typer.Option("--version", help="Print versions and end.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """Reinforcement-learning post-training jobs: one file, on this machine or on a cluster."""


@app.command("init")
def init_command(
    file: Annotated[Path, typer.Argument(metavar="[FILE]", help="The file to write.")] = Path("job.yaml"),
) -> None:
    """Write a commented job file to start from."""
    init.write_starter(file)
    name = shlex.quote(str(file))
    _console().print(Text(f"wrote {file}; next: rljob validate {name}, then rljob run {name}"), soft_wrap=True)


@app.command("validate")
def validate_command(
    file: JobFile,
    resolved: Annotated[
        bool,
        typer.Option("--resolved", help="Print the job with every default and what its recipe stands for."),
    ] = False,
) -> None:
    """Check a job file; prints every error with its line.

    With --resolved the job alone goes to standard output, as a job file, and the rest to standard error.
    """
    job = validate.validate_file(file, _console(stderr=resolved))
    if job is None:
        raise typer.Exit(ExitCode.CONFIGURATION)
    if resolved:
        validate.print_resolved(job, _console())


@app.command("plan")
def plan_command(
    file: of_plan.JobToPlan = None,
    from_run: of_plan.FromRun = None,
    calibrate: of_plan.Calibrate = None,
    cluster: of_plan.Nodes = None,
    from_cluster: of_plan.FromCluster = False,
    kinds: of_plan.Kinds = None,
    gpu_memory: of_plan.GpuMemory = None,
    gpu_tflops: of_plan.GpuTflops = None,
    gpu_bandwidth: of_plan.GpuBandwidth = None,
    mean_prompt: of_plan.MeanPrompt = None,
    mean_response: of_plan.MeanResponse = None,
    model_config: of_plan.ModelConfig = None,
    profile: of_plan.Profile = None,
    searches: of_plan.Search = False,
    write: of_plan.Write = None,
    is_explained: of_plan.Explain = False,
    as_json: of_plan.AsJson = False,
    context: of_plan.PlanContext = None,
    kubeconfig: of_plan.PlanKubeconfig = None,
) -> None:
    """Say what a job needs before it takes a GPU: memory, time, and where its roles are best.

    Give a job file, or a run's folder with --from-run or --calibrate.

    GPUs are those that an option says, else those of the pools' nodeSelector, else this machine's.

    rljob plan job.yaml --gpu H100 --mean-response 800

    rljob plan job.yaml --cluster 4x8xH100 --search --write better.yaml

    rljob plan --from-run runs/x

    Exit codes: 0 its memory fits, 1 it does not, 2 something is wrong with the file or an option. With --search 0 means
    that the job fits somewhere as it is, in other pools and places at most; with --write too, that what was written
    fits.
    """
    # Other commands need none of it.
    from rljob_cli.plan.command import PlanOptions, plan
    from rljob_cli.plan.gpus import GpuOptions
    from rljob_planner.job import LengthOptions

    asked = ClusterOptions(context, None, kubeconfig) if from_cluster else None
    options = PlanOptions(
        file=file,
        from_run=from_run,
        calibrate=tuple(calibrate or ()),
        gpus=GpuOptions(cluster, asked, tuple(kinds or ()), gpu_memory, gpu_tflops, gpu_bandwidth),
        lengths=LengthOptions(mean_prompt, mean_response),
        model_config=model_config,
        profile=profile,
        search=searches,
        write=write,
        explain=is_explained,
        as_json=as_json,
    )
    raise typer.Exit(plan(options, _console()))


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
        Path | None,
        typer.Option(help="A further folder with Python for rewards; with --ray it goes along instead."),
    ] = None,
    ray: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="Run on an existing Ray cluster (HOST:PORT, or auto for one on this machine), with the file's pools. "
            "The folder with the code goes along; the run folder must be on storage that all nodes see.",
        ),
    ] = None,
) -> None:
    """Run a job on this machine, or on a Ray cluster."""
    options = running.RunOptions(file, workers, resume, run_folder, code, ray)
    raise typer.Exit(running.run(options, _console()))


@app.command("plot")
def plot_command(
    run_folder: Annotated[Path, typer.Argument(metavar="RUN_FOLDER", help="Such as runs/<name>.")],
) -> None:
    """Draw the curves of a run again."""
    raise typer.Exit(plotting.plot(run_folder))


@app.command("submit")
def submit_command(
    file: JobFile,
    watch: Watch = False,
    context: Context = None,
    namespace: Namespace = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Run a job on a cluster.

    A job that is there already with the same spec is found again; a changed runPolicy is applied to it.
    """
    options = ClusterOptions(context, namespace, kubeconfig)
    submission = submit.submit(file, options, _console())
    if watch:
        name = submission.job.metadata.name
        again = f"rljob status {name}{submission.flags} --watch"
        raise typer.Exit(watching.watch_job(submission.cluster, name, _console(), again))


@app.command("status")
def status_command(
    name: JobName,
    watch: Watch = False,
    output: Annotated[printed_objects.OutputFormat | None, typer.Option("--output", "-o", help="For programs.")] = None,
    context: Context = None,
    namespace: Namespace = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Show where a job on a cluster is.

    Exit codes: 0 shown, or with --watch Complete; 1 with --watch Failed; 3 there is no such job; 75 no answer.
    """
    options = ClusterOptions(context, namespace, kubeconfig)
    cluster = connect(options)
    if watch:
        if output is not None:
            raise CliError("--output: is for one look, not for --watch; leave out one of them")
        again = f"rljob status {name}{options.flags()} --watch"
        raise typer.Exit(watching.watch_job(cluster, name, _console(), again))
    job = cluster.job(name)
    if output is not None:
        printed_objects.print_object(job, output, _console())
        return
    for line in statuses.job_lines(job, watching.utc_now(), cluster.flags):
        _console().print(line, soft_wrap=True)


@app.command("list")
def list_command(
    everywhere: Annotated[bool, typer.Option("--all-namespaces", "-A")] = False,
    output: Annotated[
        listing.ListFormat | None, typer.Option("--output", "-o", help="More columns, or for programs.")
    ] = None,
    context: Context = None,
    namespace: Namespace = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Show all jobs of a namespace."""
    cluster = connect(ClusterOptions(context, namespace, kubeconfig))
    jobs = cluster.jobs(everywhere=everywhere)
    if not jobs and output in (None, listing.ListFormat.WIDE):
        place = "the cluster" if everywhere else f"namespace {cluster.namespace}"
        _console(stderr=True).print(Text(f"no jobs in {place}"), soft_wrap=True)
        return
    listing.show_list(jobs, output, watching.utc_now(), _console(), _console(stderr=True), everywhere=everywhere)


@app.command("logs")
def logs_command(
    name: JobName,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Wait for the pod, then go on to its end.")] = False,
    tail: Annotated[int | None, typer.Option(min=0, help="Lines from the end.", show_default="all")] = None,
    attempt: Annotated[
        int | None, typer.Option(min=1, help="Of this attempt.", show_default="the newest one that has pods")
    ] = None,
    pool: Annotated[str | None, typer.Option(help="A worker of this pool instead of the head.")] = None,
    index: Annotated[int, typer.Option(min=0, help="Which worker of the pool; with --storage, its rank.")] = 0,
    container: Annotated[Container | None, typer.Option(show_default="driver in the head, ray in workers")] = None,
    storage: Annotated[
        Path | None,
        typer.Option(help="Read what is kept in the job's claim, mounted here. Asks no cluster.", show_default=False),
    ] = None,
    context: Context = None,
    namespace: Namespace = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Print what the training prints.

    Exit code 1: the pods, and their logs with them, are gone; what is left of them is named.
    """
    options = LogOptions(pool, index, container, follow, tail, attempt)
    if storage is not None:
        raise typer.Exit(logs.show_kept_logs(name, storage, options, _console(stderr=True)))
    cluster = connect(ClusterOptions(context, namespace, kubeconfig))
    raise typer.Exit(logs.show_logs(cluster, name, options, _console(stderr=True)))


@app.command("explain")
def explain_command(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="Name of a job on the cluster.")] = None,
    reason: Annotated[str | None, typer.Option(help="A reason, such as Unschedulable; needs no cluster.")] = None,
    context: Context = None,
    namespace: Namespace = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Say what a job is waiting for, why, and what to do."""
    if (name is None) == (reason is None):
        raise CliError("rljob explain: wants the name of a job or --reason REASON; give one of them")
    if reason is not None:
        explain.explain_reason(reason, _console())
    elif name is not None:
        explain.explain_job(connect(ClusterOptions(context, namespace, kubeconfig)), name, _console())


@app.command("suspend")
def suspend_command(
    name: JobName,
    wait: Wait = False,
    context: Context = None,
    namespace: Namespace = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Stop a job with a checkpoint and free its nodes, until `rljob resume`."""
    raise typer.Exit(_steering(name, ClusterOptions(context, namespace, kubeconfig), wait=wait).suspend())


@app.command("resume")
def resume_command(
    name: JobName,
    wait: Wait = False,
    context: Context = None,
    namespace: Namespace = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Let a suspended job go on from its newest checkpoint."""
    raise typer.Exit(_steering(name, ClusterOptions(context, namespace, kubeconfig), wait=wait).resume())


@app.command("stop")
def stop_command(
    name: JobName,
    wait: Wait = False,
    context: Context = None,
    namespace: Namespace = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Stop a job with a checkpoint, for good; `rljob retry` lets it go on all the same."""
    raise typer.Exit(_steering(name, ClusterOptions(context, namespace, kubeconfig), wait=wait).stop())


@app.command("retry")
def retry_command(
    name: JobName,
    wait: Wait = False,
    context: Context = None,
    namespace: Namespace = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Let a failed job go on from its newest checkpoint; between two attempts, begin the next one now."""
    raise typer.Exit(_steering(name, ClusterOptions(context, namespace, kubeconfig), wait=wait).retry())


@app.command("delete")
def delete_command(
    name: JobName,
    wait: Annotated[bool, typer.Option("--wait", help="Return when none of its pods is left.")] = False,
    context: Context = None,
    namespace: Namespace = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Delete a job and its cluster; checkpoints and results stay."""
    cluster = connect(ClusterOptions(context, namespace, kubeconfig))
    raise typer.Exit(delete.delete(cluster, name, _console(), wait=wait))


def main() -> None:
    """Runs the command; errors that the user can mend are one text on standard error, without a traceback."""
    accept_all_characters()
    try:
        app()
    except CliError as error:
        _console(stderr=True).print(Text(f"error: {error}"), soft_wrap=True)
        raise SystemExit(error.exit_code) from None
    except ContractError as error:
        _console(stderr=True).print(Text(str(error)), soft_wrap=True)
        raise SystemExit(ExitCode.CONFIGURATION) from None
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EPIPE, errno.EIO):
            raise
        # Else the interpreter writes what is still to be written when it ends, and complains again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        _console(stderr=True).print(Text(f"error: the output cannot be written ({error.strerror})"), soft_wrap=True)
        raise SystemExit(ExitCode.APPLICATION) from None


def _steering(name: str, options: ClusterOptions, *, wait: bool) -> Steering:
    return Steering(connect(options), name, options.flags(), _console(), wait=wait)


def _console(*, stderr: bool = False) -> Console:
    return Console(highlight=False, stderr=stderr)


if __name__ == "__main__":
    main()
