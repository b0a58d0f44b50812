"""Steps with full offload and the same steps without, on one rank, and the memory that they use."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import DTensor

from rljob_api.v1alpha1.algorithm import Algorithm, AlgorithmType
from rljob_api.v1alpha1.kl import Kl, KlPlacement
from rljob_api.v1alpha1.model import Critic
from rljob_api.v1alpha1.optimizer import Optimizer
from rljob_testing.training import replays
from rljob_testing.training.whole_rollouts import whole_rollout
from rljob_trainer.batch.proto import DataProto
from rljob_trainer.batch.ragged import RaggedColumn
from rljob_trainer.checkpoints.storage import Location
from rljob_trainer.dispatch.worker import WorkerContext
from rljob_trainer.engines.device_memory import local_part
from rljob_trainer.engines.host_ledger import HOST_LEDGER
from rljob_trainer.engines.rollout.base import SamplingSettings
from rljob_trainer.engines.rollout.hf_engine import HfEngine, HfSettings
from rljob_trainer.engines.train.engine import TrainEngine
from rljob_trainer.errors import ResourceError
from rljob_trainer.host_memory import HOST_MEMORY
from rljob_trainer.observability.memory import MEBIBYTE, MEMORY
from rljob_trainer.observability.spans import SPANS, Counts
from rljob_trainer.observability.timeline import MEMORY_TRACK
from rljob_trainer.workers.columns import PROMPT_TOKEN_IDS, SAMPLE_SEEDS
from rljob_trainer.workers.hybrid import HybridWorker
from rljob_trainer.workers.rollout import RolloutWorker

REPLAY = replays.Replay(
    Algorithm(kl=Kl(coefficient=0.1, placement=KlPlacement.LOSS)),
    Optimizer(learning_rate=3e-4),
    mini_batch_size=2,
    # Two updates, each with several micro-batches of one or two rows.
    max_tokens_per_micro_batch=2 * (replays.LONGEST_PROMPT + replays.LONGEST_RESPONSE),
)
NUM_STEPS, SAVED_STEP = 2, 1
SAMPLING = SamplingSettings(1.0, 1.0, 0, 6, ())

Marks = list[tuple[str, Mapping[str, int]]]
"""(boundary, bytes by owner), in order."""


@dataclass(frozen=True)
class OffloadRun:
    """The results of one rank."""

    is_equal: bool
    """Whether the states after NUM_STEPS steps are bitwise equal with and without offload."""
    is_resumed_equal: bool
    """Whether the same holds for both runs after resuming from the checkpoint of the run with offload."""
    step: Marks
    """Memory at the boundaries of a rollout and training step with full offload, not the first step."""
    plain_step: Marks
    """The same without offload."""
    metrics: dict[str, float]
    """Metrics of the step with offload."""
    num_parameter_bytes: int
    """Size of this rank's parameter shards."""
    live_bytes: list[int]
    """Memory of all tensors of the process after each of three steps with rollouts."""
    gradients_in_passes: list[int]
    """Size of the gradients at the start of each pass in the first step's updates, with full offload."""
    plain_gradients_in_passes: list[int]
    """The same without offload."""
    at_rest: dict[str, dict[str, int]]
    """Sizes of moments and critic in a run with a critic and full offload: after checkpoints were sized, saved and
    loaded, and after a step."""
    memory_errors: dict[str, str]
    deferred_peak: int
    """Peak of all owners in the passes of the first step if gradients are reduced once per update."""
    plain_peak: int
    """The same if gradients are reduced with every micro-batch."""


