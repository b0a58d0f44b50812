"""Samples, which are logged prompts and responses: a JSON Lines file with all samples, and a table for the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path

from rich.table import Table
from rich.text import Text

from rljob_trainer.observability.jsonl import JsonlWriter, remove_rows_after
from rljob_trainer.observability.log import printable

SAMPLES_FILE_NAME = "samples.jsonl"
MAX_CELL_CHARS = 200
MIN_TRAINING_SAMPLES, MAX_TRAINING_SAMPLES = 8, 64
"""The samples of a training step: whole groups until there are at least MIN_TRAINING_SAMPLES, and never more than
MAX_TRAINING_SAMPLES."""
MAX_TRAINING_SAMPLE_TOKENS = 65_536
"""Only the first MIN_TRAINING_SAMPLES may have more tokens together. Tokens have about 4 bytes, so a step writes at
most about 256 KiB, or MIN_TRAINING_SAMPLES responses if these are larger."""


class SampleKind(StrEnum):
    """The origin of a sample."""

    TRAIN = "train"
    GREEDY = "eval_greedy"
    SAMPLED = "eval_sampled"


@dataclass(frozen=True, slots=True)
class Sample:
    """One scored response.

    Example: `Sample(3, SampleKind.TRAIN, 0, "09305>", "00359", "00359", 1.0)`
    """

    step: int
    kind: SampleKind
    group: int
    """The number of the response's group in its step: responses to the same prompt have the same number. In an
    evaluation this is the number of the prompt."""
    prompt: str
    response: str
    answer: str
    score: float | None
    """The weighted sum of the rewards, which training uses; None if a reward with a weight other than 0 gave no
    score."""
    rewards: Mapping[str, float | None] = field(default_factory=dict)
    """The score of each reward, by name; None if it gave none."""
    found: Mapping[str, str] = field(default_factory=dict)
    """The answer that each reward extracted from the response, by the reward's name; empty if the reward
    found none. Rewards that do not extract answers are missing. Example: `{"accuracy": "18"}`"""
    outcome: str = ""
    """How the response ended, such as `COMPLETED`."""
    statuses: Mapping[str, str] = field(default_factory=dict)
    """How the scoring ended, by the reward's name. Rewards without scoring processes are missing. Example:
    `{"accuracy": "TIMEOUT"}`"""
    messages: Sequence[Mapping[str, object]] = ()
    """All messages of a conversation with an environment; empty for a single response."""
    evaluation: str = ""
    """The name of the evaluation; empty for a response of training."""
    source: str = ""
    """Where the prompt comes from: the name of the dataset with `training.datasets`, the name of the source with
    `sourceField`, or `<dataset>/<source>`; otherwise empty."""


class SampleLog:
    """Appends samples to `samples.jsonl` of a run folder."""

    def __init__(self, run_folder: Path, resumed_from_step: int | None) -> None:
        """Opens the file, and first removes the rows of steps after `resumed_from_step` (None: a new run, so all rows).

        Raises:
            OSError: the file cannot be written.
        """
        path = run_folder / SAMPLES_FILE_NAME
        remove_rows_after(path, -1 if resumed_from_step is None else resumed_from_step)
        self._writer = JsonlWriter(path)

    def write(self, samples: Sequence[Sample]) -> None:
        """Appends the samples. `messages` and `evaluation` are left out if they are empty.

        Raises:
            OSError: the samples cannot be written.
        """
        for sample in samples:
            fields = asdict(sample)
            for name in ("messages", "evaluation"):
                if not fields[name]:
                    del fields[name]
            self._writer.append(fields)

    def close(self) -> None:
        """Closes the file."""
        self._writer.close()


def sample_table(title: str, samples: Sequence[Sample]) -> Table:
    """Returns the samples as a table, with a column for extracted answers if there are any, and a column per reward if
    there are several rewards. Texts are escaped, so that they can neither move the cursor nor be interpreted as
    markup."""
    table = Table(title=title, title_justify="left", show_lines=False)
    has_found = any(sample.found for sample in samples)
    for name in ("prompt", "response", *(["found"] if has_found else []), "answer"):
        table.add_column(name, overflow="fold")
    table.add_column("score", justify="right")
    names = list(samples[0].rewards) if samples and len(samples[0].rewards) > 1 else []
    for name in names:
        table.add_column(name, justify="right")
    for sample in samples:
        texts = (sample.prompt, sample.response, *([_found_text(sample)] if has_found else []), sample.answer)
        scores = (
            "-" if score is None else f"{score:.4g}"
            for score in (sample.score, *(sample.rewards[name] for name in names))
        )
        table.add_row(*(Text(printable(text, MAX_CELL_CHARS)) for text in texts), *scores)
    return table


def _found_text(sample: Sample) -> str:
    if len(sample.found) == 1:
        return next(iter(sample.found.values()))
    return ", ".join(f"{name}: {text}" for name, text in sample.found.items())
