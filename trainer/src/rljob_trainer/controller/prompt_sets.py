"""The prompts of a run: training prompts and held-out prompts; the stream of training prompts, and its position."""

from __future__ import annotations

import hashlib
import json
import logging
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from rljob_api.v1alpha1.dataset import Dataset, DatasetType, Duplicates, NamedDataset
from rljob_api.v1alpha1.environment_rules import rewards_of
from rljob_api.v1alpha1.reward import Reward, RewardType
from rljob_api.v1alpha1.training import PromptSamplingType, Training, reward_names
from rljob_trainer.controller.checkpointing import StateParts
from rljob_trainer.controller.checks.answers import MAX_ROWS_PARSED, refuse_unusable_answers, refuse_unusable_tests
from rljob_trainer.datasets.cursor import PromptCursor
from rljob_trainer.datasets.filter_processes import FilterPass
from rljob_trainer.datasets.filters import HELD_OUT_FILTERS, FilterReport, HeldOut, comparable
from rljob_trainer.datasets.indexed_rows import IndexedRows
from rljob_trainer.datasets.loading import load_rows, without_dropped
from rljob_trainer.datasets.mixture import MixtureCursor, Source
from rljob_trainer.datasets.parquet_files import ParquetFiles
from rljob_trainer.datasets.pass_rates import PassRates
from rljob_trainer.datasets.prompts import DATASET, PromptMaker, PromptRow, evaluation_dataset, repeated_prompts
from rljob_trainer.datasets.row_index import RowIndex, key_of, opened_or_built
from rljob_trainer.datasets.rows import local_dataset, named_fields, parquet_files_of
from rljob_trainer.errors import ConfigurationError, DatasetError
from rljob_trainer.models.tokenizer import Tokenizer
from rljob_trainer.observability.metrics import SOURCE_EPOCHS, SOURCE_PREFIX
from rljob_trainer.rewards.answer_values import why_unusable

Cursor = PromptCursor[PromptRow] | MixtureCursor[PromptRow]

log = logging.getLogger(__name__)

NUM_ROWS_TO_CHECK = 1000
"""Rows of a large dataset that have all checks of rows in memory, for example those with the chat template of a reward
model. The other rows have only the checks of the filters."""
REWARDS_WITH_ROWS = (RewardType.FUNCTION, RewardType.REMOTE, RewardType.REASONING_GYM)
"""Rewards that may read any column of the row."""
FILTERS_FILE = "filters.json"
"""File in `data/` of the run folder: what the filters have dropped."""


@dataclass(frozen=True)
class TrainingSource:
    """A dataset that training draws from."""

    where: str
    """Field path, such as `spec.training.dataset`."""
    rows: Sequence[PromptRow]
    """Without held-out rows."""
    digest: str
    """Digest of the rows; see `Prompts.digest`."""
    dataset: Dataset | None
    """None if the environment makes the prompts."""

    @property
    def name(self) -> str:
        """The name in `training.datasets`; empty for the only dataset."""
        return self.dataset.name if isinstance(self.dataset, NamedDataset) else ""

    @property
    def index(self) -> RowIndex | None:
        """The index of a dataset that is too large for memory; None for rows in memory."""
        return self.rows.row_index if isinstance(self.rows, IndexedRows) else None

    @property
    def rows_to_check(self) -> Sequence[PromptRow]:
        """All rows if they are in memory; otherwise the first ones."""
        return self.rows if self.index is None else self.rows[:NUM_ROWS_TO_CHECK]


