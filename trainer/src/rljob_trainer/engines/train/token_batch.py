"""Flat (packed) tokens: the rows of a batch one after the other, without padding from rollout to gradient.

Legend: B rows; L tokens of all rows; M tokens that the model reads; N response tokens, which the model predicts.

A row is a prompt and a response. The model reads a row up to the token before the last response token, because later
tokens are not needed to predict response tokens. Columns of a batch have one value per token; computed columns have one
value per response token, row after row.
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
    """One sequence rank's part of a micro-batch."""

    tokens: slice
    """The part of the M tokens that this rank processes."""
    responses: slice
    """The part of the N response tokens that tokens of this piece predict."""
    counts: tuple[int, ...]
    """The length of `responses` on each rank."""

    @staticmethod
    def of(ranks: SequenceRanks, predictors_N: Tensor, num_tokens: int) -> Piece:
        """The piece of this rank, of M = `num_tokens` tokens. `predictors_N` (see MicroBatch) must be on the host and
        ascending."""
        length = num_tokens // ranks.size
        edges = torch.searchsorted(predictors_N, torch.arange(ranks.size + 1) * length).tolist()
        counts = tuple(end - start for start, end in pairwise(edges))
        return Piece(ranks.piece(num_tokens), slice(edges[ranks.rank], edges[ranks.rank + 1]), counts)


@dataclass(frozen=True)
class MicroBatch:
    """The input of one forward pass, on the device; the host also knows the lengths."""

    tokens_M: Tensor
    """int64: the ids of the tokens that the model reads."""
    rows: FlatRows
    """Where the rows begin and end in `tokens_M`; each row has at least one token."""
    predictors_N: Tensor
    """int64: for each response token, the index in `tokens_M` of the token before it, whose hidden state predicts
    it."""
    targets_N: Tensor
    """int64: the response tokens."""
    response_lengths: tuple[int, ...]
    """[B]: the number of response tokens of each row; their sum is N."""
    columns: Mapping[str, Tensor]
    """[N] each: the values at response tokens."""
    piece: Piece | None
    """The part that this rank's layers process; None without sequence parallelism."""
    num_filler_tokens: int
    """The number of tokens at the end of `tokens_M` that belong to no row of the batch."""
    batch_rows: tuple[int, ...]
    """The numbers of its rows in the batch."""

    @property
    def non_filler_tokens(self) -> slice:
        """The tokens that are not filler tokens, as indices among the tokens that this rank's layers process."""
        end = len(self.tokens_M) - self.num_filler_tokens
        if self.piece is None:
            return slice(0, end)
        start = self.piece.tokens.start
        return slice(0, max(0, min(self.piece.tokens.stop, end) - start))


@dataclass(frozen=True)
class TokenBatch:
    """Rows on the host. All columns are ragged and have the same lengths."""

    tokens: RaggedColumn
    """int64: the prompt's tokens, then the response's."""
    response_mask: RaggedColumn
    """bool: True for response tokens. The first token of a row must not be one, because no token before it predicts
    it."""
    columns: Mapping[str, RaggedColumn]
    """Values per token, such as advantages; only the values of response tokens are used."""
    micro_batches_B: Tensor | None = None
    """int32: for each row the number of its micro-batch if all workers' micro-batches were planned together; negative
    if this row's was not."""

    def __len__(self) -> int:
        return len(self.tokens)

    @cached_property
    def read_lengths(self) -> tuple[int, ...]:
        """[B]: the number of tokens of each row that the model reads; 0 for a row without response tokens."""
        return tuple(self._last_targets.tolist())

    @cached_property
    def response_lengths(self) -> tuple[int, ...]:
        """[B]: the number of response tokens of each row."""
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
        """The micro-batch of these rows. A row of filler tokens is appended if there are no rows, or if the number of
        tokens is not a multiple of the number of sequence ranks."""
        chosen = self.rows(rows)
        mask_L = chosen.response_mask.values
        is_read_L = chosen._positions_L < chosen._last_targets[chosen._rows_L]
        # The index of each token among the tokens that are read. The token before a response token predicts it.
        read_index_L = is_read_L.cumsum(0) - 1
        targets_L = mask_L.nonzero()[:, 0]
        predictors_N = read_index_L[targets_L - 1]
        tokens_M, lengths = chosen.tokens.values[is_read_L], chosen.read_lengths
        num_filler_tokens = 0 if rows else 1
        if sequence_ranks is not None:
            num_filler_tokens += sequence_ranks.num_filler_tokens(len(tokens_M) + num_filler_tokens)
        if num_filler_tokens:
            tokens_M, lengths = (
                torch.cat([tokens_M, tokens_M.new_zeros(num_filler_tokens)]),
                (*lengths, num_filler_tokens),
            )
        return MicroBatch(
            tokens_M=on_device(tokens_M, device),
            rows=FlatRows(lengths, device, sequence_ranks),
            predictors_N=on_device(predictors_N, device),
            targets_N=on_device(chosen.tokens.values[targets_L], device),
            response_lengths=chosen.response_lengths if rows else (0,),
            columns={name: on_device(column.values[mask_L], device) for name, column in chosen.columns.items()},
            piece=None if sequence_ranks is None else Piece.of(sequence_ranks, predictors_N, len(tokens_M)),
            num_filler_tokens=num_filler_tokens,
            batch_rows=tuple(rows),
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
        """[B]: the position of the last response token within its row; 0 if there is none."""
        positions_L = self._positions_L * self.response_mask.values
        return torch.zeros(len(self), dtype=torch.int64).scatter_reduce(0, self._rows_L, positions_L, "amax")


def in_rows(values_N: Tensor, response_mask: RaggedColumn) -> RaggedColumn:
    """Converts values of response tokens [N] to a ragged column with a value per token: 0 for all other tokens."""
    values_L = torch.zeros(response_mask.values.shape, dtype=values_N.dtype)
    values_L[response_mask.values] = values_N
    return RaggedColumn(values_L, response_mask.lengths)


def batch_of_rows(rows: Sequence[Tensor]) -> TokenBatch:
    """A batch of rows of tokens (int64 [T]) in which all tokens but the first count as response tokens."""
    tokens = RaggedColumn.from_rows(rows)
    is_response_L = torch.ones(len(tokens.values), dtype=torch.bool)
    is_response_L[torch.from_numpy(tokens.offsets[:-1])] = False
    return TokenBatch(tokens, RaggedColumn(is_response_L, tokens.lengths), {})
