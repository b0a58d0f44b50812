"""What the trainer sends to the process of a tracker, as lines of JSON, and what comes back."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum

from rljob_api.v1alpha1.pod_environment import is_secret_name
from rljob_api.v1alpha1.tracker import Tracker

REPORT_PREFIX = "rljob-report "
"""A line of the process's output that begins with this is a report for the trainer's log. All other lines are output of
the tracker's library."""
MIN_SECRET_CHARS = 6
"""Shorter values of variables are not removed, because ordinary words would be removed, too."""
_USER_OF_URL = re.compile(r"(?<=://)[^/\s]+@")
"""User and password of a URL: up to the last `@` before the path, because a password may contain `@`."""


class MessageKind(StrEnum):
    """What a message is about."""

    BEGIN = "begin"
    METRICS = "metrics"
    SAMPLES = "samples"
    END = "end"


@dataclass(frozen=True, slots=True)
class RunFacts:
    """What a tracker needs to know about an attempt."""

    job_name: str
    namespace: str | None
    run_id: str
    """The same for all attempts of the job: the job's UID, or on one machine the id in the run folder."""
    attempt: int
    run_folder: str
    run_state_file: str
    """On a cluster it is outside of the run folder."""
    resumed_from_step: int | None
    job_text: str
    """The resolved job as YAML."""


@dataclass(frozen=True, slots=True)
class Begin:
    """The first message."""

    facts: RunFacts
    tracker: Tracker


@dataclass(frozen=True, slots=True)
class MetricsRow:
    """The metrics of a step, or of an evaluation after it."""

    step: int
    wall_time: float
    """Seconds since 1970."""
    values: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class SampleTable:
    """Samples of an evaluation. All rows have the same columns."""

    name: str
    """Tables with different names do not replace each other."""
    step: int
    columns: list[str]
    rows: list[list[str | float | None]]


@dataclass(frozen=True, slots=True)
class End:
    """The last message. `exit_code` is that of the trainer."""

    exit_code: int
    sends_page: bool
    """Whether the tracker gets the page of the run. Not after a stop request, which leaves little time."""


Report = Callable[[str, str], None]
"""Sends a line to the trainer's log. The arguments are a level, `info` or `warning`, and a text."""
Message = Begin | MetricsRow | SampleTable | End


def encode(message: Message) -> bytes:
    """The message as one line."""
    match message:
        case Begin(facts, tracker):
            fields = {"kind": MessageKind.BEGIN, "facts": asdict(facts), "tracker": tracker.to_full_wire()}
        case MetricsRow():
            fields = {"kind": MessageKind.METRICS, **asdict(message)}
        case SampleTable():
            fields = {"kind": MessageKind.SAMPLES, **asdict(message)}
        case End():
            fields = {"kind": MessageKind.END, **asdict(message)}
    # ASCII, because a model's text may have unpaired surrogates.
    return json.dumps(fields).encode() + b"\n"


def decode(line: bytes) -> Message:
    """The message of a line that `encode` wrote."""
    fields = json.loads(line)
    kind = MessageKind(fields.pop("kind"))
    if kind is MessageKind.BEGIN:
        return Begin(RunFacts(**fields["facts"]), Tracker.from_wire(fields["tracker"]))
    kinds: dict[MessageKind, type[MetricsRow | SampleTable | End]] = {
        MessageKind.METRICS: MetricsRow,
        MessageKind.SAMPLES: SampleTable,
        MessageKind.END: End,
    }
    return kinds[kind](**fields)


class Redaction:
    """Removes the values of secret variables, and users and passwords of URLs, from texts."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        """`environment`: the variables; those with a name such as WANDB_API_KEY or MLFLOW_TRACKING_PASSWORD are
        secret."""
        secrets = [value for name, value in environment.items() if is_secret_name(name)]
        # A value from a file often ends with a newline, which libraries remove; and output is a line at a time.
        values = {part.strip() for value in secrets for part in (value, *value.splitlines())}
        # The JSON-escaped form, too.
        found = {written for value in values for written in (value, json.dumps(value)[1:-1])}
        # The longest first, because one value may be a part of another.
        self._secrets = sorted((value for value in found if len(value) >= MIN_SECRET_CHARS), key=len, reverse=True)

    def __call__(self, text: str) -> str:
        """The text with `***` instead of secrets."""
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return _USER_OF_URL.sub("***@", text)
