"""Steps with everything offloaded beside the same steps without, on one rank, and what is in memory meanwhile."""

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
from rljob_trainer.batch.proto import DataProto
from rljob_trainer.batch.ragged import RaggedColumn
from rljob_trainer.dispatch.worker import WorkerContext
from rljob_trainer.engines.device_memory import local_part
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
    # Several micro-batches of a row or two in each of two updates.
    max_tokens_per_micro_batch=2 * (replays.LONGEST_PROMPT + replays.LONGEST_RESPONSE),
)
NUM_STEPS, SAVED_STEP = 2, 1
SAMPLING = SamplingSettings(1.0, 1.0, 0, 6, ())

Marks = list[tuple[str, Mapping[str, int]]]
"""(boundary, bytes by owner), in order."""


@dataclass(frozen=True)
class OffloadRun:
    """What one rank has seen."""

    is_equal: bool
    """The state after NUM_STEPS steps, to the last bit: with everything offloaded and without; ..."""
    is_resumed_equal: bool
    """... and of both, gone on from the checkpoint of the run with offload."""
    step: Marks
    """A rollout and a training step with everything offloaded, not the first; ..."""
    plain_step: Marks
    """... and with nothing."""
    metrics: dict[str, float]
    """Of the former."""
    num_parameter_bytes: int
    """Of this rank's shards."""
    live_bytes: list[int]
    """Of the whole process, after each of three steps with rollouts."""
    gradients_in_passes: list[int]
    """Bytes of them when each pass of the first step's updates begins, with everything offloaded; ..."""
    plain_gradients_in_passes: list[int]
    """... and with nothing."""
    at_rest: dict[str, dict[str, int]]
    """Bytes of moments and of the critic, of a run with a critic and everything offloaded: after checkpoints
    were measured, saved and loaded, and after a step."""
    refusals: dict[str, str]
    deferred_peak: int
    """Bytes of all owners in the first step's passes: gradients reduced once per update; ..."""
    plain_peak: int
    """... or with every micro-batch."""


def everything(root: Path, context: WorkerContext) -> OffloadRun:
    """On one or two ranks; `root` is a folder of this number of ranks. One run after the other: memory is counted for
    all that there are in a process."""
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
        at_rest=around_checkpoints(context, root),
        refusals=refusals(context),
    )


@dataclass(frozen=True)
class OneRun:
    """A run, and what it saw."""

    state: dict[str, torch.Tensor]
    resumed: dict[str, torch.Tensor]
    checkpoint: Path
    step: Marks
    metrics: dict[str, float]
    num_parameter_bytes: int
    live_bytes: list[int]
    gradients_in_passes: list[int]
    peak: int


def one_run(replay: replays.Replay, context: WorkerContext, root: Path, checkpoint: Path | None) -> OneRun:
    """Steps with a save in between; then from `checkpoint` on, by default its own; then rollouts, too."""
    run = replays.replayed_run(replay, context)
    num_parameter_bytes = sum(local_part(each).nbytes for each in run.actor.engine.model.parameters())
    with watched_gradients(run.actor.engine) as gradients_in_passes:
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
    """The run's actor with an engine that generates."""
    context = run.actor.context
    settings = HfSettings(replays.MODEL, context.device, torch.float32, 16)
    rollout = RolloutWorker(context, lambda: engine_class(settings), 1)
    return HybridWorker(context, run.actor, rollout, torch.float32, seed=0)


def generate(hybrid: HybridWorker, num_prompts: int) -> None:
    """Responses of SAMPLING to so many prompts, which are all the same."""
    prompts = RaggedColumn.from_rows([torch.tensor([5, 6, 7])] * num_prompts)
    batch = DataProto({SAMPLE_SEEDS: torch.arange(num_prompts)}, ragged={PROMPT_TOKEN_IDS: prompts})
    hybrid.generate_sequences(batch, SAMPLING, True)


def generate_once(engine_class: type[HfEngine], context: WorkerContext) -> None:
    """A new run's actor generates two responses with an engine of this class."""
    generate(hybrid_worker(replays.replayed_run(REPLAY, context), engine_class), 2)


def steps_with_rollouts(run: replays.ReplayedRun, live_bytes: list[int]) -> tuple[Marks, dict[str, float]]:
    """Three rollouts and training steps of a hybrid worker; what the last one noted."""
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


def around_checkpoints(context: WorkerContext, root: Path) -> dict[str, dict[str, int]]:
    """See OffloadRun.at_rest."""
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
def watched_gradients(engine: TrainEngine) -> Iterator[list[int]]:
    """Within it, their bytes at the beginning of each pass that has a backward."""
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
    """In its passes."""
    gc.collect()
    MEMORY.take_metrics()
    run.step(0)
    return int(MEMORY.take_metrics()["memory/during_forward_backward_bytes_max"])


def refusals(context: WorkerContext) -> dict[str, str]:
    """What is said where a machine has 1 MiB left: by an engine that offloads, and by a hybrid worker."""
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HOST_MEMORY, "available_bytes", lambda: MEBIBYTE)
        with pytest.raises(ResourceError) as caught:
            replays.replayed_run(replace(REPLAY, offloads=True), context)
        found["offload"] = str(caught.value)
        run = replays.replayed_run(replace(REPLAY, algorithm=Algorithm()), context)
        patch.setattr(HOST_MEMORY, "available_bytes", lambda: MEBIBYTE // 2)
        with pytest.raises(ResourceError) as caught:
            steps_with_rollouts(run, [])
        found["moments"] = str(caught.value)
    return found


def are_equal(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    """To the last bit."""
    return one.keys() == other.keys() and all(torch.equal(each, other[name]) for name, each in one.items())


def num_live_bytes() -> int:
    """Of all storages on the host, each once."""
    gc.collect()
    return sum({storage.data_ptr(): storage.nbytes() for storage in _storages()}.values())


def _storages() -> Iterator[torch.UntypedStorage]:
    for each in gc.get_objects():
        # The type, not the object: a proxy would be asked for its class.
        if issubclass(type(each), torch.Tensor):
            local = each._local_tensor if isinstance(each, DTensor) else each
            if local.layout is torch.strided and local.device.type == "cpu" and local.untyped_storage().nbytes():
                yield local.untyped_storage()
