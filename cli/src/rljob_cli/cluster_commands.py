"""The commands for jobs on a cluster. To start fast, each command imports its modules only when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rljob_cli import arguments
from rljob_cli.application import app, console
from rljob_cli.arguments import Context, JobFile, JobName, JobNames, Kubeconfig, Namespace
from rljob_cli.errors import CliError

if TYPE_CHECKING:
    from rljob.cluster import Cluster


@app.command("submit")
def submit_command(
    file: JobFile,
    watch: arguments.Watch = False,
    name: arguments.NewName = None,
    values: arguments.SetValues = None,
    dry_run: arguments.DryRun = False,
    context: Context = None,
    namespace: Namespace = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Create or update a job on a Kubernetes cluster, which must have the operator.

    Of an existing job only runPolicy, suspend, queue and priority can change; a file with other differences is
    rejected."""
    from rljob.cluster import ClusterOptions
    from rljob_cli.cluster.submit import submit
    from rljob_cli.cluster.watching import watch_job

    if dry_run and watch:
        raise CliError("--dry-run: cannot be combined with --watch; remove one of them")
    options = ClusterOptions(context, namespace, kubeconfig)
    cluster, job = submit(file, arguments.changes(name, values), options, console(), dry_run=dry_run)
    if watch:
        raise typer.Exit(watch_job(cluster, job.name, console()))


