"""The base class of workers whose model is trained: the engine, optimizer updates and checkpoints."""

from __future__ import annotations

import math
from collections.abc import Iterator

from pydantic import JsonValue
from torch import Tensor

from rljob_trainer.checkpoints.layout import ShardRecord
from rljob_trainer.checkpoints.load import load_into, open_checkpoint
from rljob_trainer.checkpoints.random_state import capture_random_state, restore_random_state
from rljob_trainer.checkpoints.save import HostBuffers, PendingShard, num_shard_bytes, save_shard_async
from rljob_trainer.checkpoints.sharding import ShardedTensor, sharded_tensors_from_dtensors
from rljob_trainer.checkpoints.storage import Location
from rljob_trainer.dispatch.mesh import MeshPosition
from rljob_trainer.dispatch.modes import Dispatch
from rljob_trainer.dispatch.register import register
from rljob_trainer.dispatch.worker import Worker, WorkerContext
from rljob_trainer.engines.host_ledger import HOST_LEDGER, HostUse
from rljob_trainer.engines.train.engine import TrainEngine
from rljob_trainer.engines.train.engine_memory import copies_use
from rljob_trainer.engines.train.settings import TrainEngineSettings
from rljob_trainer.errors import NonFiniteUpdateError
from rljob_trainer.host_memory import HOST_MEMORY
from rljob_trainer.observability.memory import MEMORY, Boundary
from rljob_trainer.observability.spans import SPANS

MODEL_PREFIX = "model."
ADAPTER_PREFIX = "adapter."
OPTIMIZER_PREFIX = "optimizer."
"""The prefixes of tensor names in checkpoints, after the role's own prefix."""

MAX_SKIPPED_UPDATES = 5
"""The run fails after this many consecutive updates whose gradients are not finite."""


class TrainedWorker(Worker):
    """One rank of a model that is trained. `prefix` starts the names of its tensors in checkpoints, because a
    checkpoint has the tensors of all roles."""

    prefix = ""
    learning_rate_field = "spec.training.optimizer.learningRate"

    def __init__(self, context: WorkerContext, settings: TrainEngineSettings) -> None:
        """Collective."""
        super().__init__(context)
        self.engine = TrainEngine(settings)
        self.num_skipped_in_a_row = 0
        self.host_buffers = HostBuffers()
        HOST_LEDGER.watch(self.host_uses)
        HOST_LEDGER.check()
        self.pending_shard: PendingShard | None = None
        self.num_state_bytes: int | None = None
        """See `num_checkpoint_bytes`; None until it is computed."""

    def host_uses(self) -> list[HostUse]:
        """The host memory that this worker keeps, besides its engine's."""
        return [copies_use(self.engine.settings, self.stored_parameters())]

    def stored_parameters(self) -> list[Tensor]:
        """This rank's blocks of the trained parameters that it writes into checkpoints; none on a rank that is not in
        the first replica."""
        named = (("", each) for each in self.engine.memory.trained_shards)
        return [each.local for each in sharded_tensors_from_dtensors(named, self.context.rank)]

    def mesh_position(self, mesh: str) -> MeshPosition:
        """The position of this rank in the engine's layout."""
        del mesh
        return self.engine.layout.position(self.context.rank)

    @register(Dispatch.ONE_TO_ALL)
    def num_checkpoint_bytes(self) -> int:
        """The size in bytes of this rank's part of a checkpoint, which is the same for all checkpoints.

        Only the first call computes the size, because this moves offloaded state of the model to the device."""
        if self.num_state_bytes is None:
            self.num_state_bytes = num_shard_bytes(self._shards())
            self.offload_after_copy()
        return self.num_state_bytes

    @register(Dispatch.ONE_TO_ALL)
    def begin_checkpoint(self, folder: Location, first_writer: int = 0) -> None:
        """Copies this rank's shards of weights and optimizer state and starts writing them in the background.

        The writers of a checkpoint are numbered over all roles; this role's numbers start at `first_writer`."""
        writer = first_writer + self.context.rank
        self.pending_shard = save_shard_async(folder, writer, self._shards(), self.host_buffers)
        MEMORY.mark(Boundary.SAVE)
        self.offload_after_copy()

    @register(Dispatch.ONE_TO_ALL)
    def is_checkpoint_written(self) -> bool:
        """Whether the shards are written, so that `finish_checkpoint` does not wait."""
        return self.pending_shard is None or self.pending_shard.done()

    @register(Dispatch.ONE_TO_ALL)
    def finish_checkpoint(self) -> ShardRecord:
        """Waits until this rank's part is durable on storage. Raises CheckpointError if writing failed."""
        assert self.pending_shard is not None, "call begin_checkpoint first"
        pending, self.pending_shard = self.pending_shard, None
        return pending.wait()

    @register(Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, folder: Location, policy_version: int) -> None:
        """Loads weights and optimizer state from a checkpoint, which may have been saved by another number of ranks.
        Raises CheckpointError."""
        # Also if loading fails: some tensors may have been loaded then.
        self.engine.weight_version = self.engine.weight_version.after_load()
        load_into(self._named_state(), open_checkpoint(folder))
        self.offload_after_copy()
        if self.context.device_type == "cpu":
            HOST_MEMORY.return_free_memory()
        self.checkpoint_loaded(policy_version)

    @register(Dispatch.ONE_TO_ALL)
    def random_state(self) -> JsonValue:
        """The state of this process's random generators, on the host and on its own device."""
        return capture_random_state(self.context.device)

    @register(Dispatch.ALL_TO_ALL)
    def restore_random_state(self, state: JsonValue) -> None:
        """Sets this process's random generators."""
        restore_random_state(state, self.context.device)

    def offload_after_copy(self) -> None:
        """Offloads the moments again after the whole state was copied or loaded. Parameters stay on the device until
        the next rollout."""
        self.engine.offload_moments()

    def checkpoint_loaded(self, policy_version: int) -> None:
        """Called after a checkpoint was loaded; subclasses may override it."""

    def optimizer_step(self, rate: float) -> float:
        """Collective. Updates the weights and returns the gradient norm; if the norm is not finite, skips the update.

        Raises NonFiniteUpdateError after MAX_SKIPPED_UPDATES consecutive skipped updates."""
        with SPANS.span("optimizer_step"):
            norm = self.engine.optimizer_step(rate)
        self.num_skipped_in_a_row = 0 if math.isfinite(norm) else self.num_skipped_in_a_row + 1
        if self.num_skipped_in_a_row >= MAX_SKIPPED_UPDATES:
            raise NonFiniteUpdateError(
                f"{self.prefix.rstrip('.') or 'actor'}: {MAX_SKIPPED_UPDATES} consecutive updates were skipped because "
                f"their gradients were not finite; reduce {self.learning_rate_field}, or look for infinite rewards in "
                "the samples"
            )
        return norm

    def _named_state(self) -> Iterator[tuple[str, Tensor]]:
        """The tensors that training changes: optimizer state, and weights or, if adapters are trained, the adapters."""
        if self.engine.settings.adapters is None:
            trained, kind = self.engine.named_shards(), MODEL_PREFIX
        else:
            trained, kind = self.engine.named_adapters(), ADAPTER_PREFIX
        for name, tensor in trained:
            yield self.prefix + kind + name, tensor
        for name, tensor in self.engine.named_optimizer_state():
            yield self.prefix + OPTIMIZER_PREFIX + name, tensor

    def _shards(self) -> list[ShardedTensor]:
        return sharded_tensors_from_dtensors(self._named_state(), self.context.rank)
