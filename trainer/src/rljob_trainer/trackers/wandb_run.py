"""The run in W&B, online or as files in the run folder (offline)."""

from __future__ import annotations

import shlex
from pathlib import Path

import wandb
from wandb.errors import Error as WandbError

from rljob_api.v1alpha1.tracker import WandbMode, WandbTracker
from rljob_api.yaml_text import read_yaml
from rljob_trainer.trackers.messages import Begin, MetricsRow, Report, RunFacts, SampleTable

INIT_SECONDS = 30.0
"""How long the start waits for the server. Then the run is stored as files."""
MAX_TAG_CHARS = 64
"""W&B rejects longer tags."""
PAGE = "page"
"""The name of the page."""


class WandbRun:
    """A run that was started."""

    stores_page_after_end = False
    """W&B accepts nothing after the end."""

    def __init__(self, run: wandb.Run, report: Report) -> None:
        self._run = run
        self._report = report
        self._first_step = run.starting_step
        """W&B ignores rows of earlier steps: those that it has from an earlier attempt."""
        self._has_skipped = False
        self._newest_step = 0

    def log_metrics(self, row: MetricsRow) -> None:
        """Stores the metrics under their step. W&B sends a row when the next step begins."""
        if self._is_new(row.step):
            self._run.log(dict(row.values), step=row.step)

    def log_samples(self, table: SampleTable) -> None:
        """Stores the samples as a table."""
        if self._is_new(table.step):
            self._run.log({table.name: wandb.Table(columns=table.columns, data=table.rows)}, step=table.step)

    def log_page(self, page: Path) -> None:
        """Stores the page with the newest step."""
        self._run.log({PAGE: wandb.Html(str(page), inject=False)}, step=max(self._newest_step, self._first_step))

    def finish(self, exit_code: int) -> None:
        """Ends the run, and waits until everything is sent, or written."""
        self._run.finish(exit_code=exit_code)
        wandb.teardown()

    def _is_new(self, step: int) -> bool:
        self._newest_step = step
        if step >= self._first_step:
            return True
        if not self._has_skipped:
            self._has_skipped = True
            self._report(
                "info",
                f"WandB: the run already has steps {step} to {self._first_step - 1} from an earlier attempt, and keeps "
                "their values; metrics.jsonl has the values of this attempt",
            )
        return False


def start_wandb_run(begin: Begin, report: Report) -> WandbRun:
    """Starts the run, or continues that of an earlier attempt. If the server does not accept it, it is stored as files.
    Raises WandbError if that fails, too."""
    facts, settings = begin.facts, begin.tracker.wandb or WandbTracker()
    if settings.mode is WandbMode.ONLINE:
        try:
            run = _run(facts, settings, "online")
        except WandbError as error:
            report("warning", f"WandB: {error}; this attempt is stored as files. {sync_advice(facts)}")
            # W&B's service still holds the id of the run that it could not start.
            wandb.teardown()
        else:
            report("info", f"WandB: {run.url}")
            return WandbRun(run, report)
    run = _run(facts, settings, "offline")
    if settings.mode is WandbMode.OFFLINE:
        report("info", f"WandB: offline. {sync_advice(facts)}")
    return WandbRun(run, report)


def sync_advice(facts: RunFacts) -> str:
    """How to upload the files of all attempts."""
    folder = shlex.quote(str(Path(facts.run_folder) / "wandb"))
    return f"Upload all attempts with `wandb sync {folder}/*run-*-{facts.run_id}`"


def _run(facts: RunFacts, settings: WandbTracker, mode: str) -> wandb.Run:
    tags = {"job": facts.job_name, "namespace": facts.namespace, "attempt": str(facts.attempt)}
    resume = {"attempt": facts.attempt, "resumedFromStep": facts.resumed_from_step}
    return wandb.init(
        project=settings.project,
        entity=settings.entity,
        id=facts.run_id,
        resume="allow",
        name=facts.job_name,
        tags=[f"{name}:{value}"[:MAX_TAG_CHARS] for name, value in tags.items() if value],
        config={"job": read_yaml(facts.job_text).value, "run": resume},
        allow_val_change=True,
        dir=facts.run_folder,
        mode="online" if mode == "online" else "offline",
        settings=wandb.Settings(
            init_timeout=INIT_SECONDS,
            quiet=True,
            # This process has neither the program, nor the output, nor the devices of the training.
            console="off",
            disable_code=True,
            disable_git=True,
            disable_job_creation=True,
            save_code=False,
            x_disable_stats=True,
            x_disable_machine_info=True,
        ),
    )