def measure_offload(root: Path, context: WorkerContext) -> OffloadRun:
    """Makes all runs on one or two ranks. `root`: a folder for this number of ranks.

    The runs are sequential, because memory is counted for the whole process.
    """
    away = one_run(replace(REPLAY, offloads=True), context, root, None)
    plain = one_run(REPLAY, context, root, away.checkpoint)
    deferred = replays.replayed_run(replace(REPLAY, defers_reduction=True), context)
    return OffloadRun(
        is_equal=are_equal(away.state, plain.state),
        is_resumed_equal=are_equal(away.resumed, plain.state) and are_equal(plain.resumed, plain.state),
        step=away.step,
        plain_step=plain.step,
        metrics=away.metrics,
        num_parameter_bytes=plain.num_parameter_bytes,
        live_bytes=away.live_bytes,
        gradients_in_passes=away.gradients_in_passes,
        plain_gradients_in_passes=plain.gradients_in_passes,
        plain_peak=plain.peak,
        deferred_peak=peak_of_first_step(deferred),
        at_rest=memory_around_checkpoints(context, root),
        memory_errors=memory_errors(context),
    )


@dataclass(frozen=True)
class OneRun:
    """A run and its measurements."""

    state: dict[str, torch.Tensor]
    resumed: dict[str, torch.Tensor]
    checkpoint: Location
    step: Marks
    metrics: dict[str, float]
    num_parameter_bytes: int
    live_bytes: list[int]
    gradients_in_passes: list[int]
    peak: int


def one_run(replay: replays.Replay, context: WorkerContext, root: Path, checkpoint: Location | None) -> OneRun:
    """Trains with a save in between; then resumes from `checkpoint`, by default its own; then trains with rollouts."""
    run = replays.replayed_run(replay, context)
    num_parameter_bytes = sum(local_part(each).nbytes for each in run.actor.engine.model.parameters())
    with recorded_gradient_sizes(run.actor.engine) as gradients_in_passes:
        peak = peak_of_first_step(run)
    run.steps(1, SAVED_STEP)
    saved = run.save(root / f"offloads-{replay.offloads}", SAVED_STEP)
    run.steps(SAVED_STEP, NUM_STEPS)
    state = run.state()
    run.group.load_checkpoint(checkpoint or saved, SAVED_STEP)
    run.steps(SAVED_STEP, NUM_STEPS)
    resumed = run.state()
    live_bytes: list[int] = []
    step, metrics = steps_with_rollouts(run, live_bytes)
    return OneRun(state, resumed, saved, step, metrics, num_parameter_bytes, live_bytes, gradients_in_passes, peak)


def hybrid_worker(run: replays.ReplayedRun, engine_class: type[HfEngine] = HfEngine) -> HybridWorker:
    """The run's actor together with a rollout engine."""
    context = run.actor.context
    settings = HfSettings(replays.MODEL, context.device, torch.float32, 16)
    rollout = RolloutWorker(context, lambda: engine_class(settings), 1)
    others = [] if run.reference is None else [run.reference.engine]
    return HybridWorker(context, run.actor, rollout, torch.float32, 0, others)


def generate(hybrid: HybridWorker, num_prompts: int) -> None:
    """Generates responses to `num_prompts` equal prompts with the settings SAMPLING."""
    prompts = RaggedColumn.from_rows([torch.tensor([5, 6, 7])] * num_prompts)
    batch = DataProto({SAMPLE_SEEDS: torch.arange(num_prompts)}, ragged={PROMPT_TOKEN_IDS: prompts})
    whole_rollout(hybrid, batch, SAMPLING)


def generate_once(engine_class: type[HfEngine], context: WorkerContext) -> None:
    """Creates a run and generates two responses with an engine of this class."""
    generate(hybrid_worker(replays.replayed_run(REPLAY, context), engine_class), 2)


def steps_with_rollouts(run: replays.ReplayedRun, live_bytes: list[int]) -> tuple[Marks, dict[str, float]]:
    """Three rollouts and training steps of a hybrid worker; returns the marks and metrics of the last one."""
    hybrid = hybrid_worker(run)
    for number in range(3):
        SPANS.take()
        MEMORY.take_metrics()
        generate(hybrid, 4)
        run.step(number)
        live_bytes.append(num_live_bytes())
    marks: Marks = [
        (each.after, {owner: round(mebibytes * MEBIBYTE) for owner, mebibytes in each.values.items()})
        for each in SPANS.take()
        if isinstance(each, Counts) and each.track == MEMORY_TRACK
    ]
    return marks, MEMORY.take_metrics()


