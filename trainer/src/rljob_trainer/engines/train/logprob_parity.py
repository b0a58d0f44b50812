"""Checks before training that the train engine computes a model's log-probabilities correctly.

The train engine runs a model's decoder and head differently from transformers: flat rows, its own attention, logits in
tiles. The results are compared with those of the model's own forward pass in transformers, on one row at a time and
with eager attention. Both run in float32 on the sharded weights, through the sharded modules.

Legend: T tokens of a row.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from rljob_trainer.engines.train.attention import use_attention
from rljob_trainer.errors import ConfigurationError, TrainerError

TOLERANCE = 1e-4
"""The largest accepted difference of two log-probabilities, in nats."""
ROW_LENGTHS = (5, 17, 48)
"""The numbers of tokens of the rows that are compared; fewer if the model has fewer positions."""
SHORT_WINDOW = 8
"""The sliding window during the check. It is shorter than the rows, because a window of thousands of tokens would have
no effect on them."""
UNRELATED_ERRORS = (
    TrainerError,
    MemoryError,
    OSError,
    torch.OutOfMemoryError,
    torch.AcceleratorError,
    torch.distributed.DistError,
)
"""Errors of memory, storage, devices and collectives, and errors that the trainer raises: they do not mean that the
engine calls the model incorrectly."""
UNRELATED_TEXTS = re.compile(r"gloo|NCCL|can't allocate memory|CUDA error|CUBLAS_STATUS|CUDNN_STATUS")
"""torch 2.13 raises some of these errors as a plain RuntimeError; the pattern matches their texts. It must not match
the text for a tensor on the wrong device ("cuda:0 and cpu"), because that is an incorrect call of the model."""

Logprobs = Callable[[Sequence[Tensor]], Sequence[Tensor]]
"""Rows of tokens (int64 [T], on the host) -> for each row [T - 1], the log-probability of all tokens but the first."""


def check_logprob_parity(
    language_model: nn.Module,
    transformers_logprobs: Logprobs,
    engine_logprobs: Logprobs,
    max_over_ranks: Callable[[float], float],
) -> None:
    """Collective. Every rank compares the same rows, and `max_over_ranks` makes the result equal on all ranks.

    `transformers_logprobs` must call the model's own forward pass on each row alone; it is called with eager attention.
    Raises ConfigurationError on all ranks if the log-probabilities differ by more than TOLERANCE or are not finite. If
    the engine cannot call the model, raises ConfigurationError on the ranks where the call failed."""
    config: PreTrainedConfig = language_model.config
    rows = sample_rows(config)
    with short_windows(language_model):
        try:
            found = engine_logprobs(rows)
        except Exception as error:
            if not is_model_mismatch(error):
                raise
            raise ConfigurationError(
                f"spec.training.model.source: the trainer cannot call a '{config.model_type}' model "
                f"({type(error).__name__}: {error}); choose a model of another type"
            ) from error
        with eager_attention(language_model):
            expected = transformers_logprobs(rows)
    difference = max_over_ranks(largest_difference(found, expected))
    if math.isinf(difference):
        raise ConfigurationError(
            f"spec.training.model.source: log-probabilities of the '{config.model_type}' model are not finite; its "
            "weights may be damaged: download it again, or choose another model"
        )
    if difference > TOLERANCE:
        raise ConfigurationError(
            f"spec.training.model.source: the trainer does not support '{config.model_type}' models: its "
            f"log-probabilities differ from those of the model's own forward pass by up to {difference:.1e}, more than "
            f"{TOLERANCE:.0e}; choose a model of another type"
        )


def is_model_mismatch(error: Exception) -> bool:
    """Whether an error means that the engine calls the model incorrectly. All other errors are of UNRELATED_ERRORS, or
    have a text of UNRELATED_TEXTS."""
    if isinstance(error, UNRELATED_ERRORS):
        return False
    return not (isinstance(error, RuntimeError) and UNRELATED_TEXTS.search(str(error)))


def sample_rows(config: PreTrainedConfig) -> list[Tensor]:
    """Random rows of tokens with the lengths ROW_LENGTHS, the same on every rank, without the special tokens of the
    configuration."""
    text = config.get_text_config()
    fields = text.to_dict()
    special: set[int] = set()
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        value = fields.get(name)
        special.update(value if isinstance(value, list) else [] if value is None else [value])
    ordinary = torch.tensor([token for token in range(text.vocab_size) if token not in special])
    # Read as an attribute, because some model types have another name for it in the file.
    longest = getattr(text, "max_position_embeddings", None) or max(ROW_LENGTHS)
    generator = torch.Generator().manual_seed(0)
    indices = [torch.randint(len(ordinary), (min(each, longest),), generator=generator) for each in ROW_LENGTHS]
    return [ordinary[indices_T] for indices_T in indices]


def largest_difference(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The largest absolute difference over all rows; infinity if any value is not finite.

    Raises ValueError if the shapes differ."""
    if not found or [each.shape for each in found] != [each.shape for each in expected]:
        raise ValueError(
            "log-probabilities must have the same shapes (seen: "
            f"{[*map(len, found)]} and {[*map(len, expected)]} tokens)"
        )
    difference = (
        torch.cat([(one - other).abs().double() for one, other in zip(found, expected, strict=True)]).max().item()
    )
    # The maximum over ranks may ignore NaN, but not infinity.
    return difference if math.isfinite(difference) else math.inf


@contextmanager
def eager_attention(language_model: nn.Module) -> Iterator[None]:
    """Within this block the model uses eager attention (explicit scores, mask and softmax)."""
    before = use_attention(language_model, "eager")
    try:
        yield
    finally:
        use_attention(language_model, before)


@contextmanager
def short_windows(language_model: nn.Module) -> Iterator[None]:
    """Within this block every sliding window has at most SHORT_WINDOW tokens."""
    config: PreTrainedConfig = language_model.config
    # Masks use the window of the configuration, attention uses the window of the modules, so both are changed.
    holders = {id(each): each for each in (config, config.get_text_config(), *language_model.modules())}
    windows = {key: vars(each).get("sliding_window") for key, each in holders.items()}
    long = {key: window for key, window in windows.items() if isinstance(window, int) and window > SHORT_WINDOW}
    try:
        for key in long:
            vars(holders[key])["sliding_window"] = SHORT_WINDOW
        yield
    finally:
        for key, window in long.items():
            vars(holders[key])["sliding_window"] = window
