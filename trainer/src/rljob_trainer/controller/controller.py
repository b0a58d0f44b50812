"""The single controller: one process that drives all workers through the run, keeps the run's state, and reports it.

start or resume -> evaluate? -> (step -> begin save? -> metrics -> evaluate?)* -> end saves -> export
"""

from __future__ import annotations

import logging
import time

from rljob_api.constants import LOGS_FOLDER
from rljob_api.contract_documents import TrainerJob
from rljob_api.v1alpha1.checkpoint import ExportHuggingFace
from rljob_api.v1alpha1.training import PromptSamplingType
from rljob_trainer.checkpoints.adapter_export import write_merged_huggingface
from rljob_trainer.checkpoints.errors import DamagedError
from rljob_trainer.checkpoints.export import export_dtype, write_huggingface
from rljob_trainer.checkpoints.load import CheckpointReader, open_known_checkpoint
from rljob_trainer.checkpoints.storage import Location
from rljob_trainer.controller.alarms import Alarms
from rljob_trainer.controller.build_run import Run
from rljob_trainer.controller.checkpointing import Checkpointing, StateParts
from rljob_trainer.controller.evaluations.evaluation import evaluation_error, evaluations_of
from rljob_trainer.controller.evaluations.pass_rate_records import record_pass_rates
from rljob_trainer.controller.finished_groups import FinishedGroups
from rljob_trainer.controller.model_roles import engines_of, scoring_of, step_plan
from rljob_trainer.controller.outcomes import FailureRate
from rljob_trainer.controller.prompt_sets import epoch_metrics, prompt_cursor, restore_position, state_parts
from rljob_trainer.controller.rollout_phase import RolloutPhase
from rljob_trainer.controller.run_output import RunOutput
from rljob_trainer.controller.run_reporter import RunReporter
from rljob_trainer.controller.sampler import Sampler
from rljob_trainer.controller.saves import Saves
from rljob_trainer.controller.step_records import StepProfiles, StepTimeline
from rljob_trainer.controller.stop_request import StepAbandonedError, StopRequest
from rljob_trainer.controller.token_recorder import TokenRecorder, recorded_responses
from rljob_trainer.controller.training_step import TrainingStep
from rljob_trainer.engines.train.lora import AdapterSettings
from rljob_trainer.errors import (
    AlgorithmFunctionError,
    BatchNotFullError,
    CollectiveFunctionError,
    RewardError,
)
from rljob_trainer.groups.object_store import TRAFFIC
from rljob_trainer.observability.activity import ActivityWatch
from rljob_trainer.observability.jsonl import read_rows
from rljob_trainer.observability.metrics import (
    CONTROLLER_RECEIVED_BYTES,
    CONTROLLER_SENT_BYTES,
    EVAL_SECONDS,
    PASS_RATE_SKIPPED,
    ROWS_SKIPPED,
    STEP_SECONDS,
    THROUGHPUT,
    TIME_PER_STEP,
    TOTAL_TOKENS,
    Metrics,
)
from rljob_trainer.observability.samples import SampleKind
from rljob_trainer.observability.sinks import METRICS_FILE_NAME
from rljob_trainer.observability.timing import PhaseTimer, RecordingBudget
from rljob_trainer.workers.trained_worker import ADAPTER_PREFIX, MODEL_PREFIX

log = logging.getLogger(__name__)

BEST_EXPORT_FOLDER = "export-best"
MAX_STEP_SHARE, MAX_EVALUATION_SHARE = 0.004, 0.001
"""Fractions of a run's time for the newest timeline and tokens of steps, and for tokens of evaluations. Short steps and
their evaluations are not all recorded, but the last ones are."""


