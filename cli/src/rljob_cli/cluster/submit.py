"""`rljob submit`: validates a job file as far as possible without a cluster, then creates or updates the job."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.text import Text

from rljob_api.contract_documents import TrainerJob, dump_job
from rljob_api.job_checks import cluster_violations
from rljob_api.job_file import load_job_text_to_run, read_job_text
from rljob_api.v1alpha1.job import RLJob
from rljob_api.v1alpha1.pools import PRIORITY_CLASS_LABEL, QUEUE_LABEL
from rljob_api.v1alpha1.rules import immutable_changes
from rljob_api.v1alpha1.spec import RLJobSpec
from rljob_api.v1alpha1.status import AttemptState
from rljob_api.yaml_text import wire_path
from rljob_cli.cluster.client import Cluster, ClusterOptions, connect
from rljob_cli.cluster.job_state import attempt_under_way, ending, phase
from rljob_cli.cluster.stored_job import StoredJob
from rljob_cli.differences import differences
from rljob_cli.errors import CliError, JobExistsError
from rljob_cli.validate import print_warnings

_ANY_UID = "00000000-0000-0000-0000-000000000000"
"""Stands for the UID that the API server will choose, which has the same length."""
_MAX_DIFFERENCES = 8


@dataclass(frozen=True)
class Submission:
    """A submitted job and the Kubernetes cluster that it was submitted to."""

    cluster: Cluster
    job: StoredJob


def submit(file: Path, options: ClusterOptions, console: Console) -> Submission:
    """Creates the job in the file, or updates it if it exists. Prints what was done and what to do next.

    Raises:
        JobFileError: the file is not a valid job.
        DocumentError: the job is too large.
        CliError: the job cannot run on a cluster, a job with this name has another spec, or the API server rejects it.
    """
    text = read_job_text(file)
    job = load_job_text_to_run(text, str(file))
    options = replace(options, namespace=_namespace(file, job, options))
    cluster = connect(options)
    _check_for_cluster(file, job, cluster.namespace)
    print_warnings(file, text, job, console)
    body = job.to_wire() | {"metadata": job.metadata.to_wire() | {"namespace": cluster.namespace}}
    try:
        stored = cluster.create_job(body)
        console.print(Text(f"{stored.where} created ({cluster.name})", "green"), soft_wrap=True)
    except JobExistsError:
        stored = _update_existing(file, job, cluster, console)
    submission = Submission(cluster, stored)
    _print_next_steps(submission, console)
    return submission


def _namespace(file: Path, job: RLJob, options: ClusterOptions) -> str | None:
    """The namespace of --namespace or of the file; None for the default of the kubeconfig's context. Raises CliError if
    both are given and differ."""
    in_file = job.metadata.namespace
    if options.namespace and in_file and options.namespace != in_file:
        raise CliError(
            f"{file}: metadata.namespace is {in_file}, but --namespace is {options.namespace}; remove one of them"
        )
    return options.namespace or in_file


def _check_for_cluster(file: Path, job: RLJob, namespace: str) -> None:
    """Raises CliError or DocumentError, before anything is created, for what the operator would reject. A missing image
    is no error here, because the operator may have a default image."""
    found = cluster_violations(job.spec, job.metadata.labels, has_default_image=True)
    if found:
        raise CliError("\n".join(f"{file}: {wire_path(broken.path)}: {broken.message}" for broken in found))
    dump_job(TrainerJob(name=job.metadata.name, namespace=namespace, uid=_ANY_UID, spec=job.spec))


def _update_existing(file: Path, job: RLJob, cluster: Cluster, console: Console) -> StoredJob:
    """Applies the file's changes of runPolicy, suspend, queue and priority to the existing job with this name, and
    returns it.

    Raises CliError if another part of the spec differs, or if the job is being deleted, and JobChangedError if somebody
    changes it meanwhile."""
    stored = cluster.job(job.metadata.name)
    if stored.metadata.deletion_timestamp is not None:
        raise CliError(
            f"{stored.where}: is being deleted; submit again once `rljob list{cluster.flags}` no longer shows it"
        )
    spec = stored.spec()
    changes = _changes(spec, job.spec)
    if immutable_changes(spec, job.spec):
        kept = {"run_policy": spec.run_policy, "suspend": spec.suspend}
        raise CliError(
            _other_spec_message(file, stored, differences(spec, job.spec.model_copy(update=kept)), cluster.flags)
        )
    labels = _label_changes(stored, job)
    if not changes and not labels:
        console.print(Text(f"{stored.where} already exists with this spec ({phase(stored)})"), soft_wrap=True)
        return stored
    changed = cluster.change_spec(stored, changes, labels)
    console.print(Text(f"{stored.where} already exists; changed:", "green"), soft_wrap=True)
    for line in (*differences(spec, changed.spec()), *_label_lines(stored, labels)):
        console.print(Text(f"  {line}"), soft_wrap=True)
    if labels:
        console.print(Text(_when_labels_apply(stored, labels, cluster.flags), "yellow"), soft_wrap=True)
    return changed


def _label_changes(stored: StoredJob, job: RLJob) -> dict[str, str | None]:
    """The labels for Kueue in the file that differ from those of the job, with their values; None for an empty one,
    which removes the label. A label that the file does not name stays: an administrator may have set it."""
    before, after = stored.metadata.labels, job.metadata.labels
    names = (QUEUE_LABEL, PRIORITY_CLASS_LABEL)
    return {
        name: after.get(name) or None for name in names if name in after and (before.get(name) or "") != after[name]
    }


def _label_lines(stored: StoredJob, labels: Mapping[str, str | None]) -> Iterator[str]:
    for name, value in labels.items():
        before, after = (json.dumps(each) if each else "unset" for each in (stored.metadata.labels.get(name), value))
        yield f"metadata.labels[{name}]: {before} -> {after}"


def _when_labels_apply(stored: StoredJob, labels: Mapping[str, str | None], flags: str) -> str:
    """When changed labels for Kueue take effect, which the operator copies to each new RayCluster. `stored`: the job
    before the change."""
    name, attempt, following = f"{stored.metadata.name}{flags}", attempt_under_way(stored), stored.status.next_attempt
    end, has_queue = ending(stored.status), QUEUE_LABEL not in labels and bool(stored.metadata.labels.get(QUEUE_LABEL))
    if end is not None and end.is_complete:
        return "the job is Complete, so these labels have no effect"
    if attempt is None and (following is None or not following.same_cluster):
        return "the next attempt uses these labels"
    if attempt is not None and attempt.state == AttemptState.QUEUED and (labels.get(QUEUE_LABEL) or has_queue):
        return "the operator deletes the RayCluster that waits, and a new one waits in the queue with these labels"
    return (
        f"an existing RayCluster keeps its labels, and the next one gets the new ones; `rljob suspend {name}`, then"
        f" `rljob resume {name}` replaces it earlier (a running trainer saves a checkpoint first)"
    )


def _changes(stored: RLJobSpec, wanted: RLJobSpec) -> dict[str, object]:
    """The merge patch that gives the stored job the file's runPolicy and suspend. A file without `suspend` does not
    change it, because `rljob suspend` may have set it."""
    changes: dict[str, object] = {}
    if stored.run_policy != wanted.run_policy:
        changes["runPolicy"] = wanted.run_policy.model_dump(mode="json", by_alias=True)
    if "suspend" in wanted.model_fields_set and stored.suspend != wanted.suspend:
        changes["suspend"] = wanted.suspend
    return changes


def _other_spec_message(file: Path, stored: StoredJob, shown: list[str], flags: str) -> str:
    delete = f"rljob delete {stored.metadata.name}{flags}"
    lines = [
        f"{file}: {stored.where} already exists with another spec, and only suspend, runPolicy and the queue of an"
        f" existing job can change; use another metadata.name, or delete the job first (`{delete}`). Differences,"
        " stored -> file:",
        *(f"  {line}" for line in shown[:_MAX_DIFFERENCES]),
    ]
    if len(shown) > _MAX_DIFFERENCES:
        lines.append(f"  and {len(shown) - _MAX_DIFFERENCES} more")
    return "\n".join(lines)


def _print_next_steps(submission: Submission, console: Console) -> None:
    name, flags = submission.job.metadata.name, submission.cluster.flags
    end = ending(submission.job.status)
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
