"""Held-out prompts that are scored during training and never trained on."""

from __future__ import annotations

from rljob_api.base import WireModel
from rljob_api.scalars import Count, Flag, PositiveCount, PositiveNumber
from rljob_api.v1alpha1.dataset import Dataset


class Evaluation(WireModel):
    """Greedy accuracy, and sampled accuracy beside it, on the same prompts each time.

    Rows of the training set whose prompt occurs here are left out of training."""

    dataset: Dataset
    num_prompts: PositiveCount = 256
    """The first n rows of the dataset; fewer if it has fewer."""
    every_steps: Count = 20
    """0: only before the first and after the last step."""
    at_start: Flag = True
    num_samples: Count = 1
    """Sampled responses per prompt, beside the greedy one; 0 for none."""
    temperature: PositiveNumber = 1.0
    """Of the sampled responses."""
