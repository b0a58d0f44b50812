"""Finds rows whose answer MathAnswer cannot score, or whose tests Code cannot run, before any device is reserved.

For Code, the tests of the first MAX_ROWS_OF_TESTS rows of each dataset are parsed. For MathAnswer:

1. For every row: checks the type of the answer, and strings that mean a missing value (`rewards.answer_values`).
2. For every distinct answer: scores an empty response with it, in the reward's scoring processes, in parallel, within
   the reward's time limit.

For a training set of more than MAX_ROWS_PARSED rows step 2 would take too long. For such a set, step 2 is done for each
row when the row is drawn; a row that fails is skipped, counted and logged. Held-out rows are always checked in advance,
because every evaluation scores all of them.

If a process fails, the data may still be correct: an answer at which a process died or ran out of memory is tried once
more, and so is an answer that timed out. If a process dies again, this attempt ends with ResourceError, because a retry
may succeed. Rows that are drawn during training are different, because a retry would draw the same row again. Such a
row is skipped if a process can still score a known good answer.
"""

from __future__ import annotations

import builtins
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from itertools import compress

from rljob_api.v1alpha1.reward import RewardType
from rljob_trainer.control_groups import num_usable_cores
from rljob_trainer.datasets.prompts import DATASET, PromptRow
from rljob_trainer.errors import DatasetError, ResourceError
from rljob_trainer.rewards.answer_values import why_unusable
from rljob_trainer.rewards.base import MACHINE_ERRORS, RewardOutcome, RewardRequest, RewardStatus, excerpt
from rljob_trainer.rewards.code_tests import parse_tests
from rljob_trainer.rewards.process_pool import ScorerPool
from rljob_trainer.sandbox.confinement import available_layers
from rljob_trainer.workers.reward import RewardSettings, ScorerSettings

log = logging.getLogger(__name__)

MAX_ROWS_PARSED = 100_000
"""Up to this many training rows, all answers are parsed in advance."""
MAX_ROWS_OF_TESTS = 10_000
"""The tests of at most this many rows of a dataset are parsed in advance, because tests may be large: some rows have
megabytes."""
MAX_PROCESSES = 16
"""Scoring processes for the check; each needs about 60 MiB on the controller's node."""
ANSWERS_PER_BLOCK = 256
"""Answers that are parsed between two progress reports."""
MAX_FAILED = 100
"""The check stops after this many failed distinct answers: probably the column is wrong, and each further answer could
take as long as the time limit."""
NUM_ROWS_NAMED = 5
"""Rows that an error message names."""
NUM_ROWS_LOGGED = 20
"""Skipped rows of one batch that are logged."""
ADVICE = "fix or remove these rows, or name another column"
KNOWN_GOOD_ANSWER = "1"
"""An answer that MathAnswer can score."""
MAX_ANSWER_CHARACTERS = 80
MAX_REASON_CHARACTERS = 300
USUAL_KEYS = ("ground_truth", "answer", "final_answer", "value")
"""Keys under which dictionaries usually contain the answer."""

AnswerKey = tuple[type, object]
"""An answer with its type: 1, 1.0 and True are equal in Python."""


def start_check_pools(reward: RewardSettings, stack: ExitStack) -> list[ScorerPool]:
    """Starts the processes of each scorer without waiting for them; `stack` closes them. A MathAnswer scorer gets
    several processes to parse answers. Any other scorer gets one process, which shows whether the scorer can be
    loaded, and whether its service replies."""
    num_processes = [
        min(each.reward.num_processes, num_usable_cores(), MAX_PROCESSES) if _reads_answers(each) else 1
        for each in reward.scorers
    ]
    pools = zip(reward.scorers, num_processes, strict=True)
    return [stack.enter_context(reward.start_pool(scorer, number, 0, probes_service=True)) for scorer, number in pools]