@app.command("status")
def status_command(
    name: JobName,
    watch: arguments.Watch = False,
    output: Annotated[
        arguments.OutputFormat | None, typer.Option("--output", "-o", help="Print the whole RLJob.")
    ] = None,
    context: Context = None,
    namespace: Namespace = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Show the status of a job on a cluster."""
    from rljob.polling import utc_now
    from rljob_cli.cluster.listing import print_object
    from rljob_cli.cluster.status import job_lines
    from rljob_cli.cluster.watching import watch_job

    cluster = _cluster(context, namespace, kubeconfig)
    if watch:
        if output is not None:
            raise CliError("--output: cannot be combined with --watch; remove one of them")
        raise typer.Exit(watch_job(cluster, name, console()))
    job = cluster.job(name)
    if output is not None:
        print_object(job, output, console())
        return
    for line in job_lines(job, utc_now(), cluster.flags):
        console().print(line, soft_wrap=True)


@app.command("list")
def list_command(
    everywhere: arguments.Everywhere = False,
    selector: arguments.Selector = None,
    sort_by: arguments.SortBy = None,
    watch: arguments.WatchList = False,
    output: Annotated[
        arguments.ListFormat | None,
        typer.Option("--output", "-o", help="Print more columns (wide), or the whole RLJobs."),
    ] = None,
    context: Context = None,
    namespace: Namespace = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """List the jobs of a namespace."""
    from rljob_cli.cluster.listing import JobList, require_column, show_list, watch_list

    require_column(sort_by)

    if watch and output in (arguments.ListFormat.JSON, arguments.ListFormat.YAML):
        raise CliError(f"--output {output}: cannot be combined with --watch; remove one of them")
    jobs = JobList(_cluster(context, namespace, kubeconfig), everywhere, selector, sort_by, output)
    if watch:
        raise typer.Exit(watch_list(jobs, console(), console(stderr=True)))
    show_list(jobs, console(), console(stderr=True))


@app.command("wait")
def wait_command(
    name: JobName,
    state: arguments.WaitFor = "Finished",
    timeout: arguments.Timeout = None,
    context: Context = None,
    namespace: Namespace = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Wait until a job has a state, for example in a script.

    The states are the conditions (Complete, Failed, Finished, Suspended, ...), Running (the trainer runs) and Deleted.
    """
    from rljob.waiting import state_named
    from rljob_cli.cluster.steering import wait_for

    state, seconds = state_named(state), arguments.seconds("--timeout", timeout)
    cluster = _cluster(context, namespace, kubeconfig)
    raise typer.Exit(wait_for(cluster, name, state, console(), timeout_seconds=seconds))


@app.command("logs")
def logs_command(
    name: JobName,
    follow: arguments.Follow = False,
    tail: arguments.Tail = None,
    since: arguments.Since = None,
    attempt: arguments.AttemptNumber = None,
    previous: arguments.Previous = False,
    pool: arguments.PoolName = None,
    index: arguments.WorkerIndex = 0,
    container: arguments.ContainerName = None,
    storage: arguments.Storage = None,
    context: Context = None,
    namespace: Namespace = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Print the log of the training."""
    from rljob.log_options import LogOptions
    from rljob_cli.cluster.logs import show_kept_logs, show_logs

    if previous and attempt is not None:
        raise CliError("--previous: cannot be combined with --attempt; remove one of them")
    seconds = arguments.seconds("--since", since)
    if seconds == 0:
        raise CliError(f"--since: must be at least 1s (seen: {since}); for the last lines use --tail")
    options = LogOptions(pool, index, container, follow, tail, seconds, previous, attempt)
    if storage is not None:
        raise typer.Exit(show_kept_logs(name, storage, options, console(stderr=True)))
    cluster = _cluster(context, namespace, kubeconfig)
    raise typer.Exit(show_logs(cluster, name, options, console(stderr=True)))


@app.command("explain")
def explain_command(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME", help="Name of a job on the cluster.", autocompletion=arguments.complete_job_names
        ),
    ] = None,
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
        explain.explain_reason(reason, console())
    elif name is not None:
        explain.explain_job(_cluster(context, namespace, kubeconfig), name, console())


@app.command("suspend")
def suspend_command(
    names: JobNames,
    wait: arguments.WaitSuspended = False,
    context: Context = None,
    namespace: Namespace = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Save a checkpoint and delete the pods of a job, so that their GPUs are free until `rljob resume`."""
    from rljob import steering
    from rljob_cli.cluster.steering import steer

    cluster = _cluster(context, namespace, kubeconfig)
    raise typer.Exit(steer(steering.suspend, cluster, names, console(), wait=wait))


@app.command("resume")
def resume_command(
    names: JobNames,
    wait: arguments.WaitRunning = False,
    context: Context = None,
    namespace: Namespace = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Resume a suspended job from its newest checkpoint."""
    from rljob import steering
    from rljob_cli.cluster.steering import steer

    cluster = _cluster(context, namespace, kubeconfig)
    raise typer.Exit(steer(steering.resume, cluster, names, console(), wait=wait))


@app.command("stop")
def stop_command(
    names: JobNames,
    wait: arguments.WaitFinished = False,
    context: Context = None,
    namespace: Namespace = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Save a checkpoint and end the job as Failed; `rljob retry` can resume it later."""
    from rljob import steering
    from rljob_cli.cluster.steering import steer

    cluster = _cluster(context, namespace, kubeconfig)
    raise typer.Exit(steer(steering.stop, cluster, names, console(), wait=wait))


@app.command("retry")
def retry_command(
    names: JobNames,
    wait: arguments.WaitRetried = False,
    context: Context = None,
    namespace: Namespace = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Restart a failed job from its newest checkpoint, or start the next attempt now instead of waiting."""
    from rljob import steering
    from rljob_cli.cluster.steering import steer

    cluster = _cluster(context, namespace, kubeconfig)
    raise typer.Exit(steer(steering.retry, cluster, names, console(), wait=wait))


@app.command("delete")
def delete_command(
    names: JobNames,
    wait: Annotated[bool, typer.Option("--wait", help="Wait until the job and all its pods are deleted.")] = False,
    context: Context = None,
    namespace: Namespace = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Delete a job and its RayCluster; checkpoints and results are kept."""
    from rljob_cli.cluster.steering import delete

    raise typer.Exit(delete(_cluster(context, namespace, kubeconfig), names, console(), wait=wait))


def _cluster(context: str | None, namespace: str | None, kubeconfig: Path | None) -> Cluster:
    from rljob.cluster import ClusterOptions, connect

    return connect(ClusterOptions(context, namespace, kubeconfig))
