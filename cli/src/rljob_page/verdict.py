"""Says in words how a run is: failed, without progress, with alarms, or healthy.

The trainer computes the alarms and writes them into its run state. What a trainer cannot report about itself is found
here: it was killed, or it has made no progress for long.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from statistics import median

from rljob_api.constants import ExitCode
from rljob_api.run_state import RunPhase
from rljob_page.curves import EVAL_GREEDY, EVAL_SAMPLED, REWARD_MEAN, STEP_SECONDS, Curves
from rljob_page.run_files import AttemptRecord, RunFiles

_SILENT_SECONDS = 300.0
"""A run makes no progress if its state is older than this, and older than `_SILENT_STEPS` usual steps."""
_SILENT_STEPS = 10
_NEWEST_STEPS = 20
"""The number of steps from which the usual seconds of a step are taken."""
_KILLED = 137
_EXIT_CODES = {
    int(ExitCode.APPLICATION): "the training or the job's own code failed",
    int(ExitCode.CONFIGURATION): "the job's configuration is invalid",
    int(ExitCode.INFRASTRUCTURE): "a worker or device was lost, or a resource is missing; a retry may succeed",
    _KILLED: "the trainer was killed, usually because the machine ran out of memory",
}
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
    """Something that a reader should know first."""

    level: Level
    title: str
    text: str
    docs: str
    """Page and section of docs/ that says more, such as `run-files.md#exit-codes`."""
    advice: str = ""
    """What to do, if the text does not say it."""


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


def verdict_of(files: RunFiles, curves: Curves, now: datetime) -> Verdict:
    """How the run is at the time `now`."""
    failure, silence = _failure(files), _silence(files, curves, now)
    alarms = tuple(_alarms(files))
    serious = tuple(notice for notice in (failure, silence) if notice is not None)
    notices = (*serious, *alarms)
    phase = files.state.phase if files.state is not None else None
    active = not serious and not _has_ended(files)
    reached = _progress(files)
    number = f"{len(alarms)} alarm{'' if len(alarms) == 1 else 's'}"
    if failure is not None:
        return Verdict(Level.FAILED, f"Failed{reached}: {failure.title}", notices, is_active=False)
    if silence is not None:
        may_go_on = files.process is None or files.has_process
        return Verdict(Level.ALARM, f"No progress{reached}: {silence.title}", notices, may_go_on)
    if alarms:
        state = "Running" if active else "Complete" if phase is RunPhase.COMPLETE else "Stopped"
        # A message continues with what is usual and what to do.
        headline = re.split(r" \(|; |\. ", alarms[0].text, maxsplit=1)[0]
        return Verdict(Level.ALARM, f"{state} with {number}{reached}: {headline}", notices, active)
    result = _result(curves)
    if phase is RunPhase.COMPLETE:
        return Verdict(Level.GOOD, f"Complete{reached}{result}", notices, is_active=False)
    if not active:
        return Verdict(Level.INFO, f"Stopped on request{reached}{result}", notices, is_active=False)
    word = "Running" if phase in (RunPhase.RUNNING, RunPhase.STOPPING) else "Starting"
    if word == "Starting" and files.state is not None and files.state.activity:
        result = f": {files.state.activity}"
    return Verdict(Level.GOOD, f"{word}{reached}{result}", notices, is_active=True)


def usual_step_seconds(curves: Curves) -> float | None:
    """The median over the newest steps; None before the first."""
    values = curves.get(STEP_SECONDS, ([], []))[1]
    return median(values[-_NEWEST_STEPS:]) if values else None


def _has_ended(files: RunFiles) -> bool:
    phase = files.state.phase if files.state is not None else None
    newest = _newest_attempt(files)
    return phase in (RunPhase.COMPLETE, RunPhase.FAILED, RunPhase.STOPPED) or (
        newest is not None and newest.ended != ""
    )


def _newest_attempt(files: RunFiles) -> AttemptRecord | None:
    return files.attempts[-1] if files.attempts else None


def _progress(files: RunFiles) -> str:
    if files.state is None:
        return " before the first step"
    return f" at step {files.state.progress.step} of {files.state.progress.total_steps}"


def _result(curves: Curves) -> str:
    """The score at the beginning and now."""
    for name, what in ((EVAL_GREEDY, "held-out score"), (EVAL_SAMPLED, "held-out score"), (REWARD_MEAN, "reward")):
        values = curves.get(name, ([], []))[1]
        if len(values) > 1:
            return f": {what} {values[0]:.3g} → {values[-1]:.3g}"
        if values:
            return f": {what} {values[-1]:.3g}"
    return ""


def _failure(files: RunFiles) -> Notice | None:
    state, newest = files.state, _newest_attempt(files)
    code = newest.exit_code if newest is not None else None
    of_this_attempt = state is not None and (newest is None or state.attempt >= newest.number)
    if state is not None and of_this_attempt and state.error is not None:
        error = state.error
        where = ", ".join(
            f"{what} {value}"
            for what, value in (("role", error.role), ("rank", error.rank), ("pod", error.pod), ("node", error.node))
            if value is not None
        )
        text = f"{error.message}\n({where})" if where else error.message
        return Notice(Level.FAILED, _words(error.kind), text, MESSAGES_SECTION)
    if code is None or code in (ExitCode.SUCCESS, ExitCode.INTERRUPTED):
        return None
    meaning = _EXIT_CODES.get(code, f"the trainer ended with exit code {code}")
    text = f"Attempt {newest.number if newest else 1} ended with exit code {code}: {meaning}."
    log = "The last lines of the worker's log are in the folder logs/. `rljob run ... --resume` continues the run."
    return Notice(Level.FAILED, meaning, text, EXIT_CODES_SECTION, log)


def _silence(files: RunFiles, curves: Curves, now: datetime) -> Notice | None:
    """No progress for long, in a run that has not ended as far as its files say."""
    if files.state is None or _has_ended(files):
        return None
    written = time_of(files.state.written_at)
    silent = 0.0 if written is None else (now - written).total_seconds()
    usual = usual_step_seconds(curves)
    if silent < max(_SILENT_SECONDS, _SILENT_STEPS * (usual or 0.0)):
        return None
    steps = "" if usual is None else f" A step usually takes {duration(usual)}."
    text = f"The trainer has written nothing for {duration(silent)}.{steps}"
    if files.process is not None and not files.has_process:
        advice = (
            f"Its process {files.process} does not exist on this machine. If the run was here, it was killed: continue"
            " with `rljob run ... --resume`."
        )
        return Notice(
            Level.ALARM, f"its process ended {duration(silent)} ago or more", text, EXIT_CODES_SECTION, advice
        )
    activity = f" Its last activity: {files.state.activity}." if files.state.activity else ""
    advice = "Look at the last lines of the files in logs/: a call may hang, or the run was stopped."
    return Notice(Level.ALARM, f"silent for {duration(silent)}", text + activity, MESSAGES_SECTION, advice)


def _alarms(files: RunFiles) -> Iterator[Notice]:
    """The alarms that the trainer has computed."""
    for alarm in (files.state.alarms if files.state is not None else None) or ():
        steps = f" ({alarm.steps})" if alarm.steps else ""
        section = f"troubleshooting.md#{alarm.reason.lower()}"
        yield Notice(Level.ALARM, f"{_words(alarm.reason).lower()}{steps}", alarm.message, section)


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
