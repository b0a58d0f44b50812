"""Formats the output of `rljob plan --from-run` and `--calibrate`. The last line of a
comparison is the advice: the most useful changes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.text import Text

from rljob_cli.plan.text import number
from rljob_cli.table import table
from rljob_planner.advice.comparison import STEP, ComparedTime
from rljob_planner.advice.tuning import Advice, RunReport
from rljob_planner.kv_cache import GIB

TUNING_PAGE = "docs/tuning.md"
_FAR_OFF = 1.3
"""A ratio of prediction and measurement is printed in yellow if it is above this factor, or below its inverse."""
_MAX_PHASES = 2
"""The largest number of phases that are printed for a suggested change."""
ComparedRun = tuple[str, tuple[ComparedTime, ...], tuple[ComparedTime, ...]]
"""A run's name, then its measured times beside the times predicted with the fitted constants, and with the defaults."""


def run_lines(report: RunReport, *, explain: bool) -> Iterator[Text]:
    """The comparison of a run with its plan. `explain`: with the formula of each phase."""
    facts = report.facts
    state = f" ({report.state})" if report.state else ""
    yield Text(f"{report.name}{state}", "bold")
    without_first = ", the first not counted" if facts.num_steps > 1 else ""
    yield Text(f"  {facts.num_steps} steps{without_first}; responses {report.plan.workload.lengths.assumption}")
    source = f"constants calibrated by {report.constants}"
    if report.constants == "defaults":
        source = "default constants; rljob plan --calibrate fits them to this run"
    yield Text(f"  predicted with {source}")
    yield Text()
    yield from _time_table(report.times, "Seconds per step, predicted and measured (median and range of the steps)")
    for phase in report.plan.step.phases if explain else ():
        yield Text(f"    {phase.name}: {phase.formula}", "dim")
    yield Text()
    if report.memory:
        yield Text("GiB on the fullest worker (predicted for the row lengths of the run)", "bold")
        rows = [
            (each.name, _gibibytes(each.predicted), _gibibytes(each.measured), _ratio(each.ratio))
            for each in report.memory
        ]
        yield from table(("OWNER OR PHASE", "PREDICTED", "MEASURED", "RATIO"), rows, "  ")
        yield Text()
    if report.findings:
        yield Text("What the run shows", "bold")
        for finding in report.findings:
            yield Text(f"  - {finding.text}")
            yield Text(f'    see "{finding.section}" in {TUNING_PAGE}', "dim")
        yield Text()
    yield from advice_lines(report)


def calibration_lines(file: str, gpu_type: str, runs: Sequence[ComparedRun]) -> Iterator[Text]:
    """For each run, the times that the fitted constants predict beside the measured ones; then the profile's path."""
    for name, fitted, default in runs:
        yield from _time_table(fitted, f"{name}: seconds per step, predicted with the fitted constants and measured")
        step = next((each for each in default if each.name == STEP), None)
        if step is not None and step.predicted is not None:
            yield Text(f"  (predicted before the fit: {number(step.predicted.likely)} s per step)", "dim")
        yield Text()
    yield Text(f"Wrote {file}, a profile for plans on {gpu_type}.", "green")


def _time_table(times: Sequence[ComparedTime], title: str) -> list[Text]:
    """The title, then a table with a row for each phase and one for the step."""
    step_seconds = next((each.measured.median for each in times if each.name == STEP and each.measured), 0.0)
    rows = []
    for each in times:
        likely = 0.0 if each.predicted is None else each.predicted.likely
        measured = each.measured
        # A phase with less than 5 % of the step hardly matters, so its error is not marked.
        is_small = max(likely, measured.median if measured else 0.0) < 0.05 * step_seconds
        cells = (
            (number(measured.median), f"{number(measured.low)} to {number(measured.high)}") if measured else ("", "")
        )
        predicted = "" if each.predicted is None else number(likely)
        rows.append((each.name, predicted, *cells, _ratio(each.ratio, is_small=is_small), each.bound_by))
    head = ("PHASE", "PREDICTED", "MEASURED", "RANGE", "RATIO", "BOUND BY")
    return [Text(title, "bold"), *table(head, rows, "  ")]


def _gibibytes(num_bytes: float) -> str:
    value = num_bytes / GIB
    return f"{value:.2f}" if value >= 0.1 else f"{value:.4f}"


def _ratio(ratio: float | None, *, is_small: bool = False) -> Text:
    if ratio is None:
        return Text()
    is_far = not is_small and not 1 / _FAR_OFF <= ratio <= _FAR_OFF
    return Text(f"{ratio:.2f}", "yellow" if is_far else "green")


def advice_lines(report: RunReport) -> Iterator[Text]:
    """The suggested changes with their gain; the last line combines the best."""
    if not report.advice:
        yield Text("No change of a job field makes a step at least 1 % shorter.", "bold")
        return
    before = report.plan.step.total.likely
    yield Text("Suggested changes, each computed on its own, largest gain first", "bold")
    for advice in report.advice:
        yield from _one_advice(advice, before)
    yield Text()
    # The advice combines all changes that neither affect learning nor add GPUs.
    line = Text("Advice: ", "bold")
    if report.together:
        changes = ", ".join(f"{each.change.field}: {each.change.value}" for each in report.together)
        after = report.together[-1].step.likely
        line.append(f"set {changes}; predicted: {number(after)} s per step instead of {number(before)} s")
    else:
        line.append("no change makes a step at least 1 % shorter without affecting learning or adding GPUs.")
    yield line


def _one_advice(advice: Advice, before: float) -> Iterator[Text]:
    change, worst = advice.change, advice.fullest_phase
    price = "; but it affects learning" if advice.changed.changes_training else ""
    if advice.more_gpus:
        gpus = f"{advice.more_gpus} more GPU{'' if advice.more_gpus == 1 else 's'}"
        price = f"; but it needs {gpus}, in a new pool {change.value}"
    yield Text(f"  - {change.field}: {change.before} -> {change.value}", "yellow")
    memory = f"{worst.phase.value} {worst.total / GIB:.1f} of {worst.limit / GIB:.1f} GiB, {advice.verdict.value}"
    step = f"step {number(before)} -> {number(advice.step.likely)} s ({advice.share:.0%} less)"
    yield Text(f"    {step}{price}; {memory}")
    signed = [
        f"{name} {'-' if saved >= 0 else '+'}{number(abs(saved))} s" for name, saved in advice.phases[:_MAX_PHASES]
    ]
    yield Text(f'    {", ".join(signed)}; "{advice.changed.section}" in {TUNING_PAGE}', "dim")
