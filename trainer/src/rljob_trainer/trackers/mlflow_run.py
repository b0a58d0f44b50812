"""The run in MLflow: on a server, or in a folder."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TypeVar

from mlflow import MlflowClient
from mlflow.entities import Metric, Param, Run, RunTag
from mlflow.exceptions import MlflowException
from mlflow.utils.uri import is_local_uri

from rljob_api.constants import ExitCode
from rljob_api.v1alpha1.tracker import MlflowTracker
from rljob_api.yaml_text import read_yaml
from rljob_trainer.settings import variables_named
from rljob_trainer.trackers.messages import Begin, MetricsRow, Report, RunFacts, SampleTable

URI_VARIABLE = "MLFLOW_TRACKING_URI"
FOLDER = "mlruns"
"""Folder in the run folder, if no server is named."""
ID_TAG = "rljob.id"
"""The tag by which a later attempt finds the run."""
JOB_FILE = "job.yaml"
MAX_PARAM_CHARS = 500
MAX_KEY_CHARS = 250
NOT_IN_NAMES, NOT_IN_METRIC_NAMES = re.compile(r"[^\w. :-]"), re.compile(r"[^\w. :/-]")
"""MLflow rejects names with these characters, and some names with a slash."""
PARAMS_PER_CALL = 100
"""Most parameters that MLflow accepts in one call."""
RETRY_SECONDS = (1.0, 5.0, 15.0, 30.0)
"""Pauses before failed calls are repeated; the last one again and again."""
GIVE_UP_SECONDS = 900.0
"""A call that has failed for so long is given up, because it may never work."""
TOO_MANY_REQUESTS, INTERNAL_SERVER_ERROR = 429, 500
STATUS: Mapping[int, str] = {ExitCode.SUCCESS: "FINISHED", ExitCode.INTERRUPTED: "KILLED"}
"""MLflow's status of a run, by the trainer's exit code; FAILED for all others."""

ResultT = TypeVar("ResultT")


class MlflowRun:
    """A run that was started."""

    stores_page_after_end = True

    def __init__(self, client: MlflowClient, server: Server, run: Run, report: Report) -> None:
        self._client = client
        self._server = server
        self._id: str = run.info.run_id
        self._report = report
        self._last_steps = {metric.key: metric.step for metric in run.data.to_proto().metrics}
        """By metric, the newest step that MLflow has from earlier attempts."""
        self._has_skipped = False

    def log_metrics(self, row: MetricsRow) -> None:
        """Stores the metrics of a step, except those that MLflow already has from an earlier attempt: it cannot replace
        them, and would show two values for one step."""
        values = {metric_name(name): value for name, value in row.values.items()}
        new = {name: value for name, value in values.items() if row.step > self._last_steps.get(name, -1)}
        if len(new) < len(values) and not self._has_skipped:
            self._has_skipped = True
            self._report(
                "info",
                f"MLflow: the run already has steps {row.step} to {max(self._last_steps.values())} from an earlier "
                "attempt, and keeps their values; metrics.jsonl has the values of this attempt",
            )
        milliseconds = int(row.wall_time * 1000)
        points = [Metric(name, value, milliseconds, row.step) for name, value in new.items()]
        if points:
            self._server.call(lambda: self._client.log_batch(self._id, metrics=points))

    def log_samples(self, table: SampleTable) -> None:
        """Stores the samples as a file."""
        path = f"{table.name}/step-{table.step:06d}.json"
        text = json.dumps({"columns": table.columns, "data": table.rows}, indent=1)
        self._server.call(lambda: self._client.log_text(self._id, text, path))

    def log_page(self, page: Path) -> None:
        """Stores the page as a file."""
        self._server.call(lambda: self._client.log_artifact(self._id, str(page)))

    def finish(self, exit_code: int) -> None:
        """Ends the run."""
        status = STATUS.get(exit_code, "FAILED")
        self._server.call(lambda: self._client.set_terminated(self._id, status))


def start_mlflow_run(begin: Begin, report: Report) -> MlflowRun:
    """Starts the run, or continues that of an earlier attempt. Waits for the server if it does not respond. Raises
    MlflowException if the server rejects the run."""
    facts, settings = begin.facts, begin.tracker.mlflow or MlflowTracker()
    uri = tracking_uri(settings, facts.run_folder)
    client = MlflowClient(tracking_uri=uri)
    server = Server(report, is_remote=not is_local_uri(uri))
    run = server.call(lambda: _run(client, settings.experiment, facts), give_up_seconds=math.inf)
    report("info", f"MLflow: run {run.info.run_id} of experiment {settings.experiment} at {uri}")
    try:
        _log_job(client, server, run, facts.job_text)
    except Exception as error:
        report("warning", f"MLflow: parameters or {JOB_FILE} are incomplete: {error}")
    return MlflowRun(client, server, run, report)


def _log_job(client: MlflowClient, server: Server, run: Run, job_text: str) -> None:
    """Stores the job as a file and as parameters."""
    run_id = run.info.run_id
    server.call(lambda: client.log_text(run_id, job_text, JOB_FILE))
    # A parameter cannot be changed, so those of the first attempt stay; the file is that of the newest attempt.
    known = run.data.params
    params = [Param(name, value) for name, value in job_parameters(job_text).items() if name not in known]
    for start in range(0, len(params), PARAMS_PER_CALL):
        server.call(partial(client.log_batch, run_id, params=params[start : start + PARAMS_PER_CALL]))


def tracking_uri(settings: MlflowTracker, run_folder: str) -> str:
    """The address of the server, or of a folder."""
    named = settings.tracking_uri or variables_named([URI_VARIABLE]).get(URI_VARIABLE)
    return named or (Path(run_folder) / FOLDER).absolute().as_uri()


class Server:
    """Calls that are repeated while the server does not respond."""

    def __init__(self, report: Report, *, is_remote: bool) -> None:
        """`is_remote`: False for a folder. Its calls are not repeated, because what fails there fails again."""
        self._report = report
        self._is_remote = is_remote
        self._is_reported = False
        """Whether the current outage was reported."""

    def call(self, function: Callable[[], ResultT], give_up_seconds: float = GIVE_UP_SECONDS) -> ResultT:
        """The result of the function. Raises MlflowException if the server rejects the request, if it has not responded
        for `give_up_seconds`, or if the folder cannot be written."""
        began, pauses = time.monotonic(), iter(RETRY_SECONDS)
        while True:
            try:
                result = function()
            except MlflowException as error:
                status = error.get_http_status_code()
                is_temporary = self._is_remote and (status >= INTERNAL_SERVER_ERROR or status == TOO_MANY_REQUESTS)
                if not is_temporary or time.monotonic() - began > give_up_seconds:
                    raise
                if not self._is_reported:
                    self._is_reported = True
                    self._report("warning", f"MLflow does not respond; its data waits in memory ({error})")
            else:
                if self._is_reported:
                    self._is_reported = False
                    self._report("info", "MLflow responds again")
                return result
            time.sleep(next(pauses, RETRY_SECONDS[-1]))


def _run(client: MlflowClient, experiment: str, facts: RunFacts) -> Run:
    """Finds the run of the job, or creates it; then writes its tags."""
    experiment_id = _experiment_id(client, experiment)
    wanted = f"tags.`{ID_TAG}` = '{facts.run_id}'"
    found = client.search_runs([experiment_id], filter_string=wanted, max_results=1)
    tags = {
        ID_TAG: facts.run_id,
        "rljob.job": facts.job_name,
        "rljob.namespace": facts.namespace or "",
        "rljob.attempt": str(facts.attempt),
        "rljob.resumedFromStep": "" if facts.resumed_from_step is None else str(facts.resumed_from_step),
    }
    if found:
        run = found[0]
        client.update_run(run.info.run_id, status="RUNNING")
    else:
        run = client.create_run(experiment_id, tags=tags, run_name=facts.job_name)
    client.log_batch(run.info.run_id, tags=[RunTag(name, value) for name, value in tags.items()])
    return run


def _experiment_id(client: MlflowClient, name: str) -> str:
    known = client.get_experiment_by_name(name)
    if known is not None:
        return str(known.experiment_id)
    try:
        return str(client.create_experiment(name))
    except MlflowException:
        # Another run may have created it in the meantime.
        created = client.get_experiment_by_name(name)
        if created is None:
            raise
        return str(created.experiment_id)


def metric_name(name: str) -> str:
    """The metric's name in MLflow, which would reject the whole row for one other character."""
    return NOT_IN_METRIC_NAMES.sub("_", name)[:MAX_KEY_CHARS]


def job_parameters(job_text: str) -> dict[str, str]:
    """The settings of the job by their paths, such as `training.rollout.groupSize`. Characters that MLflow does not
    accept in a name are replaced."""
    document = read_yaml(job_text).value
    spec = document.get("spec") if isinstance(document, dict) else None
    found: dict[str, str] = {}
    for path, value in _leaves(spec, ""):
        found.setdefault(NOT_IN_NAMES.sub("_", path)[:MAX_KEY_CHARS], str(value)[:MAX_PARAM_CHARS])
    return found


def _leaves(value: object, path: str) -> Iterator[tuple[str, object]]:
    items: Mapping[object, object] = {}
    if isinstance(value, dict):
        items = value
    elif isinstance(value, list):
        items = dict(enumerate(value))
    else:
        yield path, value
    for name, item in items.items():
        yield from _leaves(item, f"{path}.{name}" if path else str(name))
