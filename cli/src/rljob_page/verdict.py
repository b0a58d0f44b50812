"""Says in words how a run is: failed, without progress, with alarms, or healthy.

The trainer computes the alarms and writes them into its run state. What a trainer does not report about itself is found
here: it was killed, it has made no progress for long, attempts failed, or a metric became NaN or infinite.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from statistics import median

from rljob_api.conditions import Reason
from rljob_api.constants import ExitCode
from rljob_api.explanations import EXPLANATIONS
from rljob_api.run_state import RunPhase, RunState
from rljob_page.curves import (
    CHARTS,
    REWARD_MEAN,
    STEP_SECONDS,
    Curves,
    finite,
    held_out_scores,
    not_finite_since,
)
from rljob_page.run_files import AttemptRecord, RunFiles

_SILENT_SECONDS = 300.0
"""A run makes no progress if its state is older than this, and older than `_SILENT_STEPS` usual steps."""
_SILENT_STEPS = 10
_MAX_CAUSES = 8
"""The largest number of failed attempts that are listed with their cause."""
_WAITS = "waits "
"""Begins the activity of a job that waits."""
_NEWEST_STEPS = 20
"""The number of steps from which the usual seconds of a step are taken."""
_KILLED = 137
_EXIT_CODES = {
    int(ExitCode.APPLICATION): "the training or the job's own code failed",
    int(ExitCode.CONFIGURATION): "the job's configuration is invalid",
    int(ExitCode.INFRASTRUCTURE): "a worker or device was lost, or a resource is missing; a retry may succeed",
    _KILLED: "the trainer was killed, usually because the machine ran out of memory",
}
_LOGS_ADVICE = "The last lines of the worker's log are in the folder logs/. `rljob run ... --resume` continues the run."
EXIT_CODES_SECTION = "run-files.md#exit-codes"
MESSAGES_SECTION = "troubleshooting.md#messages-of-the-training"


class Level(StrEnum):
    """How serious something is."""

    GOOD = "good"
    INFO = "info"
    ALARM = "alarm"
    FAILED = "failed"


@dataclass(frozen=True)
class Notice:
    """A message below the verdict: what is wrong, why, and what to do."""

    level: Level
    title: str
    text: str
    docs: str
    """Page and section of docs/ that says more, such as `run-files.md#exit-codes`."""
    advice: str = ""
    """What to do, if the text does not say it."""
    explanation: str = ""
    """What it means, so that a reader does not need the docs; empty if the text says it."""


@dataclass(frozen=True)
class Verdict:
    """How a run is, in words."""

    level: Level
    title: str
    """One sentence with the most important number."""
    notices: tuple[Notice, ...]
    """The most serious first."""
    is_active: bool
    """Whether the run goes on."""

    @property
    def is_healthy(self) -> bool:
        """Whether there is nothing to fix before the run is made faster."""
        return self.level in (Level.GOOD, Level.INFO)


def verdict_of(files: RunFiles, now: datetime) -> Verdict:
    """How the run is at the time `now`."""
    failure, silence = _failure(files), _silence(files, now)
    alarms = (*_alarms(files), *_not_finite(files.curves))
    waiting = _waiting(files)
    serious = tuple(notice for notice in (failure, silence) if notice is not None)
    notices = (*serious, *alarms, *waiting, *_failed_attempts(files))
    active = not serious and not _has_ended(files)
    reached = _progress(files)
    if failure is not None:
        return Verdict(Level.FAILED, f"Failed{reached}: {failure.title}", notices, is_active=False)
    if silence is not None:
        may_go_on = files.process is None or files.has_process
        return Verdict(Level.ALARM, f"No progress{reached}: {silence.title}", notices, may_go_on)
    word = _word(files, active)
    if alarms:
        number = f"{len(alarms)} alarm{'' if len(alarms) == 1 else 's'}"
        # A message continues with what is usual and what to do.
        headline = re.split(r" \(|; |\. ", alarms[0].text, maxsplit=1)[0]
        state = word.removesuffix(" on request")
        return Verdict(Level.ALARM, f"{state} with {number}{reached}: {headline}", notices, active)
    is_healthy = word in ("Complete", "Running", "Starting")
    activity = files.state.activity if files.state is not None else None
    if word in ("Starting", "Waiting") and activity:
        # An activity such as `waits (Suspended): ...` begins with the reason.
        result = ": " + re.sub(r"^\((\w+)\)", r"\1", activity.removeprefix(_WAITS))
    else:
        result = _result(files.curves)
    return Verdict(Level.GOOD if is_healthy else Level.INFO, f"{word}{reached}{result}", notices, active)


def _word(files: RunFiles, active: bool) -> str:
    """The state of a run that has neither failed nor stopped to make progress."""
    phase, newest = _phase(files), _newest_attempt(files)
    if phase is RunPhase.COMPLETE or (newest is not None and newest.exit_code == ExitCode.SUCCESS):
        return "Complete"
    if _is_unknown(files):
        return "State unknown"
    if not active:
        return "Stopped on request"
    if _waiting(files):
        return "Waiting"
    return "Running" if phase in (RunPhase.RUNNING, RunPhase.STOPPING) else "Starting"


def _waiting(files: RunFiles) -> tuple[Notice, ...]:
    """Of a job on a cluster that waits for its pods: what it waits for, and why."""
    state = files.state
    if state is None or state.phase is not RunPhase.STARTING or not (state.activity or "").startswith(_WAITS):
        return ()
    text = f"The job {state.activity}"
    reason = next((word for word in re.findall(r"\((\w+)\)", text) if _explanation(word)), "")
    docs = _section_of(reason) if reason else MESSAGES_SECTION
    title = _words(reason) if reason else "waits"
    return (Notice(Level.INFO, title, text, docs, explanation=_explanation(reason)),)


def _explanation(reason: str) -> str:
    """What a reason means and what to do; empty if it is not a reason that this version knows."""
    found = EXPLANATIONS.get(Reason(reason)) if reason in set(Reason) else None
    return "" if found is None else f"{found.means} {found.advice}"


def _section_of(reason: str) -> str:
    return f"troubleshooting.md#{reason.lower()}"


def usual_step_seconds(curves: Curves) -> float | None:
    """The median over the newest steps; None before the first."""
    values = finite(curves.get(STEP_SECONDS, ([], [])))[1]
    return median(values[-_NEWEST_STEPS:]) if values else None


def _phase(files: RunFiles) -> RunPhase | None:
    """The phase of the newest attempt; None until its trainer has written a state."""
    state, newest = files.state, _newest_attempt(files)
    return state.phase if state is not None and (newest is None or state.attempt >= newest.number) else None


def _has_ended(files: RunFiles) -> bool:
    newest = _newest_attempt(files)
    return _phase(files) in (RunPhase.COMPLETE, RunPhase.FAILED, RunPhase.STOPPED) or (
        newest is not None and newest.ended != ""
    )


def _is_unknown(files: RunFiles) -> bool:
    """Whether the folder has steps of a run, but nothing that says whether it goes on, such as only metrics."""
    return files.state is None and not files.attempts and bool(_finished_steps(files.curves))


def _newest_attempt(files: RunFiles) -> AttemptRecord | None:
    return files.attempts[-1] if files.attempts else None


def _progress(files: RunFiles) -> str:
    if files.state is None:
        steps = _finished_steps(files.curves)
        return f" at step {steps[-1]}" if steps else " before the first step"
    if files.state.progress.total_steps == 0:
        return ""  # Only evaluations.
    return f" at step {newest_step(files.state, files.curves)} of {files.state.progress.total_steps}"


def newest_step(state: RunState, curves: Curves) -> int:
    """The newest finished step. The state of a job on a cluster may be older than its metrics."""
    steps = _finished_steps(curves)
    return max(state.progress.step, min(steps[-1] if steps else 0, state.progress.total_steps))


def _finished_steps(curves: Curves) -> Sequence[int]:
    """The numbers of the finished steps, in order."""
    return curves.get(STEP_SECONDS, ([], []))[0]


def _result(curves: Curves) -> str:
    """The score at the beginning and now."""
    scores = held_out_scores(curves)
    names = {
        metric: f"held-out score {name}" if len(scores) > 1 else "held-out score" for name, metric in scores.items()
    }
    for metric, what in (names | {REWARD_MEAN: "reward"}).items():
        values = finite(curves.get(metric, ([], [])))[1]
        if len(values) > 1:
            return f": {what} {values[0]:.3g} → {values[-1]:.3g}"
        if values:
            return f": {what} {values[-1]:.3g}"
    return ""


def _failure(files: RunFiles) -> Notice | None:
    state, newest = files.state, _newest_attempt(files)
    code = newest.exit_code if newest is not None else None
    if state is not None and state.error is not None and _phase(files) is not None:
        error = state.error
        where = ", ".join(
            f"{what} {value}"
            for what, value in (("role", error.role), ("rank", error.rank), ("pod", error.pod), ("node", error.node))
            if value is not None
        )
        text = f"{error.message}\n({where})" if where else error.message
        explanation = _explanation(error.kind)
        docs = _section_of(error.kind) if explanation else MESSAGES_SECTION
        return Notice(Level.FAILED, _words(error.kind), text, docs, explanation=explanation)
    if _phase(files) is RunPhase.FAILED and not _is_failure(code):
        text = "The trainer reported that the training failed, without an error."
        return Notice(Level.FAILED, "the trainer reported no error", text, MESSAGES_SECTION, _LOGS_ADVICE)
    if not _is_failure(code):
        return None
    meaning = _meaning(code)
    text = f"Attempt {newest.number if newest else 1} ended with exit code {code}: {meaning}."
    return Notice(Level.FAILED, meaning, text, EXIT_CODES_SECTION, _LOGS_ADVICE)


def _is_failure(code: int | None) -> bool:
    return code is not None and code not in (ExitCode.SUCCESS, ExitCode.INTERRUPTED)


def _meaning(code: int | None) -> str:
    return _EXIT_CODES.get(code or 0, f"the trainer ended with exit code {code}")


def _failed_attempts(files: RunFiles) -> Iterator[Notice]:
    """How many of several attempts failed, and why. An attempt without an end, before the newest, was killed."""
    causes = [
        f"attempt {each.number}: {_meaning(each.exit_code) if each.ended else 'its process was killed'}"
        for each in files.attempts
        if _is_failure(each.exit_code) or (not each.ended and each is not files.attempts[-1])
    ]
    if causes and len(files.attempts) > 1:
        title = f"{len(causes)} of {len(files.attempts)} attempts failed"
        left_out = f"; and {len(causes) - _MAX_CAUSES} earlier ones" if len(causes) > _MAX_CAUSES else ""
        yield Notice(Level.INFO, title, f"{'; '.join(causes[-_MAX_CAUSES:])}{left_out}.", EXIT_CODES_SECTION)


def _silence(files: RunFiles, now: datetime) -> Notice | None:
    """No progress for long, in a run without a recorded end."""
    if _has_ended(files):
        return None
    is_gone = files.process is not None and not files.has_process
    if files.state is None and not is_gone:
        return None
    silent = _silent_seconds(files, now)
    usual = usual_step_seconds(files.curves)
    if silent is None or silent < max(_SILENT_SECONDS, _SILENT_STEPS * (usual or 0.0)):
        return None
    steps = "" if usual is None else f" A step usually takes {duration(usual)}."
    text = f"The trainer has written nothing for {duration(silent)}.{steps}"
    if is_gone:
        advice = (
            f"Its process {files.process} does not exist on this machine. If the run was here, it was killed: continue"
            " with `rljob run ... --resume`."
        )
        title = f"its process ended {duration(silent)} ago or more"
        return Notice(Level.ALARM, title, text, EXIT_CODES_SECTION, advice)
    activity = files.state.activity if files.state is not None else None
    logs = "the files in logs/" if files.attempts else "its log (`rljob logs NAME`)"
    return Notice(
        Level.ALARM,
        f"silent for {duration(silent)}",
        text + (f" Its last activity: {activity}." if activity else ""),
        MESSAGES_SECTION,
        f"Look at the last lines of {logs}: a call may hang, or the run was stopped.",
    )


def _silent_seconds(files: RunFiles, now: datetime) -> float | None:
    """Seconds since the trainer wrote its state or its metrics, or since the attempt began; None if that is unknown."""
    times = [each.started for each in files.attempts[-1:]]
    times += [files.state.written_at] if files.state is not None else []
    written = [found.timestamp() for found in map(time_of, times) if found is not None]
    # The state of a job on a cluster may be older than its metrics.
    written += finite(files.curves.get("wall_time", ([], [])))[1][-1:]
    return now.timestamp() - max(written) if written else None


def _alarms(files: RunFiles) -> Iterator[Notice]:
    """The alarms that the trainer has computed."""
    for alarm in (files.state.alarms if files.state is not None else None) or ():
        steps = f" ({alarm.steps})" if alarm.steps else ""
        # Of a job on a cluster, only the most serious alarm has steps; the messages of the others are the explanations.
        explanation = _explanation(alarm.reason) if alarm.steps else ""
        title = f"{_words(alarm.reason).lower()}{steps}"
        yield Notice(Level.ALARM, title, alarm.message, _section_of(alarm.reason), explanation=explanation)


def _not_finite(curves: Curves) -> Iterator[Notice]:
    """Metrics of the charts whose newest value is NaN or infinite."""
    names = [*(line.metric for chart in CHARTS for line in chart.lines), *held_out_scores(curves).values()]
    found = {name: since for name in names if (since := not_finite_since(curves.get(name, ([], [])))) is not None}
    if found:
        metrics = ", ".join(f"{name} since step {since}" for name, since in found.items())
        advice = (
            "Usually training has diverged: reduce `optimizer.learningRate`, and resume from an earlier checkpoint."
        )
        yield Notice(Level.ALARM, "not finite", f"not finite: {metrics}", "training-health.md", advice)


def _words(name: str) -> str:
    """`RewardErrors` as `Reward errors`."""
    parts = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z0-9]+|.", name)
    return " ".join([*parts[:1], *(part if part.isupper() else part.lower() for part in parts[1:])])


def duration(seconds: float) -> str:
    """`0.42 s`, `45 s`, `12 min`, `3 h 5 min`, `2 d 4 h`."""
    if seconds < 10:
        return f"{seconds:.2g} s"
    whole = round(seconds)
    for size, unit, smaller, smaller_unit in ((86400, "d", 3600, "h"), (3600, "h", 60, "min")):
        if whole >= size:
            rest = whole % size // smaller
            return f"{whole // size} {unit}" + (f" {rest} {smaller_unit}" if rest else "")
    return f"{whole // 60} min" if whole >= 120 else f"{whole} s"


def time_of(text: str) -> datetime | None:
    """An ISO 8601 time; None if the text is none."""
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        return None
    return found if found.tzinfo is not None else found.replace(tzinfo=UTC)