class Controller:
    """The training loop of one attempt of a job."""

    def __init__(
        self,
        job: TrainerJob,
        run: Run,
        output: RunOutput,
        reporter: RunReporter,
        checkpointing: Checkpointing,
        stop: StopRequest,
    ) -> None:
        self.job = job
        self.run_parts = run
        self.output = output
        self.reporter = reporter
        self.checkpointing = checkpointing
        self.stop = stop
        self.num_steps = job.spec.training.steps
        self.timer = PhaseTimer(time.perf_counter, reporter.in_phase)
        self.alarms = Alarms(run.job.spec)
        self.failure_rate = FailureRate(job.spec.training.max_failure_rate)
        activity = ActivityWatch(output.run_folder / LOGS_FOLDER, reporter.report_progress)
        for processes in run.workers.processes.values():
            processes.while_waiting = activity.poll_files
        self.saves = Saves(
            checkpointing, self.part_states, run.workers.trained, output, reporter, self.num_steps, time.perf_counter
        )
        training = job.spec.training
        self.step_budget = RecordingBudget(time.perf_counter, MAX_STEP_SHARE)
        self.evaluation_budget = RecordingBudget(time.perf_counter, MAX_EVALUATION_SHARE)
        self.timeline = StepTimeline(output.run_folder, training.timeline_steps, run.workers.processes)
        self.profiles = StepProfiles(output.run_folder, training.profile, run.workers.actor)
        are_usable = run.drawn_row_filter.are_usable if run.drawn_row_filter else None
        self.cursor = prompt_cursor(run.prompts, training.seed, are_usable, by_pass_rate=self.by_pass_rate)
        plan = step_plan(job, run.model_folder)
        self.finished_groups = FinishedGroups.of(job, checkpointing.root, plan)
        self.rollout = RolloutPhase(
            Sampler(run.workers.hybrid, run.workers.reward, engines_of(job.spec), stop, scoring_of(job.spec)),
            {reward.name: reward.weight for reward in training.rewards},
            self.timer,
            stop,
            run.workers.reward_model,
            self.finished_groups,
            has_environment=training.environment is not None,
            names_rewards=any(dataset.rewards for dataset in training.datasets),
        )
        self.recorder = TokenRecorder(output.run_folder, run.workers.actor, run.workers.hybrid)
        self.training_step = TrainingStep(
            plan,
            self.rollout,
            run.workers.actor,
            run.workers.reference,
            run.workers.critic,
            self.timer,
            self.cursor,
            self.recorder,
        )
        self.evaluations = evaluations_of(training, run.prompts.held_out, self.rollout, self.timer)

    @property
    def by_pass_rate(self) -> bool:
        """Whether prompts are chosen by their pass rates."""
        return self.job.spec.training.prompt_sampling.type is PromptSamplingType.PASS_RATE

    def train(self, first_step: int, *, is_evaluated: bool) -> bool:
        """Trains until all steps are done; `first_step` steps are already done. Returns True if all steps are done,
        False after a stop request.

        `is_evaluated`: whether the evaluations that are due after `first_step` steps were already done. Raises
        TrainerError if the training fails; complete checkpoints are not deleted."""
        try:
            if not is_evaluated:
                self._evaluate(first_step)
            for step in range(first_step, self.num_steps):
                if self.stop.is_requested:
                    return False
                self._step(step)
                if error := self.failure_rate.error(is_end=step + 1 == self.num_steps):
                    # The workers are healthy, as below.
                    self.saves.end()
                    raise error
                self._evaluate(step + 1)
        except StepAbandonedError:
            return False
        except CollectiveFunctionError:
            # Other workers still wait in a collective operation, so they cannot finish the save in progress.
            raise
        except (RewardError, AlgorithmFunctionError, BatchNotFullError):
            # The workers are still healthy, so the save in progress can become a checkpoint.
            self.saves.end()
            raise
        self.saves.end()
        return True

    def part_states(self) -> StateParts:
        """Returns the state of every part of the controller that checkpoints keep."""
        return state_parts(self.cursor, self.training_step.kl_coefficient.state())

    def restore(self, parts: StateParts) -> None:
        """Restores the parts from a checkpoint, whose tensors the workers have already loaded, and the alarms from the
        metrics of the earlier steps. Raises ConfigurationError."""
        restore_position(self.cursor, parts)
        self.training_step.kl_coefficient.restore(parts.kl_coefficient)
        self.alarms.load(read_rows(self.output.run_folder / METRICS_FILE_NAME))

    def load_finished_groups(self, first_step: int) -> None:
        """Loads the groups that a stopped attempt has kept, if the job keeps them."""
        if self.finished_groups is not None:
            self.finished_groups.load(self.checkpointing.newest_name, first_step)

    def save_on_stop(self) -> int:
        """Saves a checkpoint of the current state, see `Saves.save_on_request`, and the finished groups of the step
        that was abandoned, if the job keeps them."""
        step = self.saves.save_on_request()
        if self.finished_groups is not None:
            self.finished_groups.save(self.checkpointing.newest_name, step)
        return step

    def export(self, folder: Location) -> Location | None:
        """Exports the policy from the checkpoint of the last step as a Hugging Face folder; LoRA adapters are merged
        into the base weights. The best checkpoint is exported to the folder `export-best` beside it, unless it is the
        last one. Returns the folder, or None if `exportHuggingFace` is `Never` or nothing was trained."""
        if self.num_steps == 0 or self.job.spec.checkpoint.export_hugging_face is ExportHuggingFace.NEVER:
            return None
        assert self.checkpointing.newest is not None, "the last step was saved"
        self._export(folder, open_known_checkpoint(self.checkpointing.newest))
        best = self.checkpointing.best_checkpoint()
        if best is not None and best.path == self.checkpointing.newest:
            log.info("the last checkpoint is the best one, so there is no second export")
        elif best is not None:
            try:
                self._export(folder.parent / BEST_EXPORT_FOLDER, self.checkpointing.opened(best))
            except DamagedError as error:
                log.warning("the best checkpoint is damaged, so %s is not written: %s", BEST_EXPORT_FOLDER, error)
        return folder

    def _export(self, folder: Location, saved: CheckpointReader) -> None:
        checkpoint = self.job.spec.checkpoint
        source = self.run_parts.model_folder
        dtype = export_dtype(checkpoint.export_dtype, source)
        self.reporter.doing("exports the model")
        log.info("exporting the model of %s as %s", saved.folder.name, str(dtype).removeprefix("torch."))
        model = self.job.spec.training.model
        if model.lora is None:
            write_huggingface(folder, source, saved, MODEL_PREFIX, dtype, on_progress=self._report_export)
        else:
            adapters = AdapterSettings(model.lora, self.job.spec.training.seed)
            base = self.run_parts.model_location.folder(
                lambda num_bytes: self.reporter.doing(
                    f"exports the model; {num_bytes // 10**6} MB of the base model downloaded"
                )
            )
            write_merged_huggingface(folder, base, saved, ADAPTER_PREFIX, adapters, model, dtype, self._report_export)

    def _report_export(self, num_read: int, num_tensors: int) -> None:
        self.reporter.doing(f"exports the model; {num_read} of {num_tensors} tensors read")

    def _step(self, step: int) -> None:
        is_recorded = self.step_budget.is_due() or step + 1 == self.num_steps
        with self.step_budget.spending():
            self.timeline.begin(step + 1, is_recorded=is_recorded)
        self.recorder.begin_step(is_recorded=is_recorded)
        with self.profiles.of_step(step + 1):
            started = time.perf_counter()
            # Resets the counters, so that the traffic of an evaluation does not count for this step.
            TRAFFIC.take()
            saved, num_skipped = self.part_states(), self.cursor.num_skipped
            prompts = self.cursor.next_batch(self.job.spec.training.batch_size)
            if self.finished_groups is not None:
                self.finished_groups.begin_step()
            try:
                rollout, metrics = self.training_step.run(prompts, step)
            except StepAbandonedError:
                restore_position(self.cursor, saved)
                raise
            seconds = time.perf_counter() - started
            with self.step_budget.spending():
                self.timeline.end(step + 1)
        if self.finished_groups is not None:
            self.finished_groups.end_step()
        num_excluded = rollout.num_lost + int(rollout.is_excluded_B.sum())
        self.failure_rate.add(len(rollout.prompts) + rollout.num_lost, num_excluded, rollout.reasons())
        recorded = rollout.selected(recorded_responses(rollout))
        samples = self.rollout.samples(recorded, step + 1, SampleKind.TRAIN)
        # Before tokens are recorded, which is not done in each step: the metrics of steps can then be compared.
        traffic = TRAFFIC.take()
        with self.step_budget.spending():
            self.recorder.step_done(step + 1, rollout)
        num_tokens = rollout.num_tokens()
        metrics.update(self.timer.take())
        metrics.update(self.run_parts.workers.hybrid.take_metrics())
        metrics.update(self.rollout.sampler.take_reward_metrics())
        if self.run_parts.drawn_row_filter is not None:
            metrics[ROWS_SKIPPED] = float(self.cursor.num_skipped - num_skipped)
        if self.by_pass_rate:
            metrics[PASS_RATE_SKIPPED] = float(self.cursor.num_skipped - num_skipped)
            threshold = self.job.spec.training.prompt_sampling.pass_threshold
            metrics |= record_pass_rates(self.cursor, rollout, threshold, metrics)
        metrics |= epoch_metrics(self.cursor)
        metrics[CONTROLLER_SENT_BYTES] = float(traffic.sent_bytes)
        metrics[CONTROLLER_RECEIVED_BYTES] = float(traffic.received_bytes)
        metrics[STEP_SECONDS] = seconds
        metrics[TIME_PER_STEP] = seconds
        metrics[TOTAL_TOKENS] = float(num_tokens)
        metrics[THROUGHPUT] = num_tokens / seconds / self.run_parts.workers.num_devices
        try:
            # A step without any score trained nothing. It is not saved, so that a retry after an outage repeats it.
            trained_nothing = bool(rollout.is_excluded_B.all())
            is_end = step + 1 == self.num_steps
            is_success = is_end and self.failure_rate.error(is_end=True) is None
            self.saves.begin_if_due(step + 1, postpones=trained_nothing and not is_success)
            metrics.update(self.run_parts.workers.hybrid.take_memory())
        finally:
            metrics.update(self.saves.take_seconds())
            self.output.step_done(step + 1, metrics, samples)
            self.reporter.step_done(step + 1, metrics, self.alarms.step_done(step + 1, metrics))

    def _evaluate(self, step: int) -> None:
        due = [each for each in self.evaluations if each.is_due(step, self.num_steps)]
        if not due:
            return
        self.saves.unevaluated_step = step
        # All results are written together, so that a stop in between does not leave some of them behind.
        results = [each.run(step) for each in due]
        if self.evaluation_budget.is_due() or step == self.num_steps:
            with self.evaluation_budget.spending():
                self.recorder.evaluated(step, due[0].spec.name, results[0].rollouts)
        seconds: Metrics = {**self.timer.take(), **self.run_parts.workers.hybrid.take_metrics()}
        counts = self.rollout.sampler.take_reward_metrics("eval/")
        metrics = {name: value for each in results for name, value in each.metrics.items()}
        self.output.evaluated(
            step, {**metrics, **counts, EVAL_SECONDS: seconds[EVAL_SECONDS]}, [each.samples for each in results]
        )
        main_score = next(iter(self.output.scores[0].labels))
        self.reporter.evaluated(metrics.get(main_score))
        self.saves.unevaluated_step = None
        self.saves.begin_if_best(step, metrics)
        if self.num_steps == 0 and (error := evaluation_error(results, self.failure_rate.max_rate)):
            raise error
