"""`rljob plan --from-run`, `--calibrate`: what is shown. Short first; the last line says what to change first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.text import Text

from rljob_cli.plan.text import GIB, number
from rljob_cli.tables import table
from rljob_planner.advice.comparison import STEP, ComparedMemory, ComparedTime
from rljob_planner.advice.faster_jobs import Price
from rljob_planner.advice.run_report import RunReport
from rljob_planner.advice.tuning import Advice

TUNING_PAGE = "docs/tuning.md"
_FAR_OFF = 1.3
"""A prediction that is so many times too high or too low is marked."""
_MAX_PHASES = 2
ComparedRun = tuple[str, tuple[ComparedTime, ...], tuple[ComparedTime, ...]]
"""A run's name, its times beside those by the new constants, and beside those by the ones before."""


def run_lines(report: RunReport, *, explain: bool) -> Iterator[Text]:
    """All that is shown of a run."""
    facts = report.facts
    state = f" ({report.state})" if report.state else ""
    yield Text(f"{report.name}{state}", "bold")
    without_first = ", the first left out" if facts.num_steps > 1 else ""
    yield Text(f"  {facts.num_steps} steps{without_first}; responses {report.plan.workload.lengths.assumption}")
    yield Text(f"  predicted by {_source(report.constants)}")
    yield Text()
    yield from _time_table(report.times, "Seconds of a step, predicted beside measured (median, range of the steps)")
    if explain:
        for phase in report.plan.step.phases:
            yield Text(f"    {phase.name}: {phase.formula}", "dim")
    yield Text()
    if report.memory:
        yield from _memory_table(report.memory)
        yield Text()
    if report.findings:
        yield Text("What the run shows", "bold")
        for finding in report.findings:
            yield Text(f"  - {finding.text}")
            yield Text(f'    see "{finding.section}" in {TUNING_PAGE}', "dim")
        yield Text()
    yield from _advice_lines(report)


def calibration_lines(file: Path, kind: str, runs: Sequence[ComparedRun]) -> Iterator[Text]:
    """What a fit has changed."""
    for name, after, before in runs:
        yield from _time_table(after, f"{name}: seconds of a step by the fitted constants, beside measured ones")
        step = next((each for each in before if each.name == STEP), None)
        if step is not None and step.predicted is not None:
            yield Text(f"  (before: {number(step.predicted.likely)} s)", "dim")
        yield Text()
    yield Text(f"Wrote {file}, for plans on {kind}.", "green")


def _source(constants: str) -> str:
    if constants == "defaults":
        return "the default constants; `rljob plan --calibrate` fits them to this run"
    return f"constants calibrated by {constants}"


def _time_table(times: Sequence[ComparedTime], title: str) -> list[Text]:
    rows = []
    for each in times:
        predicted = "" if each.predicted is None else number(each.predicted.likely)
        measured = "" if each.measured is None else number(each.measured.median)
        spread = "" if each.measured is None else f"{number(each.measured.low)} to {number(each.measured.high)}"
        rows.append(
            (
                Text(each.name),
                Text(predicted),
                Text(measured),
                Text(spread),
                _ratio_text(each.ratio, is_small=_is_small(each, times)),
                Text(each.bound_by),
            )
        )
    head = ("PHASE", "PREDICTED", "MEASURED", "RANGE", "RATIO", "BOUND BY")
    return [Text(title, "bold"), *table(head, rows, "  ")]


def _is_small(each: ComparedTime, times: Sequence[ComparedTime]) -> bool:
    """Whether it hardly counts: below a twentieth of the step."""
    step = next((other.measured.median for other in times if other.name == STEP and other.measured), 0.0)
    largest = max(
        each.measured.median if each.measured else 0.0, each.predicted.likely if each.predicted is not None else 0.0
    )
    return largest < 0.05 * step


def _memory_table(memory: Sequence[ComparedMemory]) -> list[Text]:
    rows = [
        (
            Text(each.name),
            Text(_gibibytes(each.predicted)),
            Text(_gibibytes(each.measured)),
            _ratio_text(each.ratio, is_small=False),
        )
        for each in memory
    ]
    head = ("OWNER OR MOMENT", "PREDICTED", "MEASURED", "RATIO")
    return [Text("GiB of the fullest worker, with rows as long as they were", "bold"), *table(head, rows, "  ")]


def _gibibytes(num_bytes: float) -> str:
    value = num_bytes / GIB
    return f"{value:.2f}" if value >= 0.1 else f"{value:.4f}"


def _ratio_text(ratio: float | None, *, is_small: bool) -> Text:
    if ratio is None:
        return Text()
    is_far = not is_small and not 1 / _FAR_OFF <= ratio <= _FAR_OFF
    return Text(f"{ratio:.2f}", "yellow" if is_far else "green")


def _advice_lines(report: RunReport) -> Iterator[Text]:
    if not report.advice:
        yield Text("No change of the job's fields makes a step 1 % shorter, by the model.", "bold")
        return
    yield Text("What to change, each worked out anew; the largest gain first", "bold")
    for advice in report.advice:
        yield from _one_advice(advice, report)
    yield Text()
    yield _last_line(report)


def _last_line(report: RunReport) -> Text:
    """What to change first: all together of what costs nothing but memory."""
    line = Text("Advice: ", "bold")
    if not report.together:
        line.append("nothing that leaves learning and GPUs as they are makes a step 1 % shorter, by the model.")
        return line
    changes = ", ".join(f"{each.change.field}: {each.change.value}" for each in report.together)
    before, after = report.plan.step.total.likely, report.together[-1].step.likely
    line.append(f"{changes} -> a step of {number(after)} instead of {number(before)} s, by the model.")
    return line


def _one_advice(advice: Advice, report: RunReport) -> Iterator[Text]:
    change, worst = advice.change, advice.worst
    yield Text(f"  ~ {change.field}: {change.before} -> {change.value}", "yellow")
    before = report.plan.step.total.likely
    memory = f"{worst.phase.value} {worst.total / GIB:.1f} of {worst.limit / GIB:.1f} GiB, {advice.verdict.value}"
    gain = f"{advice.share:.0%} less"
    yield Text(f"    step {number(before)} -> {number(advice.step.likely)} s ({gain}){_price_text(advice)}; {memory}")
    parts = [f"{name} {_signed(-seconds)} s" for name, seconds in advice.phases[:_MAX_PHASES]]
    yield Text(f'    {", ".join(parts)}; "{advice.section}" in {TUNING_PAGE}', "dim")


def _signed(seconds: float) -> str:
    return f"{'+' if seconds > 0 else '-'}{number(abs(seconds))}"


def _price_text(advice: Advice) -> str:
    if advice.price is Price.LEARNING:
        return "; but it changes what is learned"
    if advice.price is Price.GPUS:
        return f"; but it takes {advice.more_gpus} more GPUs, in a pool of that name"
    return ""