def refuse_unusable_answers(rows: Sequence[PromptRow], dataset: str, answer_field: str) -> None:
    """Does step 1 (see the module's docstring). `dataset` is the field path, such as `spec.training.dataset`. Raises
    DatasetError."""
    reasons = [(row, reason) for row in rows if (reason := why_unusable(row.answer)) is not None]
    if reasons:
        dictionary = next((row.answer for row, _ in reasons if isinstance(row.answer, Mapping)), None)
        advice = ADVICE
        if dictionary:
            key = next((key for key in USUAL_KEYS if key in dictionary), next(iter(dictionary)))
            advice = f"name the value in the dictionary, such as `answerField: {answer_field}.{key}`"
        raise DatasetError(_message(dataset, f"{len(reasons)} of {len(rows)}", reasons, advice))


def refuse_unusable_tests(rows: Sequence[PromptRow], dataset: str) -> None:
    """Checks that the tests of a Code reward can be parsed. Raises DatasetError that names the first rows."""
    checked = rows[:MAX_ROWS_OF_TESTS]
    reasons = [(row, reason) for row in checked if (reason := _why_unusable_tests(row.answer)) is not None]
    if reasons:
        number = f"{len(reasons)} of {len(checked)}"
        raise DatasetError(_message(dataset, number, reasons, ADVICE, RewardType.CODE))


def _why_unusable_tests(answer: object) -> str | None:
    try:
        parse_tests(answer)
    except ValueError as error:
        return str(error)
    return None


def check_rewards(
    scorers: Sequence[ScorerSettings],
    pools: Sequence[ScorerPool],
    training: Mapping[str, Sequence[PromptRow]],
    held_out: Mapping[str, Sequence[PromptRow]],
    doing: Callable[[str], None] = lambda _: None,
    *,
    is_large: bool,
) -> DrawnRowFilter | None:
    """Waits until every scorer is loaded, then does step 2. Returns the check for rows that are drawn during training;
    None if all rows are already checked, or if no scorer is MathAnswer.

    `training`: the rows of each dataset, by its field path. `held_out`: the same for evaluations that MathAnswer
    scores. `pools` has one pool per scorer; all are closed, except the one that checks drawn rows. `doing` is called
    with the progress. `is_large`: whether the training set is too large to parse all answers; `training` is ignored
    then. Raises ConfigurationError if a scorer cannot be loaded, DatasetError that names the rows whose answers cannot
    be scored, ResourceError."""
    for pool in pools:
        pool.wait_until_ready()
    if any(each.reward.type is RewardType.CODE for each in scorers):
        layers = available_layers()
        log.info("sandbox: %s", layers if isinstance(layers, str) else layers.describe())
    # If several scorers parse answers, only the scorer with the shortest time limit checks them, because it is the
    # strictest.
    found = [pair for pair in zip(scorers, pools, strict=True) if _reads_answers(pair[0])]
    scorer, used = min(found, key=lambda pair: pair[0].reward.timeout_seconds, default=(None, None))
    for pool in pools:
        if pool is not used:
            pool.close()
    if scorer is None or used is None:
        return None
    parser = AnswerParser(used, scorer.where)
    names = {each.reward.name for each, _ in found}
    scored = {where: [row for row in rows if _is_scored(row, names)] for where, rows in training.items()}
    for dataset, rows in {**held_out, **({} if is_large else scored)}.items():
        _refuse_unscorable(parser, rows, dataset, doing)
    if not is_large:
        used.close()
        return None
    log.info(
        "data: more than %d training rows; answers are checked when rows are drawn, and rows whose answer cannot be "
        "scored are skipped",
        MAX_ROWS_PARSED,
    )
    return DrawnRowFilter(parser, names)