@dataclass(frozen=True)
class Prompts:
    """Training prompts and held-out prompts; the two have no prompt in common."""

    training: tuple[PromptRow, ...]
    """The training rows for checks: all that are in memory, and the first ones of large datasets."""
    held_out: Mapping[str, tuple[PromptRow, ...]]
    """The prompts of each evaluation, by the field path of its dataset (`evaluation_dataset`)."""
    num_removed: int
    """Training rows that were removed because of held-out prompts: equal ones, and those with common n-grams."""
    sources: tuple[TrainingSource, ...] = ()
    """The datasets of the training. Not empty, except in tests of checks."""

    @property
    def rows(self) -> tuple[PromptRow, ...]:
        """All prompts for checks: training, then held-out."""
        return (*self.training, *chain.from_iterable(self.held_out.values()))

    def __str__(self) -> str:
        parts = [f"{self.num_training} training prompts"]
        if len(self.sources) > 1:
            parts = [f"{parts[0]} ({', '.join(f'{each.name}: {len(each.rows)}' for each in self.sources)})"]
        if self.held_out:
            parts.append(f"{' + '.join(str(len(rows)) for rows in self.held_out.values())} held-out prompts")
        if self.num_removed:
            parts.append(f"{self.num_removed} training rows removed because they are held out")
        return ", ".join(parts)

    @property
    def num_training(self) -> int:
        """The number of training prompts."""
        return sum(len(each.rows) for each in self.sources) if self.sources else len(self.training)

    @property
    def is_large(self) -> bool:
        """Whether the training set is too large to parse all answers in advance."""
        return self.num_training > MAX_ROWS_PARSED

    @property
    def longest(self) -> int:
        """Length of the longest prompt, in tokens. 0 in a job with an environment, which makes the prompts."""
        return max(self.longest_of.values())

    @property
    def longest_of(self) -> Mapping[str, int]:
        """Length of the longest prompt of each dataset, in tokens, by the dataset's field path."""
        found = {each.where: _longest(each.rows_to_check) for each in self.sources} or {
            DATASET: _longest(self.training)
        }
        for each in self.sources:
            if each.index is not None:
                found[each.where] = each.index.state.longest
        return {**found, **{where: _longest(rows) for where, rows in self.held_out.items()}}

    def only(self, training: tuple[PromptRow, ...]) -> Prompts:
        """Returns these training rows without any other."""
        return Prompts(training, {}, 0)

    @property
    def largest_token(self) -> int:
        """The highest token id of any prompt."""
        of_indices = [each.index.state.largest_token for each in self.sources if each.index is not None]
        return max([token for row in self.rows for token in row.token_ids] + of_indices, default=0)


def _longest(rows: Sequence[PromptRow]) -> int:
    return max((len(row.token_ids) for row in rows), default=0)


