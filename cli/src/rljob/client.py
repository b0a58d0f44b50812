"""The Python client: a method for every command for a cluster, except `explain`, `dashboard` and `view`."""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path

from rljob import pod_logs, steering, submission, waiting
from rljob.cluster import ClusterOptions, connect
from rljob.errors import RejectedError, deleted_meanwhile
from rljob.job_attempts import is_over
from rljob.job_source import job_in_file, job_of_values
from rljob.log_options import Container, LogOptions
from rljob.polling import Clock, poll_until_finished
from rljob.results.download import Downloaded
from rljob.results.results_copy import NoProgress, newest_state, results_copy, write_run_state
from rljob.results.selection import selection_of
from rljob.stored_job import StoredJob
from rljob.submission import Submission
from rljob_api.errors import ContractError, JobFileError
from rljob_api.job_changes import read_change, renamed
from rljob_api.v1alpha1.job import RLJob


class Client:
    """Submits and observes jobs on a Kubernetes cluster. All methods wait for the API server's response.

    All methods may raise subclasses of `RLJobError`, above all `JobNotFoundError`, `RejectedError` (the job or the
    request is invalid), `NotAllowedError` and `ClusterUnreachableError`. Their messages are those of the command line.
    """

    def __init__(
        self,
        context: str | None = None,
        namespace: str | None = None,
        kubeconfig: str | Path | None = None,
        *,
        clock: Clock | None = None,
    ) -> None:
        """Selects the cluster; sends no request yet.

        Args:
            context: Context of the kubeconfig; None for the current one.
            namespace: Namespace of the jobs; None for the namespace of the context. `submit` also uses the job's.
            kubeconfig: Path of the kubeconfig; None for `KUBECONFIG`, `~/.kube/config`, or the service account of this
                pod.
            clock: Replaces the time and the pauses in tests.

        Raises:
            ClusterError: there is no kubeconfig, or it cannot be used.
        """
        self._options = ClusterOptions(context, namespace, None if kubeconfig is None else Path(kubeconfig))
        self._cluster = connect(self._options)
        self._clock = clock or Clock()

    def submit(
        self,
        job: RLJob | Mapping[str, object] | str | Path,
        *,
        name: str | None = None,
        changes: str | Sequence[str] = (),
        dry_run: bool = False,
    ) -> Submission:
        """Creates the job. If a job of this name exists, changes its runPolicy, suspend, queue and priority; other
        changes are rejected.

        Args:
            job: The job, its wire form (as in a job file), or the path of a job file.
            name: Name of the job instead of the one in the job.
            changes: Changed values, as `--set` takes them: `spec.training.steps=10`.
            dry_run: Only validates the job, and returns what would be done.

        Raises:
            RejectedError: the job is invalid, with a list of the problems, or it exists with another spec.
        """
        try:
            changed = (*map(read_change, _strings(changes)), *([renamed(name)] if name is not None else []))
            source = job_in_file(Path(job), changed) if isinstance(job, str | Path) else job_of_values(job, changed)
        except ContractError as error:
            problems = error.problems if isinstance(error, JobFileError) else ()
            raise RejectedError(str(error), problems) from None
        return submission.submit(submission.connect_for(source, self._options), source, dry_run=dry_run)

    def status(self, name: str) -> StoredJob:
        """The job as it is now. Its field `status` has the type `rljob_api.v1alpha1.status.RLJobStatus`."""
        return self._cluster.job(name)

    def list(self, selector: str | None = None, *, all_namespaces: bool = False) -> list[StoredJob]:
        """The jobs of the namespace, or of all namespaces. `selector`: only jobs with these labels, such as
        `team=research`."""
        return self._cluster.jobs(everywhere=all_namespaces, selector=selector)

    def watch(self, name: str) -> Iterator[StoredJob]:
        """Yields the job now and after every change of its status, until it has finished and no retry was requested.

        Raises:
            JobNotFoundError: there is no such job, or it was deleted meanwhile.
            ClusterUnreachableError: the API server was unreachable for ten minutes, or at the start.
        """
        seen: StoredJob | None = None
        for job in poll_until_finished(self._cluster, name, self._clock, _ignored):
            if seen is not None and job.metadata.uid != seen.metadata.uid:
                raise deleted_meanwhile(seen.where)
            if seen is None or _shown(job) != _shown(seen):
                yield job
            seen = job
        if seen is not None and not is_over(seen):
            raise deleted_meanwhile(seen.where)

    def wait(self, name: str, state: str = "Finished", *, timeout_seconds: float | None = None) -> StoredJob:
        """Waits until the job has the state, and returns the job.

        Args:
            state: A condition (`Complete`, `Failed`, `Finished`, `Suspended`, `Checkpointed`, ...), or `Running`.
            timeout_seconds: Time limit; None for none.

        Raises:
            JobFinishedError: the job has finished without the state.
            JobNotFoundError: there is no such job, or it was deleted.
            WaitTimeoutError: the time has passed.
        """
        wanted = waiting.state_named(state)
        if wanted == waiting.DELETED:
            raise RejectedError("cannot wait for 'Deleted', which leaves no job to return; use delete(name, wait=True)")
        seen, outcome = waiting.wait_for_state(self._cluster, name, wanted, self._clock, _quiet, timeout_seconds)
        if outcome.error is not None:
            raise outcome.error
        assert seen is not None, "only a deleted job does not exist"
        return seen

    def logs(
        self,
        name: str,
        *,
        follow: bool = False,
        tail: int | None = None,
        since_seconds: int | None = None,
        attempt: int | None = None,
        previous: bool = False,
        pool: str | None = None,
        index: int = 0,
        container: Container | None = None,
    ) -> Iterator[str]:
        """The lines of a log, without line ends: of the training, or of a worker pod.

        Args:
            follow: Wait for the pod, and for new lines until the log ends.
            tail: Number of lines from the end; None for all.
            since_seconds: Only lines of the last seconds; None for all.
            attempt: Number of the attempt; None for the newest one that has the pod.
            previous: The attempt before the newest one.
            pool: The pool of the worker pod; None for the head pod.
            index: Number of the worker pod in its pool.
            container: The container; None for the training in the head pod, and Ray in worker pods.

        Raises:
            NoLogError: there is no log (yet), or it was deleted; the message then says where a copy is.
        """
        if previous and attempt is not None:
            raise RejectedError("previous: cannot be combined with attempt; remove one of them")
        if container is not None and container not in set(Container):
            raise RejectedError(f"container: there is no container {container}; use one of {', '.join(Container)}")
        options = LogOptions(pool, index, container, follow, tail, since_seconds, previous, attempt)
        return _lines(pod_logs.read_log(self._cluster, name, options, self._clock, _quiet))

    def results(
        self,
        name: str,
        folder: str | Path,
        *,
        only: str | Sequence[str] = (),
        checkpoints: bool = False,
        logs: bool = False,
        image: str | None = None,
    ) -> Downloaded:
        """Copies results of a job into a folder, which then looks like that of a run on one machine. Files that
        were copied before and have not changed are not copied again.

        Args:
            only: Parts to copy, such as `model` or `metrics` (`selection.Part`); empty for all except checkpoints and
                logs.
            checkpoints: Copy the complete checkpoints, too.
            logs: Copy the logs, too.
            image: Image of the pod that reads the files; None for the image of the job's pods.

        Raises:
            ResultsError: the pod does not start, the connection breaks again and again, or the folder cannot be used.
        """
        job = self._cluster.job(name)
        chosen, target = selection_of(_strings(only), checkpoints=checkpoints, logs=logs), Path(folder)
        with results_copy(self._cluster, job, target, chosen, NoProgress(), image, self._clock) as copy:
            downloaded = copy.run()
        write_run_state(newest_state(self._cluster, job), target)
        return downloaded

    def suspend(self, name: str, *, wait: bool = False, timeout_seconds: float | None = None) -> StoredJob:
        """Asks the operator to save a checkpoint and delete the job's pods. With `wait`, returns when this is done."""
        return self._steer(steering.suspend, name, wait, timeout_seconds)

    def resume(self, name: str, *, wait: bool = False, timeout_seconds: float | None = None) -> StoredJob:
        """Asks the operator to resume a suspended job. With `wait`, returns when the trainer runs."""
        return self._steer(steering.resume, name, wait, timeout_seconds)

    def stop(self, name: str, *, wait: bool = False, timeout_seconds: float | None = None) -> StoredJob:
        """Asks the operator to save a checkpoint and end the job as Failed. With `wait`, returns when it has
        finished."""
        return self._steer(steering.stop, name, wait, timeout_seconds)

    def retry(self, name: str, *, wait: bool = False, timeout_seconds: float | None = None) -> StoredJob:
        """Asks the operator to start another attempt now. With `wait`, returns when its trainer runs."""
        return self._steer(steering.retry, name, wait, timeout_seconds)

    def delete(self, name: str, *, wait: bool = False, timeout_seconds: float | None = None) -> None:
        """Deletes the job; checkpoints and results are kept. With `wait`, returns when all its pods are deleted."""
        deleted = steering.delete(self._cluster, name)
        if wait:
            waiting.wait_until_deleted(self._cluster, deleted.job, self._clock, _quiet, timeout_seconds)

    def _steer(self, request: steering.Steer, name: str, wait: bool, timeout_seconds: float | None) -> StoredJob:
        sent = request(self._cluster, name, self._clock.now())
        if not wait or sent.outcome_of is None:
            return sent.job
        seen, outcome = waiting.wait(self._cluster, sent.job, sent.outcome_of, self._clock, _quiet, timeout_seconds)
        if outcome.error is not None:
            raise outcome.error
        return seen


def _ignored(_: str, __: datetime) -> None:
    """Ignores messages about an unreachable API server."""


def _quiet(_: str) -> None:
    """Ignores messages about what is waited for."""


def _strings(given: str | Sequence[str]) -> Sequence[str]:
    """One string is not a sequence of its characters here."""
    return [given] if isinstance(given, str) else given


def _shown(job: StoredJob) -> object:
    """The fields whose change `watch` yields: the status, a request to suspend the job, and its deletion."""
    return job.wire.get("status"), job.wants_suspend, job.metadata.deletion_timestamp


def _lines(pieces: Iterator[bytes]) -> Iterator[str]:
    """The lines of a log that comes in pieces."""
    decoder, rest = codecs.getincrementaldecoder("utf-8")(errors="replace"), ""
    for piece in pieces:
        *lines, rest = (rest + decoder.decode(piece)).split("\n")
        yield from lines
    rest += decoder.decode(b"", final=True)
    if rest:
        yield rest
