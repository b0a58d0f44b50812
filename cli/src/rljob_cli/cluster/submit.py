"""`rljob submit`: creates or updates a job, and prints what was done and what to do next."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from rljob.cluster import Cluster, ClusterOptions
from rljob.job_source import job_in_file
from rljob.stored_job import StoredJob
from rljob.submission import Action, Submission, connect_for
from rljob.submission import submit as submit_job
from rljob_api.job_changes import Change
from rljob_cli.validate import print_warnings


def submit(
    file: Path, changes: Sequence[Change], options: ClusterOptions, console: Console, *, dry_run: bool = False
) -> tuple[Cluster, StoredJob]:
    """Creates the job in the file, or updates it if it exists. Prints what was done and what to do next; with
    `dry_run`, nothing is changed, and what would be done is printed. Returns the cluster and the job on it.

    Raises:
        JobFileError: the file is not a valid job.
        RejectedError: the job cannot run on a cluster, a job with this name has another spec, or the API server rejects
            it.
    """
    source = job_in_file(file, changes)
    cluster = connect_for(source, options)
    print_warnings(source, console)
    submission = submit_job(cluster, source, dry_run=dry_run)
    job = submission.job
    if submission.action is Action.CREATED:
        done = "would be created" if dry_run else "created"
        console.print(Text(f"{job.where} {done} ({cluster.name})", "green"), soft_wrap=True)
    elif submission.action is Action.UNCHANGED:
        console.print(Text(f"{job.where} already exists with this spec ({job.phase})"), soft_wrap=True)
    else:
        done = "would change" if dry_run else "changed"
        console.print(Text(f"{job.where} already exists; {done}:", "green"), soft_wrap=True)
        for line in submission.differences:
            console.print(Text(f"  {line}"), soft_wrap=True)
        if submission.note:
            console.print(Text(submission.note, "yellow"), soft_wrap=True)
    if dry_run:
        console.print(Text("dry run: the API server has accepted this, and nothing was changed"), soft_wrap=True)
    else:
        _print_next_steps(cluster, submission, console)
    return cluster, job


def _print_next_steps(cluster: Cluster, submission: Submission, console: Console) -> None:
    name, flags = submission.job.name, cluster.flags
    end = submission.job.ending
    if end is not None and not end.is_complete:
        steps = {
            f"rljob explain {name}{flags}": "explains why it failed",
            f"rljob retry {name}{flags}": "resumes from the newest checkpoint",
        }
    elif end is not None:
        steps = {f"rljob delete {name}{flags}": "then submit again to resume from the newest checkpoint"}
    elif submission.job.wants_suspend:
        steps = {f"rljob resume {name}{flags}": "starts the suspended job"}
    else:
        steps = {
            f"rljob status {name}{flags} --watch": "shows changes until the job finishes",
            f"rljob logs {name}{flags} --follow": "prints the log of the training",
            f"rljob explain {name}{flags}": "explains what the job waits for",
        }
    width = max(map(len, steps))
    for number, (command, purpose) in enumerate(steps.items()):
        lead = "next:" if number == 0 else "     "
        console.print(Text(f"{lead} {command:<{width}}   {purpose}"), soft_wrap=True)
