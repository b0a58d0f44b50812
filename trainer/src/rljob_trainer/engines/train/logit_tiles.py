"""The computations of `token_logprobs` on one tile of the logits at a time.

Legend: N response tokens, V vocabulary, D hidden size; R rows (tokens) and C columns (of the vocabulary) of one tile; 1
a dimension that is broadcast.

Tiles are processed column by column: all tokens for some columns, then the next columns. So the weight's gradient for
these columns is complete before the next ones begin, and a 16-bit weight needs no second, weight-sized float32 sum.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class TileSettings:
    """How logits are computed and divided into tiles."""

    multiplier: float
    """See `token_logprobs.OutputHead`, also for `soft_cap`."""
    soft_cap: float | None
    temperature: float
    with_entropy: bool
    with_squares: bool
    tile_tokens: int
    """The number of tokens of a tile."""
    tile_columns: int
    """The number of columns of a tile."""
    softmax_dtype: torch.dtype
    """The dtype of the softmax and of sums."""
    product_dtype: torch.dtype
    """The dtype of matrix products, except for the logits."""
    logits_dtype: torch.dtype
    """The dtype in which products return logits."""

    @property
    def scale(self) -> float:
        """The factor from hidden @ weight.T + bias to logits / temperature, without the soft cap."""
        return self.multiplier / self.temperature


def tile_shape(num_tokens: int, num_vocabulary: int, hidden_size: int, num_elements: int) -> tuple[int, int]:
    """The number of tokens and the number of columns of a tile with about `num_elements` elements: as square as
    possible, for efficient matrix products, and so that all tiles have about the same size. The tile's part of the
    weight, [C, D], has at most about 4 * `num_elements` elements."""
    side = math.isqrt(num_elements)
    if num_vocabulary < side:
        return _even_part(num_tokens, num_elements // num_vocabulary), num_vocabulary
    rows = _even_part(num_tokens, side)
    return rows, _even_part(num_vocabulary, min(num_elements // rows, 4 * num_elements // hidden_size))


def _even_part(total: int, largest: int) -> int:
    """The size of the parts if `total` is divided into as few parts as possible, each of at most about `largest`. A
    multiple of 64, unless there is a single part or parts are smaller than 64."""
    if total <= largest:
        return max(1, total)
    part = math.ceil(total / math.ceil(total / max(1, largest)))
    return part if part < 64 else 64 * math.ceil(part / 64)


class Tiles:
    """Logits / temperature, tile by tile, in memory that all tiles share."""

    def __init__(self, hidden_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None, settings: TileSettings) -> None:
        self.hidden_ND = hidden_ND.to(settings.product_dtype)
        self._weight_VD, self._bias_V, self._settings = weight_VD, bias_V, settings
        self._buffers: dict[str, Tensor] = {}

    def columns(self) -> Iterator[slice]:
        """The slices of the vocabulary."""
        return _slices(len(self._weight_VD), self._settings.tile_columns)

    def rows(self) -> Iterator[slice]:
        """The slices of the tokens."""
        return _slices(len(self.hidden_ND), self._settings.tile_tokens)

    def weight(self, columns: slice) -> Tensor:
        """[C, D] in the dtype of products."""
        return self._weight_VD[columns].to(self._settings.product_dtype)

    def scaled(self, rows: slice, columns: slice, weight_CD: Tensor) -> Tensor:
        """Logits / temperature of a tile, [R, C]. The next call overwrites this tensor."""
        settings = self._settings
        shape = torch.Size((rows.stop - rows.start, columns.stop - columns.start))
        logits_RC = self._buffer("product", shape, settings.logits_dtype)
        if settings.logits_dtype != settings.product_dtype:
            wide_product(self.hidden_ND[rows], weight_CD.T, logits_RC)
            if self._bias_V is not None:
                logits_RC.add_(self._bias_V[columns])
        elif self._bias_V is None:
            torch.mm(self.hidden_ND[rows], weight_CD.T, out=logits_RC)
        else:
            bias_C = self._bias_V[columns].to(settings.product_dtype)
            torch.addmm(bias_C, self.hidden_ND[rows], weight_CD.T, out=logits_RC)
        if settings.logits_dtype != settings.softmax_dtype:
            logits_RC = self.memory("logits", logits_RC).copy_(logits_RC)
        if settings.soft_cap is not None:
            logits_RC.mul_(settings.multiplier / settings.soft_cap).tanh_()
            return logits_RC.mul_(settings.soft_cap / settings.temperature)
        return logits_RC if settings.scale == 1 else logits_RC.mul_(settings.scale)

    def memory(self, name: str, like_RC: Tensor) -> Tensor:
        """A tensor [R, C] in the dtype of the softmax, not initialized. The next call with this name returns the same
        memory."""
        return self._buffer(name, like_RC.shape, self._settings.softmax_dtype)

    def _buffer(self, name: str, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        if name not in self._buffers:
            # No tile is larger than the first.
            self._buffers[name] = torch.empty(shape.numel(), dtype=dtype, device=self.hidden_ND.device)
        return self._buffers[name][: shape.numel()].view(shape)


class Sums:
    """For each token, over the columns that were added so far: the largest logit; with e = exp(logit - largest), the
    sums of e, of e * (logit - largest) and of e * e; and the target's logit, once its column was added.

    The sums are rescaled when the largest logit grows (M. Milakov and N. Gimelshein, Online normalizer calculation for
    softmax, 2018)."""

    def __init__(self, targets_N: Tensor, settings: TileSettings) -> None:
        self._targets_N = targets_N
        self.sum_N = targets_N.new_zeros(len(targets_N), dtype=settings.softmax_dtype)
        # Finite instead of -inf, which would make the first rescaling NaN.
        self.largest_N = torch.full_like(self.sum_N, torch.finfo(settings.softmax_dtype).min)
        self._chosen_N = torch.full_like(self.sum_N, math.nan)
        self._weighted_N = torch.zeros_like(self.sum_N) if settings.with_entropy else None
        self._squared_N = torch.zeros_like(self.sum_N) if settings.with_squares else None

    def add(self, rows: slice, columns: slice, scaled_RC: Tensor, tiles: Tiles) -> None:
        """Adds a tile of logits; `scaled_RC` is overwritten."""
        local_R1, is_inside_R1 = _local_targets(self._targets_N[rows], columns)
        chosen_R1 = torch.where(is_inside_R1, scaled_RC.gather(1, local_R1), self._chosen_N[rows, None])
        self._chosen_N[rows] = chosen_R1[:, 0]
        before_R = self.largest_N[rows].clone()
        largest_R = torch.maximum(before_R, scaled_RC.amax(dim=1))
        self.largest_N[rows] = largest_R
        change_R = before_R.sub_(largest_R)
        factor_R = change_R.exp()
        shifted_RC = scaled_RC.sub_(largest_R[:, None])
        if self._weighted_N is None:
            exponentials_RC = shifted_RC.exp_()
        else:
            exponentials_RC = torch.exp(shifted_RC, out=tiles.memory("exponentials", shifted_RC))
            rescaled_R = self._weighted_N[rows].addcmul_(self.sum_N[rows], change_R).mul_(factor_R)
            rescaled_R.add_(shifted_RC.mul_(exponentials_RC).sum(dim=1))
        self.sum_N[rows].mul_(factor_R).add_(exponentials_RC.sum(dim=1))
        if self._squared_N is not None:
            rescaled_R = self._squared_N[rows].mul_(factor_R.square_())
            rescaled_R.add_(exponentials_RC.square_().sum(dim=1))

    def results(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """After all tiles: log-probabilities, entropy, sum of squared probabilities, each [N]."""
        log_sum_N = self.sum_N.log()
        # In this order, a small difference of two logits keeps its precision.
        logprobs_N = self._chosen_N - self.largest_N - log_sum_N
        entropy_N = None if self._weighted_N is None else log_sum_N - self._weighted_N / self.sum_N
        squares_N = None if self._squared_N is None else self._squared_N / self.sum_N.square()
        return logprobs_N, entropy_N, squares_N


class LogitsGradient:
    """The gradient with respect to hidden @ weight.T + bias.

    For logits z and p = softmax(z): d logprob(y) / dz = onehot(y) - p, and d entropy / dz = -p (log p + entropy). With
    d = z - largest, p is exp(d) / sum and log p is d - log sum."""

    def __init__(
        self,
        targets_N: Tensor,
        largest_N: Tensor,
        sum_N: Tensor,
        entropy_N: Tensor | None,
        gradients_N: tuple[Tensor | None, Tensor | None],
        settings: TileSettings,
    ) -> None:
        """`gradients_N`: the gradients with respect to log-probabilities and entropy."""
        self._targets_N, self._largest_N, self._settings = targets_N, largest_N, settings
        of_logprob_N, of_entropy_N = gradients_N
        self._onehot_N = torch.zeros_like(sum_N) if of_logprob_N is None else of_logprob_N * settings.scale
        self._slope_N: Tensor | None = None
        constant_N = self._onehot_N
        if of_entropy_N is not None and entropy_N is not None:
            self._slope_N = -settings.scale * of_entropy_N / sum_N
            constant_N = constant_N + settings.scale * of_entropy_N * (entropy_N - sum_N.log())
        self._offset_N = -constant_N / sum_N

    def of_tile(self, rows: slice, columns: slice, scaled_RC: Tensor, tiles: Tiles) -> Tensor:
        """The gradient of a tile, [R, C] in the dtype of products. `scaled_RC`: the tile's logits / temperature, which
        are overwritten."""
        settings = self._settings
        squared_tanh_RC = None
        if settings.soft_cap is not None:
            # The derivative of tanh is 1 - tanh^2.
            squared_tanh_RC = tiles.memory("squared tanh", scaled_RC)
            torch.mul(scaled_RC, settings.temperature / settings.soft_cap, out=squared_tanh_RC).square_()
        shifted_RC = scaled_RC.sub_(self._largest_N[rows, None])
        if self._slope_N is None:
            gradient_RC = shifted_RC.exp_().mul_(self._offset_N[rows, None])
        else:
            exponentials_RC = torch.exp(shifted_RC, out=tiles.memory("exponentials", shifted_RC))
            gradient_RC = shifted_RC.mul_(self._slope_N[rows, None]).add_(self._offset_N[rows, None])
            gradient_RC.mul_(exponentials_RC)
        local_R1, is_inside_R1 = _local_targets(self._targets_N[rows], columns)
        gradient_RC.scatter_add_(1, local_R1, self._onehot_N[rows, None] * is_inside_R1)
        if squared_tanh_RC is not None:
            gradient_RC.addcmul_(gradient_RC, squared_tanh_RC, value=-1)
        return gradient_RC.to(settings.product_dtype)


class Totals:
    """Accumulates the required gradients of hidden states, weight and bias."""

    def __init__(
        self,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        is_required: tuple[bool, ...],
        settings: TileSettings,
    ) -> None:
        """`is_required` has one boolean each for hidden states, weight and bias; further elements are ignored."""
        self._dtype, self._input_dtype = settings.softmax_dtype, hidden_ND.dtype
        # The first tile overwrites this memory, the other tiles add to it. Without tokens there are no tiles.
        make = torch.empty_like if len(hidden_ND) else torch.zeros_like
        self._hidden_ND = make(hidden_ND, dtype=self._dtype) if is_required[0] else None
        self._weight_VD = make(weight_VD) if is_required[1] else None
        self._bias_V = None if bias_V is None or not is_required[2] else torch.zeros_like(bias_V, dtype=self._dtype)
        # If one tile has all tokens, the weight's gradient is a single product, and no float32 sum is needed.
        self._sums_apart = weight_VD.dtype != self._dtype and len(hidden_ND) > settings.tile_tokens
        self._sum_CD: Tensor | None = None

    def add(self, rows: slice, columns: slice, gradient_RC: Tensor, hidden_RD: Tensor, weight_CD: Tensor) -> None:
        """Adds the contribution of a tile. `gradient_RC`: the result of `LogitsGradient.of_tile`."""
        if self._hidden_ND is not None:
            _add_product(self._hidden_ND[rows], gradient_RC, weight_CD, is_first=columns.start == 0)
        if self._bias_V is not None:
            self._bias_V[columns] += gradient_RC.sum(dim=0, dtype=self._dtype)
        if self._weight_VD is not None:
            sum_CD = self._weight_VD[columns]
            if self._sums_apart:
                if self._sum_CD is None:
                    self._sum_CD = torch.empty_like(sum_CD, dtype=self._dtype)
                sum_CD = self._sum_CD[: len(sum_CD)]
            _add_product(sum_CD, gradient_RC.T, hidden_RD, is_first=rows.start == 0)

    def finish(self, columns: slice) -> None:
        """Stores the weight's gradient of these columns. Call it after all their tiles were added."""
        if self._weight_VD is not None and self._sum_CD is not None:
            self._weight_VD[columns] = self._sum_CD[: columns.stop - columns.start]

    def in_dtypes_of_inputs(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The gradients of hidden states, weight and bias; None if not required."""
        hidden_ND = None if self._hidden_ND is None else self._hidden_ND.to(self._input_dtype)
        bias_V = None if self._bias_V is None else self._bias_V.to(self._input_dtype)
        return hidden_ND, self._weight_VD, bias_V


def wide_product(left: Tensor, right: Tensor, result: Tensor) -> None:
    """result = left @ right, for 16-bit matrices and a result in float32 that no step rounds to 16 bits. Only GPUs have
    this product."""
    torch.ops.aten.mm.dtype_out(left, right, result.dtype, out=result)


def _add_product(total: Tensor, left: Tensor, right: Tensor, is_first: bool) -> None:
    """If `is_first`, total = left @ right, else total += left @ right."""
    if total.dtype == left.dtype:
        total.addmm_(left, right, beta=0 if is_first else 1)
    elif is_first:
        total.copy_(left @ right)
    else:
        total.add_(left @ right)


def _local_targets(targets_R: Tensor, columns: slice) -> tuple[Tensor, Tensor]:
    """Each token's target as a column of the tile (the nearest column if the target is outside of the tile), and
    whether the target is inside, each [R, 1]."""
    local_R1 = targets_R[:, None] - columns.start
    nearest_R1 = local_R1.clamp(0, columns.stop - columns.start - 1)
    return nearest_R1, local_R1 == nearest_R1


def _slices(total: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, total)) for start in range(0, total, size))
