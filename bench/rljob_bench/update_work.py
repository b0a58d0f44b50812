"""The models that `gpu_step.py` trains, the rows of an update, and the planner's formulas for both."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean

import torch

from rljob_planner.known_models import known_model
from rljob_planner.memory.train_passes import train_peak
from rljob_planner.model_shape import ModelShape
from rljob_planner.timing import passes
from rljob_planner.workload import TrainLayout, TrainModel


@dataclass(frozen=True)
class Work:
    """The rows of an update."""

    row_lengths: tuple[int, ...]
    num_responses: int
    """Number of response tokens, the only ones whose logits are computed."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all rows."""
        return sum(self.row_lengths)

    @property
    def rows(self) -> passes.Rows:
        """The rows as the planner describes them."""
        count = len(self.row_lengths)
        return passes.Rows(
            count=count,
            prompt=(self.num_tokens - self.num_responses) / count,
            response=self.num_responses / count,
            square=fmean(length * length for length in self.row_lengths),
            longest=max(self.row_lengths),
            shortest=min(self.row_lengths),
        )


def update_operations(shape: ModelShape, work: Work) -> float:
    """Floating-point operations of forward and backward pass, the second being twice the first. Recomputation is not
    counted, because it is overhead."""
    return 3 * sum(passes.forward_operations(TrainModel(shape, is_trained=True), work.rows))


def planned_peak_bytes(
    shape: ModelShape, dtype: torch.dtype, every_nth_layer: int, micro_batch_tokens: int, *, is_cpu: bool
) -> float:
    """The peak of an update on one device by the planner's formula. `every_nth_layer` is recomputed; 0 keeps all
    activations."""
    model = TrainModel(
        shape,
        is_trained=True,
        compute_bytes=dtype.itemsize,
        checkpoints_activations=every_nth_layer > 0,
        checkpoints_every_nth_layer=max(1, every_nth_layer),
    )
    return sum(part.num_bytes for part in train_peak(model, TrainLayout(1, 1), micro_batch_tokens, is_cpu=is_cpu))


def _known(name: str) -> ModelShape:
    found = known_model(name)
    assert found is not None
    return found


TINY = "tiny"
"""A model that only shows that the program works."""
SHAPES = {
    TINY: ModelShape(TINY, 2, 64, 2, 1, 32, 128, 256, ties_head=True, has_qk_norm=True),
    **{name: _known(f"Qwen/{name}") for name in ("Qwen3-0.6B", "Qwen3-1.7B", "Qwen3-4B")},
}
"""Shapes of Qwen3 models with tied embeddings; the weights are random."""