def digest_of(rows: Sequence[PromptRow]) -> str:
    """SHA-256 of the rows' tokens, in order; with an environment of the rows."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(array("q", (len(row.token_ids), *row.token_ids)).tobytes())
        if not row.token_ids:
            digest.update((row.content or row.source_prompt).encode(errors="surrogatepass"))
    return digest.hexdigest()


def load_all_prompts(
    training: Training,
    model_folder: Path,
    job_folder: Path,
    data_folder: Path | None = None,
    doing: Callable[[str], None] = lambda _: None,
) -> Prompts:
    """Loads the training prompts and the held-out prompts. Without a dataset, rollouts begin with the environment, and
    training has a single row without columns. Parquet files with more than MAX_ROWS_PARSED rows are filtered once, and
    stay on disk; the index is in `data_folder`, or without it they are loaded like others. `doing` is called with the
    progress. Raises DatasetError."""
    tokenizer = Tokenizer(model_folder)
    has_environment = training.environment is not None
    held_out = _held_out_rows(training, tokenizer, job_folder)
    if not training.sources:
        _refuse_pass_rates(training, 0)
        # The environments of training and of evaluations have different seeds.
        rows = _rows_without_dataset(1)
        return Prompts(tuple(rows), held_out, 0, (TrainingSource(DATASET, rows, digest_of(rows), None),))
    repeated = repeated_prompts(held_out.values())
    all_held_out = chain.from_iterable(held_out.values())
    compared = HeldOut.of(
        (row.content if comparable(row.source_prompt) in repeated else row.source_prompt for row in all_held_out),
        training.filters.contamination_ngram_words,
    )
    drops_duplicates = training.filters.duplicates is Duplicates.DROP
    sources, reports = list[TrainingSource](), list[FilterReport]()
    for field, dataset in training.sources.items():
        maker = PromptMaker(
            dataset, tokenizer, f"spec.training.{field}", for_environment=has_environment, repeated=repeated
        )
        files = _large_files(dataset, job_folder, maker.where)
        if files is not None and data_folder is not None:
            settings = _filter_pass(files, maker, training, model_folder, compared, repeated)
            index = opened_or_built(files, settings, data_folder / (maker.name or "dataset"), doing)
            digest = key_of(files, settings, with_times=False)
            rows_on_disk = IndexedRows(index, maker, _drawn_columns(files, maker, training))
            sources.append(TrainingSource(maker.where, rows_on_disk, digest, dataset))
            # The tests of a Code reward are too slow to parse for all rows.
            first = sources[-1].rows_to_check
            _refuse_missing_answers(first, maker.where, dataset, _rewards_of_source(dataset, training))
            reports.append(index.state.report)
        else:
            loaded, counts = load_rows(maker, job_folder)
            _refuse_missing_answers(loaded, maker.where, dataset, _rewards_of_source(dataset, training))
            kept, report = without_dropped(loaded, compared, maker.where, counts, drops_duplicates=drops_duplicates)
            sources.append(TrainingSource(maker.where, kept, digest_of(kept), dataset))
            reports.append(report)
    for where, evaluation in zip(held_out, training.evaluations, strict=True):
        if evaluation.dataset is not None:
            _refuse_missing_answers(held_out[where], where, evaluation.dataset, rewards_of(evaluation, training))
    _refuse_pass_rates(training, sum(len(each.rows) for each in sources))
    _write_reports(reports, data_folder)
    num_removed = sum(each.num_rows for report in reports for each in report.dropped if each.filter in HELD_OUT_FILTERS)
    checked = tuple(row for source in sources for row in source.rows_to_check)
    return Prompts(checked, held_out, num_removed, tuple(sources))


def prompt_cursor(
    prompts: Prompts,
    seed: int,
    are_usable: Callable[[Sequence[PromptRow]], Sequence[bool]] | None,
    *,
    by_pass_rate: bool = False,
) -> Cursor:
    """Returns the stream of training prompts. For `are_usable` see `PromptCursor`. `by_pass_rate`: rows that are always
    or never solved are drawn in fewer epochs."""

    def cursor_of(source: TrainingSource) -> PromptCursor[PromptRow]:
        return PromptCursor(
            source.rows,
            seed=seed,
            shuffle=source.dataset is not None and source.dataset.shuffle,
            digest=source.digest,
            are_usable=are_usable,
            pass_rates=PassRates([row.index for row in source.rows], seed) if by_pass_rate else None,
            where=source.where,
            name=source.name,
        )

    if not prompts.sources[0].name:
        return cursor_of(prompts.sources[0])
    return MixtureCursor(
        [
            Source(source.name, source.dataset.weight, cursor_of(source))
            for source in prompts.sources
            if isinstance(source.dataset, NamedDataset)
        ]
    )


def state_parts(cursor: Cursor, kl_coefficient: float | None) -> StateParts:
    """Returns the states that a checkpoint keeps."""
    if isinstance(cursor, PromptCursor):
        return StateParts(cursor=cursor.state(), kl_coefficient=kl_coefficient)
    state = cursor.state()
    return StateParts(cursor=state.sources[0].cursor, mixture=state, kl_coefficient=kl_coefficient)


def restore_position(cursor: Cursor, parts: StateParts) -> None:
    """Restores the position in the stream. Raises ConfigurationError if the job cannot continue there."""
    if isinstance(cursor, MixtureCursor) and parts.mixture is not None:
        cursor.restore(parts.mixture)
    elif isinstance(cursor, PromptCursor) and parts.mixture is None:
        cursor.restore(parts.cursor)
    else:
        now, before = ("datasets", "dataset") if parts.mixture is None else ("dataset", "datasets")
        raise ConfigurationError(
            f"spec.training.{now}: the checkpoint was saved with training.{before}, whose positions cannot be "
            f"continued; use training.{before}, or start a new job"
        )


def epoch_metrics(cursor: Cursor) -> dict[str, float]:
    """Returns the epochs of each of several datasets."""
    if isinstance(cursor, PromptCursor):
        return {}
    return {f"{SOURCE_PREFIX}/{name}/{SOURCE_EPOCHS}": epochs for name, epochs in cursor.epochs.items()}


def _held_out_rows(training: Training, tokenizer: Tokenizer, job_folder: Path) -> dict[str, tuple[PromptRow, ...]]:
    """Loads the prompts of each evaluation, by the field path of its dataset. Raises DatasetError."""
    found = dict[str, tuple[PromptRow, ...]]()
    has_environment = training.environment is not None
    for index, each in enumerate(training.evaluations):
        where, rows = evaluation_dataset(index), _rows_without_dataset(each.num_prompts)
        if each.dataset is not None:
            maker = PromptMaker(each.dataset, tokenizer, where, for_environment=has_environment)
            rows, _ = load_rows(maker, job_folder, each.num_prompts)
        found[where] = tuple(rows[: each.num_prompts])
    return found


def _rows_without_dataset(num_rows: int) -> list[PromptRow]:
    return [PromptRow(index, "", str(index), (), None, {}) for index in range(num_rows)]


def rows_with_answers(prompts: Prompts, training: Training) -> dict[str, tuple[PromptRow, ...]]:
    """Returns the held-out prompts whose answers MathAnswer parses, by the field path of their dataset."""
    return {
        where: prompts.held_out[where]
        for index, each in enumerate(training.evaluations)
        if (where := evaluation_dataset(index))
        and RewardType.MATH_ANSWER in _types_that_need_answers(rewards_of(each, training))
    }


def _rewards_of_source(dataset: Dataset, training: Training) -> list[Reward]:
    """Returns the listed rewards that score responses to the prompts of this dataset."""
    named = dataset.rewards if isinstance(dataset, NamedDataset) else ()
    return [reward for reward in training.rewards if not named or reward.name in named]


def _types_that_need_answers(rewards: Iterable[Reward]) -> list[RewardType]:
    """Returns the types of the rewards that cannot score rows without an answer."""
    return [each.type for each in rewards if each.type in (RewardType.MATH_ANSWER, RewardType.CODE)]


def _large_files(dataset: Dataset, job_folder: Path, where: str) -> ParquetFiles | None:
    """Returns the Parquet files of a dataset that is too large for memory; None for another dataset."""
    path = local_dataset(dataset, job_folder, where) if dataset.type is DatasetType.FILE else None
    paths = parquet_files_of(path, where) if path is not None else []
    if not paths:
        return None
    files = ParquetFiles(paths)
    return files if files.num_rows > MAX_ROWS_PARSED else None


def _filter_pass(
    files: ParquetFiles,
    maker: PromptMaker,
    training: Training,
    model_folder: Path,
    compared: HeldOut,
    repeated: frozenset[str],
) -> FilterPass:
    needing = _types_that_need_answers(_rewards_of_source(maker.dataset, training))
    return FilterPass(
        files.paths,
        maker.dataset,
        maker.where,
        model_folder,
        compared,
        for_environment=maker.for_environment,
        repeated=repeated,
        finds_duplicates=training.filters.duplicates is Duplicates.DROP,
        answers_needed_by=str(needing[0]) if needing else "",
        why_unusable=why_unusable if RewardType.MATH_ANSWER in needing else None,
    )


def _drawn_columns(files: ParquetFiles, maker: PromptMaker, training: Training) -> list[str] | None:
    """Returns the columns that are read of each drawn row; None: all, because the user's code gets them."""
    types = {reward.type for reward in _rewards_of_source(maker.dataset, training)}
    if maker.for_environment or not types.isdisjoint(REWARDS_WITH_ROWS):
        return None
    return files.columns_of(named_fields(maker.dataset))


