"""Flat tokens: the rows of a batch one after the other, from the rollout to the gradient, without padding.

Legend: B rows; L tokens of all rows; N of them that the model reads; R response tokens, which it is asked about.

A row is a prompt and a response. What the model reads of it ends one token before the last response token: the later
ones are only predicted, or not even that. Columns with a value per token have it at the token's own place; what is
computed has one value per response token, row after row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from rljob_trainer.batch.ragged import RaggedColumn
from rljob_trainer.engines.train.attention_kernels import FlatRows, on_device
from rljob_trainer.engines.train.sequence_parallel import SequenceRanks


@dataclass(frozen=True)
class Piece:
    """A rank's part of a micro-batch whose tokens are shared by several."""

    tokens: slice
    """Of N."""
    responses: slice
    """Of R: those that a token of the piece predicts."""
    counts: tuple[int, ...]
    """Of each rank, the length of `responses`."""

    @staticmethod
    def of(ranks: SequenceRanks, predictors_R: Tensor, num_tokens: int) -> Piece:
        """`predictors_R` is on the host, and ascends."""
        length = num_tokens // ranks.size
        edges = torch.searchsorted(predictors_R, torch.arange(ranks.size + 1) * length).tolist()
        counts = tuple(end - start for start, end in pairwise(edges))
        return Piece(ranks.piece(num_tokens), slice(edges[ranks.rank], edges[ranks.rank + 1]), counts)


@dataclass(frozen=True)
class MicroBatch:
    """What one forward pass reads and is asked, on the device; the lengths are known to the host, too."""

    tokens_N: Tensor
    """int64."""
    rows: FlatRows
    """Where rows begin and end in N; each has at least one token."""
    predictors_R: Tensor
    """int64: where in N the token before each response token stands; its hidden state predicts the response token."""
    targets_R: Tensor
    """int64: the response tokens."""
    response_lengths: tuple[int, ...]
    """[B]: response tokens of each row; they add up to R."""
    columns: Mapping[str, Tensor]
    """[R] each."""
    piece: Piece | None
    """What of it this rank's layers work on, where several share the tokens."""
    num_filling: int
    """The last tokens of N, of which nothing is asked: they are no row's."""

    @property
    def own_tokens(self) -> slice:
        """Tokens of rows among those that this rank's layers work on."""
        end = len(self.tokens_N) - self.num_filling
        if self.piece is None:
            return slice(0, end)
        start = self.piece.tokens.start
        return slice(0, max(0, min(self.piece.tokens.stop, end) - start))


@dataclass(frozen=True)
class TokenBatch:
    """Rows on the host. All columns are ragged with the same lengths."""

    tokens: RaggedColumn
    """int64: prompt, then response."""
    response_mask: RaggedColumn
    """bool: the response tokens. The first token of a row cannot be one: nothing predicts it."""
    columns: Mapping[str, RaggedColumn]

    def __len__(self) -> int:
        return len(self.tokens)

    @cached_property
    def read_lengths(self) -> tuple[int, ...]:
        """[B]: tokens that the model reads of each row; 0 for a row without response tokens."""
        return tuple(self._last_targets.tolist())

    @cached_property
    def response_lengths(self) -> tuple[int, ...]:
        """[B]: response tokens of each row."""
        lengths_B = torch.zeros(len(self), dtype=torch.int64)
        lengths_B.index_add_(0, self._rows_L, self.response_mask.values.long())
        return tuple(lengths_B.tolist())

    def rows(self, rows: Sequence[int]) -> TokenBatch:
        """These rows, in this order."""
        columns = {name: column.rows(rows) for name, column in self.columns.items()}
        return TokenBatch(self.tokens.rows(rows), self.response_mask.rows(rows), columns)

    def micro_batch(
        self, rows: Sequence[int], device: torch.device, sequence_ranks: SequenceRanks | None = None
    ) -> MicroBatch:
        """These rows as one forward pass reads them. For no rows, a row about which nothing is asked; so is one that
        fills the tokens up to a multiple of `sequence_ranks`."""
        chosen = self.rows(rows)
        mask_L = chosen.response_mask.values
        is_read_L = chosen._positions_L < chosen._last_targets[chosen._rows_L]
        # The place of each read token among the read ones; that of a response token's predecessor is one before.
        place_L = is_read_L.cumsum(0) - 1
        targets_L = mask_L.nonzero()[:, 0]
        predictors_R = place_L[targets_L - 1]
        tokens_N, lengths = chosen.tokens.values[is_read_L], chosen.read_lengths
        num_filling = 0 if rows else 1
        if sequence_ranks is not None:
            num_filling += sequence_ranks.num_filling_tokens(len(tokens_N) + num_filling)
        if num_filling:
            tokens_N, lengths = torch.cat([tokens_N, tokens_N.new_zeros(num_filling)]), (*lengths, num_filling)
        return MicroBatch(
            tokens_N=on_device(tokens_N, device),
            rows=FlatRows(lengths, device, sequence_ranks),
            predictors_R=on_device(predictors_R, device),
            targets_R=on_device(chosen.tokens.values[targets_L], device),
            response_lengths=chosen.response_lengths if rows else (0,),
            columns={name: on_device(column.values[mask_L], device) for name, column in chosen.columns.items()},
            piece=None if sequence_ranks is None else Piece.of(sequence_ranks, predictors_R, len(tokens_N)),
            num_filling=num_filling,
        )

    @cached_property
    def _rows_L(self) -> Tensor:
        return torch.repeat_interleave(torch.arange(len(self)), self.tokens.lengths)

    @cached_property
    def _positions_L(self) -> Tensor:
        starts_B = torch.from_numpy(self.tokens.offsets[:-1])
        return torch.arange(len(self._rows_L)) - starts_B[self._rows_L]

    @cached_property
    def _last_targets(self) -> Tensor:
        """[B]: position of the last response token within its row, 0 where there is none."""
        positions_L = self._positions_L * self.response_mask.values
        return torch.zeros(len(self), dtype=torch.int64).scatter_reduce(0, self._rows_L, positions_L, "amax")


def in_rows(values_R: Tensor, response_mask: RaggedColumn) -> RaggedColumn:
    """[R] values of the response tokens as a ragged column with a value per token, 0 for the others."""
    values_L = torch.zeros(response_mask.values.shape, dtype=values_R.dtype)
    values_L[response_mask.values] = values_R
    return RaggedColumn(values_L, response_mask.lengths)


def batch_of_rows(rows: Sequence[Tensor]) -> TokenBatch:
    """Rows of tokens (int64 [T]) all of whose tokens but the first are asked about."""
    tokens = RaggedColumn.from_rows(rows)
    is_asked_L = torch.ones(len(tokens.values), dtype=torch.bool)
    is_asked_L[torch.from_numpy(tokens.offsets[:-1])] = False
    return TokenBatch(tokens, RaggedColumn(is_asked_L, tokens.lengths), {})
