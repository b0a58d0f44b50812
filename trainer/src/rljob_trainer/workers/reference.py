"""The reference policy of the KL term: the model as it was at step 0, frozen."""

from __future__ import annotations

from rljob_trainer.batch.proto import DataProto
from rljob_trainer.dispatch.modes import Dispatch
from rljob_trainer.dispatch.register import register
from rljob_trainer.dispatch.worker import Worker, WorkerContext
from rljob_trainer.engines.train.fsdp2 import Fsdp2Engine, TrainEngineSettings
from rljob_trainer.workers.columns import REF_LOGPROBS, RESPONSE_MASK, TOKENS, padded, unpadded_like


class ReferenceWorker(Worker):
    """Scores tokens with the frozen model. Only built where the KL coefficient is above 0."""

    def __init__(self, context: WorkerContext, settings: TrainEngineSettings, temperature: float) -> None:
        """Collective. `settings.optimizer` must be None."""
        super().__init__(context)
        self.engine = Fsdp2Engine(settings)
        self.temperature = temperature

    @register(Dispatch.DP_COMPUTE_PROTO)
    def compute_ref_logprobs(self, batch: DataProto) -> DataProto:
        """Column REF_LOGPROBS for a batch with TOKENS and RESPONSE_MASK."""
        wide = padded(batch)
        logprobs_BT = self.engine.logprobs(wide[TOKENS], wide[RESPONSE_MASK], self.temperature)
        return DataProto(ragged={REF_LOGPROBS: unpadded_like(logprobs_BT, batch.ragged_column(TOKENS))})