def _refuse_missing_answers(rows: Sequence[PromptRow], where: str, dataset: Dataset, rewards: Sequence[Reward]) -> None:
    """Raises DatasetError if some rows have no answer or one that the rewards cannot score."""
    unanswered = [row.location for row in rows if row.answer is None]
    needing = _types_that_need_answers(rewards)
    if unanswered and (len(unanswered) < len(rows) or needing):
        why = f"the reward {needing[0]} needs one" if needing else "the other rows have one"
        raise DatasetError(
            f"{where}.answerField: {len(unanswered)} of {len(rows)} rows have no answer, but {why} (first: "
            f"{unanswered[0]}); name the column with the answer, or remove these rows"
        )
    if RewardType.MATH_ANSWER in needing:
        refuse_unusable_answers(rows, where, dataset.answer_field)
    if RewardType.CODE in needing:
        refuse_unusable_tests(rows, where)


def _refuse_pass_rates(training: Training, num_rows: int) -> None:
    """Raises DatasetError if prompts cannot be chosen by pass rate. `num_rows`: 0 without a dataset."""
    where, uniform = "spec.training.promptSampling.type", "use Uniform"
    if training.prompt_sampling.type is PromptSamplingType.UNIFORM:
        return
    if not reward_names(training):
        raise DatasetError(f"{where}: PassRate needs a reward, which scores the responses; add one, or {uniform}")
    if not num_rows:
        raise DatasetError(f"{where}: PassRate needs a dataset, whose rows have pass rates; add one, or {uniform}")
    if num_rows > MAX_ROWS_PARSED:
        raise DatasetError(
            f"{where}: PassRate keeps the pass rate of each row in memory and in checkpoints, for at most "
            f"{MAX_ROWS_PARSED} rows (seen: {num_rows}); use fewer rows, or {uniform}"
        )


def _write_reports(reports: Sequence[FilterReport], data_folder: Path | None) -> None:
    """Logs what the filters have dropped, and writes it to `filters.json`."""
    for report in reports:
        for line in report.lines():
            log.info("%s", line)
    if data_folder is not None:
        data_folder.mkdir(parents=True, exist_ok=True)
        document = [report.model_dump(mode="json", by_alias=True) for report in reports]
        (data_folder / FILTERS_FILE).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