class AnswerParser:
    """Finds out which answers MathAnswer can score. Each distinct answer is tried once."""

    def __init__(self, pool: ScorerPool, where: str) -> None:
        """`where` is the reward's field path, such as `spec.training.rewards[0]`."""
        self._pool = pool
        self._where = where
        self._reasons: dict[AnswerKey, str | None] = {}

    def parse(self, rows: Sequence[PromptRow], *, may_blame_answers: bool = False) -> None:
        """Tries the answers of these rows. Raises ResourceError if a process fails twice at one answer. With
        `may_blame_answers` it raises only if a process also fails at a known good answer."""
        new = {key: row for key, row in _distinct(rows).items() if key not in self._reasons}
        outcomes = self._outcomes(new)
        again = {key: row for key, row in new.items() if _may_succeed_later(outcomes[key])}
        outcomes |= self._outcomes(again)
        for key, row in new.items():
            if _is_machine_failure(outcomes[key]) and not (may_blame_answers and self._can_score()):
                raise ResourceError(self._no_resources_message(row, outcomes[key]))
        self._reasons |= {key: self._reason(row, outcomes[key]) for key, row in new.items()}

    def why_unscorable(self, row: PromptRow) -> str | None:
        """Returns why the row's answer cannot be scored, in the form of `why_unusable`; None if it can be scored or was
        not tried."""
        return self._reasons.get(_key(row))

    def _can_score(self) -> bool:
        request = RewardRequest("", "", KNOWN_GOOD_ANSWER, {})
        return self._pool.submit([request]).result()[0].status is RewardStatus.OK

    def _outcomes(self, rows: Mapping[AnswerKey, PromptRow]) -> dict[AnswerKey, RewardOutcome]:
        requests = [RewardRequest("", "", row.answer, {}) for row in rows.values()]
        return dict(zip(rows, self._pool.submit(requests).result(), strict=True))

    def _reason(self, row: PromptRow, outcome: RewardOutcome) -> str | None:
        match outcome.status:
            case RewardStatus.OK:
                return None
            case RewardStatus.TIMEOUT:
                return f"{_seen(row)}, for which the scorer {outcome.detail} ({self._where}.timeoutSeconds)"
        first_line = outcome.detail.partition("\n")[0]
        if _is_machine_failure(outcome):
            return f"{_seen(row)}, for which the scorer {excerpt(first_line, MAX_REASON_CHARACTERS)}, twice"
        what = first_line.removeprefix("raised ").removeprefix("ValueError: ")
        return f"{_seen(row)}, which cannot be scored: {excerpt(what, MAX_REASON_CHARACTERS)}"

    def _no_resources_message(self, row: PromptRow, outcome: RewardOutcome) -> str:
        return (
            f"{self._where}: checking the answer {_seen(row)} ({row.location}) failed twice, because the scorer "
            f"{excerpt(outcome.detail, MAX_REASON_CHARACTERS)}; probably the trainer is out of memory: give it more "
            "memory. If this happens only for this row, remove the row"
        )


class DrawnRowFilter:
    """Checks rows when they are drawn during training, and skips those whose answer cannot be scored."""

    def __init__(self, parser: AnswerParser, rewards: Collection[str] = ()) -> None:
        """`rewards`: the names of all MathAnswer rewards. Rows of a dataset that names none of them are always
        usable."""
        self._parser = parser
        self._rewards = rewards
        self._left_out: set[tuple[str, str]] = set()
        """Location and prompt of the skipped rows: rows of two datasets may have the same index."""

    def are_usable(self, rows: Sequence[PromptRow]) -> list[bool]:
        """Returns for each row whether its answer can be scored. The result for a row does not change during this
        attempt; after a retry, an answer that timed out or killed a process may be usable. Logs each skipped row once.
        Raises ResourceError."""
        scored = [_is_scored(row, self._rewards) for row in rows]
        self._parser.parse(list(compress(rows, scored)), may_blame_answers=True)
        reasons = [
            self._parser.why_unscorable(row) if is_scored else None for row, is_scored in zip(rows, scored, strict=True)
        ]
        new = [
            f"\n  {row.location}: the answer is {reason}"
            for row, reason in zip(rows, reasons, strict=True)
            if reason is not None and _identity(row) not in self._left_out
        ]
        self._left_out |= {_identity(row) for row, reason in zip(rows, reasons, strict=True) if reason is not None}
        if new:
            where = "spec.training.datasets" if any(row.dataset for row in rows) else DATASET
            log.warning(
                "%s: rows skipped because MathAnswer cannot score their answer: %d now, %d so far%s",
                *(where, len(new), len(self._left_out), "".join(new[:NUM_ROWS_LOGGED])),
            )
        return [reason is None for reason in reasons]


