"""Whether the engine gets a model's log-probabilities right, asked before anything is trained.

The engine calls a model's decoder and its head in ways of its own: flat rows, attention of its own, logits in tiles.
The model's own forward, on one row at a time and with eager attention, says what is right. Both run in float32 on the
weights as they are sharded, and are called through the sharded modules.

Legend: T tokens of a row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from rljob_trainer.engines.train.attention import use_attention
from rljob_trainer.errors import ConfigurationError, TrainerError

TOLERANCE = 1e-4
"""Largest difference of two log-probabilities, in nats."""
ROW_LENGTHS = (5, 17, 48)
SHORT_WINDOW = 8
"""Sliding windows of the comparison, so that its rows are longer: a window of thousands of tokens would not be seen."""

Logprobs = Callable[[Sequence[Tensor]], Sequence[Tensor]]
"""Rows of tokens (int64 [T], on the host) -> for each row [T - 1]: the log-probability of every token but the first."""


def check_acceptance(
    language_model: nn.Module,
    own_logprobs: Logprobs,
    engine_logprobs: Logprobs,
    max_over_ranks: Callable[[float], float],
) -> None:
    """Collective: every rank compares the same rows, and `max_over_ranks` makes the verdict one.

    `own_logprobs` must call the model's own forward on each row alone; it runs with eager attention.
    Raises ConfigurationError, on all ranks, if the engine's values differ by more than TOLERANCE or are no numbers."""
    config: PreTrainedConfig = language_model.config
    rows = sample_rows(config)
    with short_windows(language_model):
        try:
            found = engine_logprobs(rows)
        except Exception as error:
            if not is_misfit(error):
                raise
            raise ConfigurationError(
                f"spec.training.model.source: the trainer cannot call a '{config.model_type}' model "
                f"({type(error).__name__}: {error}); choose a model of another type"
            ) from error
        with eager_attention(language_model):
            right = own_logprobs(rows)
    difference = max_over_ranks(largest_difference(found, right))
    if math.isinf(difference):
        raise ConfigurationError(
            f"spec.training.model.source: log-probabilities of the '{config.model_type}' model are not finite; are its "
            "weights? download it again, or choose another one"
        )
    if difference > TOLERANCE:
        raise ConfigurationError(
            f"spec.training.model.source: the trainer does not get the log-probabilities of a '{config.model_type}' "
            f"model right (they differ from those of the model's own forward by up to {difference:.1e}, more than "
            f"{TOLERANCE:.0e}); choose a model of another type"
        )


def is_misfit(error: Exception) -> bool:
    """Whether an error says that a model is called wrongly; else it is memory, a device, or a refusal of our own."""
    if isinstance(error, torch.OutOfMemoryError | TrainerError):
        return False
    text = str(error).lower()
    return not (isinstance(error, RuntimeError) and any(word in text for word in ("cuda", "nccl", "gloo", "memory")))


def sample_rows(config: PreTrainedConfig) -> list[Tensor]:
    """Rows of different lengths, the same on every rank, without the special tokens that the configuration names."""
    text = config.get_text_config()
    fields = text.to_dict()
    special: set[int] = set()
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        value = fields.get(name)
        special.update(value if isinstance(value, list) else [] if value is None else [value])
    ordinary = torch.tensor([token for token in range(text.vocab_size) if token not in special])
    # Some types have another name for it, which only the attribute knows.
    longest = getattr(text, "max_position_embeddings", None) or max(ROW_LENGTHS)
    generator = torch.Generator().manual_seed(0)
    places = [torch.randint(len(ordinary), (min(each, longest),), generator=generator) for each in ROW_LENGTHS]
    return [ordinary[places_T] for places_T in places]


def largest_difference(found: Sequence[Tensor], right: Sequence[Tensor]) -> float:
    """Of the values of all rows; infinite where any is not a finite number.

    Raises ValueError where the two are not of one shape."""
    if not found or [each.shape for each in found] != [each.shape for each in right]:
        raise ValueError(
            f"log-probabilities of {[*map(len, found)]} and {[*map(len, right)]} tokens: to be of the same"
        )
    difference = torch.cat([(one - other).abs().double() for one, other in zip(found, right, strict=True)]).max().item()
    # A maximum over ranks may lose what is not a number, but not infinity.
    return difference if math.isfinite(difference) else math.inf


@contextmanager
def eager_attention(language_model: nn.Module) -> Iterator[None]:
    """Within it the model's attention is written out: scores, mask, softmax."""
    before = use_attention(language_model, "eager")
    try:
        yield
    finally:
        use_attention(language_model, before)


@contextmanager
def short_windows(language_model: nn.Module) -> Iterator[None]:
    """Within it every sliding window has SHORT_WINDOW tokens at most."""
    config: PreTrainedConfig = language_model.config
    # Masks are made from the configuration, attention is told by the modules: both, and each once.
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