def memory_around_checkpoints(context: WorkerContext, root: Path) -> dict[str, dict[str, int]]:
    """Makes the measurements of OffloadRun.at_rest."""
    run = replays.replayed_run(
        replace(REPLAY, algorithm=Algorithm(type=AlgorithmType.PPO), critic=Critic(), offloads=True), context
    )
    assert run.critic is not None
    actor, critic = run.actor.engine.memory, run.critic.engine.memory

    def now() -> dict[str, int]:
        return {"actor's moments": actor.moments, "critic": critic.parameters + critic.moments}

    run.step(0)
    found = {}
    sizes = [group.num_checkpoint_bytes() for group in run.groups]
    assert sizes == [group.num_checkpoint_bytes() for group in run.groups]
    found["sizes"] = now()
    saved = run.save(root / "critic", 1)
    found["save"] = now()
    run.load(saved, 1)
    found["load"] = now()
    run.step(1)
    found["step"] = now()
    return found


@contextmanager
def recorded_gradient_sizes(engine: TrainEngine) -> Iterator[list[int]]:
    """Records the size of the gradients at the start of each pass that has a backward pass."""
    found: list[int] = []

    def note(*_: object) -> None:
        if torch.is_grad_enabled():
            found.append(engine.memory.gradients)

    hook = engine.model.register_forward_pre_hook(note)
    try:
        yield found
    finally:
        hook.remove()


def peak_of_first_step(run: replays.ReplayedRun) -> int:
    """Peak of the passes in the first step."""
    gc.collect()
    MEMORY.take_metrics()
    run.step(0)
    return int(MEMORY.take_metrics()["memory/during_forward_backward_bytes_max"])


def memory_errors(context: WorkerContext) -> dict[str, str]:
    """Error messages with 1 MiB of free host memory, of an engine with offload; and with 2 MiB, of a hybrid worker."""
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        # The engines of earlier runs, as far as they exist, do not count.
        patch.setattr(HOST_LEDGER, "_counts", [])
        patch.setattr(HOST_MEMORY, "available_bytes", lambda: MEBIBYTE)
        with pytest.raises(ResourceError) as caught:
            replays.replayed_run(replace(REPLAY, offloads=True), context)
        found["offload"] = str(caught.value)
        patch.setattr(HOST_LEDGER, "_counts", [])
        patch.setattr(HOST_MEMORY, "available_bytes", lambda: 3 * MEBIBYTE)
        run = replays.replayed_run(replace(REPLAY, algorithm=Algorithm()), context)
        patch.setattr(HOST_MEMORY, "available_bytes", lambda: 2 * MEBIBYTE)
        with pytest.raises(ResourceError) as caught:
            steps_with_rollouts(run, [])
        found["moments"] = str(caught.value)
    return found


def are_equal(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    """Whether all tensors are bitwise equal."""
    return one.keys() == other.keys() and all(torch.equal(each, other[name]) for name, each in one.items())


def num_live_bytes() -> int:
    """Bytes of all tensor storages on the host, each counted once."""
    gc.collect()
    return sum({storage.data_ptr(): storage.nbytes() for storage in _storages()}.values())


def _storages() -> Iterator[torch.UntypedStorage]:
    for each in gc.get_objects():
        # Checks the type instead of calling isinstance, because isinstance asks a proxy for its class.
        if issubclass(type(each), torch.Tensor):
            local = each._local_tensor if isinstance(each, DTensor) else each
            if local.layout is torch.strided and local.device.type == "cpu" and local.untyped_storage().nbytes():
                yield local.untyped_storage()
