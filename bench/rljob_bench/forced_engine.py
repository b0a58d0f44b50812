"""vLLM with responses of given lengths and steps of given duration. Imported only in worker processes, because vLLM
loads slowly."""

from __future__ import annotations

import time
from dataclasses import replace

from rljob_trainer.engines.rollout.base import FinishedSequence, GenerationRequest
from rljob_trainer.engines.rollout.vllm_engine import VllmEngine
from rljob_trainer.engines.rollout.vllm_start import VllmSettings


class ForcedEngine(VllmEngine):
    """The seed of a request is the number of tokens of its response, if the model cannot produce its end token."""

    def __init__(self, settings: VllmSettings) -> None:
        super().__init__(settings)
        self.step_seconds = 0.0
        """A step that would be faster takes this long. For the rest of it the process sleeps, as if a device worked."""
        self.num_steps, self.seconds_in_steps = 0, 0.0

    def add(self, request: GenerationRequest) -> None:
        """See VllmEngine."""
        super().add(replace(request, sampling=replace(request.sampling, max_new_tokens=request.seed)))

    def step(self) -> list[FinishedSequence]:
        """See VllmEngine."""
        begun = time.perf_counter()
        finished = super().step()
        time.sleep(max(0.0, begun + self.step_seconds - time.perf_counter()))
        self.num_steps += 1
        self.seconds_in_steps += time.perf_counter() - begun
        return finished