def _refuse_unscorable(
    parser: AnswerParser, rows: Sequence[PromptRow], dataset: str, doing: Callable[[str], None]
) -> None:
    """Parses all answers, and stops early if too many fail. Raises DatasetError if any fails."""
    distinct = list(_distinct(rows).values())
    num_failed, num_parsed = 0, 0
    while num_parsed < len(distinct) and num_failed < MAX_FAILED:
        if len(distinct) > ANSWERS_PER_BLOCK:
            doing(f"checks the answers of {dataset}; {num_parsed} of {len(distinct)} parsed")
        block = distinct[num_parsed : num_parsed + ANSWERS_PER_BLOCK]
        parser.parse(block)
        num_parsed += len(block)
        num_failed += sum(parser.why_unscorable(row) is not None for row in block)
    reasons = [(row, reason) for row in rows if (reason := parser.why_unscorable(row)) is not None]
    if reasons:
        at_least = "at least " if num_parsed < len(distinct) else ""
        raise DatasetError(_message(dataset, f"{at_least}{len(reasons)} of {len(rows)}", reasons, ADVICE))


def _message(
    dataset: str,
    number: str,
    reasons: Sequence[tuple[PromptRow, str]],
    advice: str,
    reward: RewardType = RewardType.MATH_ANSWER,
) -> str:
    named = [f"\n  {row.location}: the answer is {reason}" for row, reason in reasons[:NUM_ROWS_NAMED]]
    more = f"\n  and {len(reasons) - len(named)} more" if len(reasons) > len(named) else ""
    return (
        f"{dataset}.answerField: {number} rows have an answer that the reward {reward} cannot score; "
        f"{advice}{''.join(named)}{more}"
    )


def _is_scored(row: PromptRow, rewards: Collection[str]) -> bool:
    """Whether one of these rewards scores responses to the prompt of the row."""
    return not row.rewards or not set(rewards).isdisjoint(row.rewards)


def _reads_answers(scorer: ScorerSettings) -> bool:
    return scorer.reward.type is RewardType.MATH_ANSWER


_RAISED_BY_MACHINE = tuple(
    f"raised {name}"
    for name, kind in vars(builtins).items()
    if isinstance(kind, type) and issubclass(kind, MACHINE_ERRORS)
)
"""How `RewardOutcome.detail` begins if the scorer raised one of MACHINE_ERRORS or a subclass, such as
FileNotFoundError."""


def _is_machine_failure(outcome: RewardOutcome) -> bool:
    """Whether the scoring process died, ran out of memory, or could not read a file or import a module. Probably the
    answer did not cause this."""
    has_died = outcome.status in (RewardStatus.DIED, RewardStatus.KILLED)
    return has_died or outcome.detail.startswith(_RAISED_BY_MACHINE)


def _may_succeed_later(outcome: RewardOutcome) -> bool:
    # After a timeout or the end of a process, the pool has already tried a second time.
    return outcome.status is RewardStatus.ERROR and _is_machine_failure(outcome)


def _distinct(rows: Sequence[PromptRow]) -> dict[AnswerKey, PromptRow]:
    """Returns the first row of each distinct answer."""
    found: dict[AnswerKey, PromptRow] = {}
    for row in rows:
        found.setdefault(_key(row), row)
    return found


def _identity(row: PromptRow) -> tuple[str, str]:
    return row.location, row.prompt


def _seen(row: PromptRow) -> str:
    kind = "the string" if isinstance(row.answer, str) else "the number"
    return f"{kind} {excerpt(repr(row.answer), MAX_ANSWER_CHARACTERS)}"


def _key(row: PromptRow) -> AnswerKey:
    assert isinstance(row.answer, str | int | float), "call refuse_unusable_answers first"
    return type(row.answer), row.answer
