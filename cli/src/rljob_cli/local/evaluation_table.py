"""The table of results that `rljob evaluate` prints."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.text import Text

from rljob_api.v1alpha1.dataset import EVALUATION_METRICS, Evaluation, metric_names
from rljob_cli.table import table
from rljob_page.run_files import METRICS_FILE_NAME, read_metrics

_HEAD = ("EVALUATION", "METRIC", "VALUE")


def evaluation_table(run_folder: Path, evaluations: Sequence[Evaluation]) -> list[Text]:
    """The lines of the table: every metric of each evaluation, by the metrics in the run's folder. Empty if there are
    none. Raises PageError if the file is damaged."""
    metrics: dict[str, float] = {}
    for line in read_metrics(run_folder / METRICS_FILE_NAME):
        metrics |= line
    rows = [row for each in evaluations for row in _rows(each, metrics)]
    return table(_HEAD, rows) if rows else []


def _rows(evaluation: Evaluation, metrics: dict[str, float]) -> Iterator[tuple[str, str, str]]:
    prefix = f"{EVALUATION_METRICS}{evaluation.name}/"
    usual = list(metric_names(evaluation))
    # Such as those of single rewards.
    others = sorted(name for name in metrics if name.startswith(prefix) and name not in usual)
    for name in (*usual, *others):
        if name in metrics:
            digits = 1 if name.endswith("/response_length_mean") else 4
            yield evaluation.name, name.removeprefix(prefix), f"{metrics[name]:.{digits}f}"
