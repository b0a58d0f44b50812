"""All trackers of a run: starts their processes, sends them metrics, samples and the page, and ends them."""

from __future__ import annotations

import logging
import subprocess
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path

from rljob_api.constants import LOGS_FOLDER
from rljob_api.contract_documents import TrainerJob
from rljob_api.job_file import shareable_job_text
from rljob_api.v1alpha1.spec import Metadata
from rljob_api.v1alpha1.tracker import Tracker
from rljob_trainer.observability.metrics import Metrics
from rljob_trainer.observability.samples import Sample
from rljob_trainer.settings import Settings
from rljob_trainer.trackers.messages import Begin, End, Message, MetricsRow, RunFacts, SampleTable
from rljob_trainer.trackers.tracker_process import TrackerProcess

log = logging.getLogger(__name__)

END_SECONDS = 20.0
"""How long the end of a run waits for trackers that still send data."""
STOP_SECONDS = 5.0
"""The same after a stop request: on a cluster, Ray kills a trainer that does not exit within the job's grace period."""
RUN_ID_FILE = "tracker-id"
"""File in the run folder with the id of the run on one machine."""
SAMPLES = "samples"
"""The name of the table of samples."""
MAX_ROWS = 64
"""Samples of an evaluation that a tracker gets."""
MAX_CELL_CHARS = 4000


class Trackers:
    """The trackers of one attempt; those of a job without trackers do nothing. No method raises an error of a tracker,
    and only `end` waits for one."""

    def __init__(self) -> None:
        self._processes: list[tuple[Tracker, TrackerProcess]] = []
        self._has_begun = False

    def start(self, trackers: Sequence[Tracker], settings: Settings) -> None:
        """Starts the processes, which load their libraries while the run is set up."""
        folder = settings.run_folder / LOGS_FOLDER
        for tracker in trackers:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                log_file = folder / f"tracker-{tracker.type.lower()}.log"
                process = TrackerProcess(tracker.type, log_file, settings.environment)
            except (OSError, subprocess.SubprocessError) as error:
                log.warning("%s: its process cannot be started (%s); the run continues", tracker.type, error)
            else:
                self._processes.append((tracker, process))

    def begin(self, job: TrainerJob, settings: Settings, resumed_from_step: int | None) -> None:
        """Begins the run in the trackers. `job`: the resolved job. `resumed_from_step`: None for a run from the
        beginning. Raises OSError if the run folder cannot be written."""
        if not self._processes:
            return
        facts = RunFacts(
            job_name=job.name,
            namespace=job.namespace,
            run_id=job.uid or local_run_id(settings.run_folder),
            attempt=settings.attempt,
            run_folder=str(settings.run_folder),
            run_state_file=str(settings.run_state_file),
            resumed_from_step=resumed_from_step,
            job_text=shareable_job_text(Metadata(name=job.name, namespace=job.namespace), job.spec),
        )
        for tracker, process in self._processes:
            process.send(Begin(facts, tracker))
        self._has_begun = True

    def write(self, step: int, metrics: Metrics) -> None:
        """Sends the metrics of a step; `step` never decreases."""
        self._send(MetricsRow(step, time.time(), {name: float(value) for name, value in metrics.items()}))

    def write_samples(self, step: int, samples: Sequence[Sample]) -> None:
        """Sends the first samples of one evaluation; long texts are cut."""
        self._send(sample_table(step, samples))

    def end(self, exit_code: int, is_stop_requested: Callable[[], bool]) -> None:
        """Ends the run in all trackers, and waits some seconds until they have sent their data."""
        processes = [process for _, process in self._processes]
        self._processes.clear()
        if not self._has_begun:
            for process in processes:
                process.kill()
            return
        message = End(exit_code, sends_page=not is_stop_requested())
        for process in processes:
            process.end(message)
        began = time.monotonic()

        def seconds_left() -> float:
            limit = STOP_SECONDS if is_stop_requested() else END_SECONDS
            return limit - (time.monotonic() - began)

        for process in processes:
            process.wait(seconds_left)

    def _send(self, message: Message) -> None:
        for _, process in self._processes:
            process.send(message)


def local_run_id(run_folder: Path) -> str:
    """The id in the run folder, which is created for the first attempt."""
    path = run_folder / RUN_ID_FILE
    try:
        known = path.read_text(encoding="utf-8", errors="replace").strip()
    except FileNotFoundError:
        known = ""
    if known.isalnum():
        return known
    new = uuid.uuid4().hex
    path.write_text(new + "\n", encoding="utf-8")
    return new


def sample_table(step: int, samples: Sequence[Sample]) -> SampleTable:
    """The first samples of one evaluation as a table, with a column for each reward if there are several."""
    shown = samples[:MAX_ROWS]
    name = f"{SAMPLES}/{shown[0].evaluation}" if shown else SAMPLES
    rewards = list(shown[0].rewards) if shown and len(shown[0].rewards) > 1 else []
    rows: list[list[str | float | None]] = [
        [
            sample.kind.value,
            sample.group,
            *(_cut(text) for text in (sample.prompt, sample.response, sample.answer)),
            sample.outcome,
            sample.score,
            *(sample.rewards.get(name) for name in rewards),
        ]
        for sample in shown
    ]
    columns = [
        "kind",
        "group",
        "prompt",
        "response",
        "answer",
        "outcome",
        "score",
        *(f"reward/{name}" for name in rewards),
    ]
    return SampleTable(name, step, columns, rows)


def _cut(text: str) -> str:
    removed = len(text) - MAX_CELL_CHARS
    return text if removed <= 0 else f"{text[:MAX_CELL_CHARS]}... ({removed} more characters)"
