"""The reference: a frozen model, which is the policy as it was at step 0, or another model such as a teacher."""

from __future__ import annotations

from rljob_trainer.batch.proto import DataProto
from rljob_trainer.dispatch.mesh import MeshPosition
from rljob_trainer.dispatch.modes import Dispatch
from rljob_trainer.dispatch.register import register
from rljob_trainer.dispatch.worker import Worker, WorkerContext
from rljob_trainer.engines.train.engine import TrainEngine
from rljob_trainer.engines.train.token_batch import in_rows
from rljob_trainer.observability.memory import MEMORY, Boundary, Bytes, Owner
from rljob_trainer.workers.columns import REF_LOGPROBS, token_batch


class ReferenceWorker(Worker):
    """Computes log-probabilities with the frozen model. There is a reference if the job has a KL term or distills a
    teacher, or if a function of the user needs these log-probabilities."""

    def __init__(self, context: WorkerContext, engine: TrainEngine, temperature: float) -> None:
        """`engine` has the frozen model. It is the reference's own engine, or the actor's, whose model without adapters
        is the reference."""
        super().__init__(context)
        self.engine = engine
        self.temperature = temperature
        MEMORY.watch(self.memory)

    def memory(self) -> Bytes:
        """Bytes that this role has on the device now, by owner; none if the role shares the actor's model."""
        # A frozen model has no optimizer, so this engine is the actor's.
        if self.engine.optimizer is not None:
            return {}
        return {Owner.REFERENCE: self.engine.memory.parameters, Owner.OTHER: self.engine.memory.gathered}

    def mesh_position(self, mesh: str) -> MeshPosition:
        """The position of this rank in the engine's layout."""
        del mesh
        return self.engine.layout.position(self.context.rank)

    @register(Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def compute_ref_logprobs(self, batch: DataProto) -> DataProto:
        """Returns column REF_LOGPROBS; 0 for rows that IS_TRAINED excludes. Needs TOKENS and RESPONSE_MASK."""
        tokens = token_batch(batch)
        found = self.engine.forward(tokens, self.temperature, with_adapters=False)
        MEMORY.mark(Boundary.REF_LOGPROBS)
        return DataProto(ragged={REF_LOGPROBS: in_rows(found.logprobs_N, tokens.response_mask)})
