"""The `rljob` command line. To start fast, each command imports its modules only when it runs."""

from __future__ import annotations

import errno
import shlex
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from rljob_api.constants import API_GROUP, API_VERSION, CONTRACT_VERSION, ExitCode
from rljob_api.errors import ContractError
from rljob_api.standard_streams import accept_all_characters, discard_output
from rljob_cli import arguments as of
from rljob_cli import result_commands
from rljob_cli.arguments import Context, JobFile, JobName, Kubeconfig, Namespace
from rljob_cli.errors import CliError
from rljob_cli.settings import forget_zero_columns

if TYPE_CHECKING:
    from rljob_cli.cluster.client import Cluster
    from rljob_cli.cluster.steering import Steering

app = typer.Typer(
    name="rljob",
    cls=of.Commands,
    suggest_commands=False,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _print_version(is_wanted: bool) -> None:
    """Prints the versions of this command, of the API, and of the contract between operator and trainer."""
    if is_wanted:
        try:
            package = version("rljob")
        except PackageNotFoundError:
            package = "(source tree)"
        contract = f"contract version {CONTRACT_VERSION} (documents between operator and trainer)"
        _console().print(Text(f"rljob {package}, {API_GROUP}/{API_VERSION}, {contract}"), soft_wrap=True)
        raise typer.Exit


@app.callback()
def every_command(
    _version: Annotated[
        bool, typer.Option("--version", help="Print versions and exit.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """Run reinforcement-learning post-training jobs from one file, on this machine or on a Kubernetes cluster."""


@app.command("init")
def init_command(file: of.NewJobFile = Path("job.yaml"), environment: of.WithEnvironment = False) -> None:
    """Write an example job file with comments."""
    from rljob_cli import init

    files = init.write_example(file, with_environment=environment)
    written, name = " and ".join(map(str, files)), shlex.quote(str(files[0]))
    _console().print(Text(f"wrote {written}; next: rljob validate {name}, then rljob run {name}"), soft_wrap=True)


@app.command("validate")
def validate_command(
    file: JobFile,
    resolved: Annotated[
        bool,
        typer.Option("--resolved", help="Print the job with all defaults and recipe settings filled in."),
    ] = False,
) -> None:
    """Check a job file and print its errors with their lines.

    Other rules are checked only if all names and types are right. A file with warnings is still valid for `rljob run`:
    warnings are about a job that would fail on every Kubernetes cluster, and fields that are ignored there or risky.

    With --resolved, standard output contains only the resolved job file; messages go to standard error.
    """
    from rljob_cli import validate

    job = validate.validate_file(file, _console(stderr=resolved))
    if job is None:
        raise typer.Exit(ExitCode.CONFIGURATION)
    if resolved:
        validate.print_resolved(job, _console())


@app.command("plan")
def plan_command(
    file: of.JobToPlan = None,
    from_run: of.FromRun = None,
    calibrate: of.Calibrate = None,
    cluster: of.NodesToPlanFor = None,
    from_cluster: of.FromCluster = False,
    gpu_types: of.GpuTypes = None,
    gpu_memory: of.GpuMemory = None,
    gpu_tflops: of.GpuTflops = None,
    gpu_bandwidth: of.GpuBandwidth = None,
    mean_prompt: of.MeanPrompt = None,
    mean_response: of.MeanResponse = None,
    model_config: of.ModelConfig = None,
    profile: of.Profile = None,
    is_search: of.Search = False,
    write: of.Write = None,
    is_explained: of.Explain = False,
    as_json: of.AsJson = False,
    context: of.PlanContext = None,
    kubeconfig: of.PlanKubeconfig = None,
) -> None:
    """Estimate memory and step time of a job before it uses a GPU, and find the best pools for its roles.

    Pass a job file, or a run's folder with --from-run or --calibrate.

    The GPU type comes from an option, else from the pools' nodeSelector or affinity, else from this machine.

    rljob plan job.yaml --gpu H100 --mean-response 800

    rljob plan job.yaml --cluster 4x8xH100 --search --write better.yaml

    rljob plan --from-run runs/x

    A search changes only pools and roles of the job. If nothing fits, it also changes other settings, and names them.
    """
    from rljob_cli.cluster.client import ClusterOptions
    from rljob_cli.plan.command import plan
    from rljob_cli.plan.options import GpuOptions, PlanOptions, cluster_to_read
    from rljob_planner.job_lengths import LengthOptions

    read_from = cluster_to_read(ClusterOptions(context, None, kubeconfig), is_wanted=from_cluster)
    options = PlanOptions(
        file=file,
        from_run=from_run,
        calibrate=tuple(calibrate or ()),
        gpus=GpuOptions(cluster, read_from, tuple(gpu_types or ()), gpu_memory, gpu_tflops, gpu_bandwidth),
        lengths=LengthOptions(mean_prompt, mean_response),
        model_config=model_config,
        profile=profile,
        search=is_search,
        write=write,
        explain=is_explained,
        as_json=as_json,
    )
    raise typer.Exit(plan(options, _console()))


@app.command("run")
def run_command(
    file: JobFile,
    workers: of.Workers = None,
    resume: of.Resume = False,
    run_folder: of.RunFolderOption = None,
    code: of.Code = None,
    ray: of.RayAddress = None,
) -> None:
    """Run a job on this machine, or on an existing Ray cluster; for Kubernetes see `rljob submit`."""
    from rljob_cli.local.run import RunOptions, run

    raise typer.Exit(run(RunOptions(file, workers, resume, run_folder, code, ray), _console()))


@app.command("plot")
def plot_command(run_folder: of.RunFolder) -> None:
    """Draw the plots of a run again."""
    from rljob_cli.local.run import plot

    raise typer.Exit(plot(run_folder))


@app.command("submit")
def submit_command(
    file: JobFile,
    watch: of.Watch = False,
    context: Context = None,
    namespace: Namespace = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Create or update a job on a Kubernetes cluster, which must have the operator.

    Of an existing job only runPolicy and suspend can change; a file with other differences is rejected."""
    from rljob_cli.cluster.client import ClusterOptions
    from rljob_cli.cluster.submit import submit
    from rljob_cli.cluster.watching import watch_job

    submission = submit(file, ClusterOptions(context, namespace, kubeconfig), _console())
    if watch:
        raise typer.Exit(watch_job(submission.cluster, submission.job.metadata.name, _console()))


@app.command("status")
def status_command(
    name: JobName,
    watch: of.Watch = False,
    output: Annotated[of.OutputFormat | None, typer.Option("--output", "-o", help="Print the whole RLJob.")] = None,
    context: Context = None,
    namespace: Namespace = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Show the status of a job on a cluster."""
    from rljob_cli.cluster.listing import print_object
    from rljob_cli.cluster.status import job_lines
    from rljob_cli.cluster.watching import utc_now, watch_job

    cluster = _cluster(context, namespace, kubeconfig)
    if watch:
        if output is not None:
            raise CliError("--output: cannot be combined with --watch; remove one of them")
        raise typer.Exit(watch_job(cluster, name, _console()))
    job = cluster.job(name)
    if output is not None:
        print_object(job, output, _console())
        return
    for line in job_lines(job, utc_now(), cluster.flags):
        _console().print(line, soft_wrap=True)


@app.command("list")
def list_command(
    everywhere: of.Everywhere = False,
    output: Annotated[
        of.ListFormat | None, typer.Option("--output", "-o", help="Print more columns (wide), or the whole RLJobs.")
    ] = None,
    context: Context = None,
    namespace: Namespace = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """List the jobs of a namespace."""
    from rljob_cli.cluster.listing import show_list
    from rljob_cli.cluster.watching import utc_now

    cluster = _cluster(context, namespace, kubeconfig)
    jobs = cluster.jobs(everywhere=everywhere)
    if not jobs and output in (None, of.ListFormat.WIDE):
        where = "the cluster" if everywhere else f"namespace {cluster.namespace}"
        _console(stderr=True).print(Text(f"no jobs in {where}"), soft_wrap=True)
        return
    show_list(jobs, output, utc_now(), _console(), _console(stderr=True), everywhere=everywhere)


@app.command("logs")
def logs_command(
    name: JobName,
    follow: of.Follow = False,
    tail: of.Tail = None,
    attempt: of.AttemptNumber = None,
    pool: of.PoolName = None,
    index: of.WorkerIndex = 0,
    container: of.ContainerName = None,
    storage: of.Storage = None,
    context: Context = None,
    namespace: Namespace = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Print the log of the training."""
    from rljob_cli.cluster.kept_logs import LogOptions
    from rljob_cli.cluster.logs import show_kept_logs, show_logs

    options = LogOptions(pool, index, container, follow, tail, attempt)
    if storage is not None:
        raise typer.Exit(show_kept_logs(name, storage, options, _console(stderr=True)))
    cluster = _cluster(context, namespace, kubeconfig)
    raise typer.Exit(show_logs(cluster, name, options, _console(stderr=True)))


@app.command("explain")
def explain_command(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="Name of a job on the cluster.")] = None,
    reason: Annotated[
        str | None,
        typer.Option(
            help="Explain the reason of a condition or failure, such as Unschedulable (all: docs/troubleshooting.md)."
            " Needs no cluster."
        ),
    ] = None,
    context: Context = None,
    namespace: Namespace = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Explain what a job is waiting for or why it failed, and what to do."""
    from rljob_cli.cluster import explain

    if (name is None) == (reason is None):
        raise CliError("rljob explain: expects either the name of a job or --reason REASON")
    if reason is not None:
        explain.explain_reason(reason, _console())
    elif name is not None:
        explain.explain_job(_cluster(context, namespace, kubeconfig), name, _console())


@app.command("suspend")
def suspend_command(
    name: JobName,
    wait: of.WaitSuspended = False,
    context: Context = None,
    namespace: Namespace = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Save a checkpoint and delete the pods of a job, so that their GPUs are free until `rljob resume`."""
    raise typer.Exit(_steering(name, _cluster(context, namespace, kubeconfig), wait=wait).suspend())


@app.command("resume")
def resume_command(
    name: JobName,
    wait: of.WaitRunning = False,
    context: Context = None,
    namespace: Namespace = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Resume a suspended job from its newest checkpoint."""
    raise typer.Exit(_steering(name, _cluster(context, namespace, kubeconfig), wait=wait).resume())


@app.command("stop")
def stop_command(
    name: JobName,
    wait: of.WaitFinished = False,
    context: Context = None,
    namespace: Namespace = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Save a checkpoint and end the job as Failed; `rljob retry` can resume it later."""
    raise typer.Exit(_steering(name, _cluster(context, namespace, kubeconfig), wait=wait).stop())


@app.command("retry")
def retry_command(
    name: JobName,
    wait: of.WaitRetried = False,
    context: Context = None,
    namespace: Namespace = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Restart a failed job from its newest checkpoint, or start the next attempt now instead of waiting."""
    raise typer.Exit(_steering(name, _cluster(context, namespace, kubeconfig), wait=wait).retry())


@app.command("delete")
def delete_command(
    name: JobName,
    wait: Annotated[bool, typer.Option("--wait", help="Wait until the job and all its pods are deleted.")] = False,
    context: Context = None,
    namespace: Namespace = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Delete a job and its RayCluster; checkpoints and results are kept."""
    from rljob_cli.cluster.steering import delete

    raise typer.Exit(delete(_cluster(context, namespace, kubeconfig), name, _console(), wait=wait))


app.add_typer(result_commands.commands)


def main() -> None:
    """Runs the command. Errors that the user can fix are printed to standard error without a traceback."""
    accept_all_characters()
    forget_zero_columns()
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
        discard_output(sys.stdout)
        _console(stderr=True).print(Text(f"error: cannot write the output ({error.strerror})"), soft_wrap=True)
        raise SystemExit(ExitCode.APPLICATION) from None


def _cluster(context: str | None, namespace: str | None, kubeconfig: Path | None) -> Cluster:
    from rljob_cli.cluster.client import ClusterOptions, connect

    return connect(ClusterOptions(context, namespace, kubeconfig))


def _steering(name: str, cluster: Cluster, *, wait: bool) -> Steering:
    from rljob_cli.cluster.steering import Steering

    return Steering(cluster, name, _console(), wait=wait)


def _console(*, stderr: bool = False) -> Console:
    return Console(highlight=False, stderr=stderr)


if __name__ == "__main__":
    main()
