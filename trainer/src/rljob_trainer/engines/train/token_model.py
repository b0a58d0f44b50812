"""The module that FSDP2 wraps: a causal language model that computes log-probabilities or values for flat rows.

Legend: B rows, T tokens of the longest row, M tokens that the model reads, N response tokens, D hidden size, V
vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rljob_trainer.engines.train.attention import AttentionPlan
from rljob_trainer.engines.train.output_head import VALUE_HEAD, computed_in_head, output_head_of
from rljob_trainer.engines.train.router import AuxiliaryLoss, ExpertLoad, RouterUse, router_use
from rljob_trainer.engines.train.token_batch import MicroBatch
from rljob_trainer.engines.train.token_logprobs import Entropy, OutputHead, token_distribution

NAME_PREFIX = "language_model."
"""The prefix that `TokenModel` adds to the parameter names of the Hugging Face model."""

Outputs = tuple[Tensor | None, ...]
Pass = Callable[["TokenModel"], Outputs]
"""One of the methods of TokenModel that must be called within `forward`, with its arguments."""


@dataclass(frozen=True)
class LogprobRequest:
    """Requests log-probabilities of the response tokens, and optionally entropy and squares. Columns that are not
    requested are None."""

    temperature: float
    entropy: Entropy = Entropy.NO
    with_squares: bool = False


@dataclass(frozen=True)
class ValueRequest:
    """Requests one float32 value for each response token, computed from the token before it."""

    by_probe: bool = False
    """True: a fixed vector (`_probe`) replaces the weight of the head. So values show differences of hidden states,
    even if the head is all zeros."""


ForwardRequest = LogprobRequest | ValueRequest


@dataclass(frozen=True)
class _Decoded:
    """The decoder's results for the tokens that this rank's layers process, including filler tokens."""

    hidden_MD: Tensor
    predictors_N: Tensor
    """The index in `hidden_MD` of the token before each response token."""
    non_filler_tokens: slice | Tensor
    """The indices in `hidden_MD` of the tokens that are not filler tokens or padding."""
    router_logits: tuple[Tensor, ...]
    """The router logits of each layer with experts; empty if not requested."""


class TokenModel(nn.Module):
    """The root of the sharded modules. FSDP2 gathers parameters only within `forward`. So the other public methods run
    through it: `model(partial(TokenModel.columns, ...))`."""

    def __init__(
        self,
        language_model: nn.Module,
        attention: AttentionPlan,
        router: AuxiliaryLoss | None,
        *,
        has_float32_head: bool = False,
    ) -> None:
        super().__init__()
        self.language_model = language_model
        self.attention = attention
        self.router = router
        self.has_float32_head = has_float32_head
        self.expert_load = ExpertLoad(language_model)

    def forward(self, run: Pass) -> Outputs:
        """Calls `run` with this module. `run` must return a plain tuple, in which FSDP2 finds the tensors with
        gradient."""
        return run(self)

    def columns(self, micro_batch: MicroBatch, request: ForwardRequest) -> Outputs:
        """The requested columns of the response tokens, [N] each. Call it within `forward`."""
        return self._columns(self._decoded(micro_batch), micro_batch, request)

    def routed_columns(self, micro_batch: MicroBatch, request: ForwardRequest) -> Outputs:
        """Three results in one tuple: the number of this rank's tokens that each expert got, [L, E] (None if not
        known); the two parts of the RouterUse for the auxiliary loss (None if there is no such loss); the result of
        `columns`. Call it within `forward`."""
        with self.expert_load.collected() as chosen:
            decoded = self._decoded(micro_batch, with_logits=self.router is not None)
        counts_LE = self.expert_load.counts(chosen, decoded.non_filler_tokens)
        use = self._use(decoded) or (None, None)
        return (counts_LE, *use, *self._columns(decoded, micro_batch, request))

    def router_use(self, micro_batch: MicroBatch) -> Outputs:
        """The two parts of the RouterUse of this rank's tokens, or nothing if the model returns no router logits. Call
        it within `forward`."""
        return self._use(self._decoded(micro_batch, with_logits=True)) or ()

    def transformers_logprobs(self, rows: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """[T - 1] for each row of tokens [T]: the log-probability of every token but the first, by the model's own
        forward pass in transformers, on the row alone. Call it within `forward`."""
        found = []
        for tokens_T in rows:
            logits_TV = self.language_model(input_ids=tokens_T[None], use_cache=False).logits[0, :-1].float()
            found.append(logits_TV.log_softmax(dim=-1).gather(1, tokens_T[1:, None])[:, 0].clone())
        return tuple(found)

    def transformers_values(self, rows: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """[T - 1] for each row of tokens [T]: the value of every token but the last, by the model's own decoder on the
        row alone and the probe (see ValueRequest). Call it within `forward`."""
        decoder = self.language_model.get_decoder()  # type: ignore[operator]
        hidden = [decoder(input_ids=tokens_T[None], use_cache=False).last_hidden_state[0, :-1] for tokens_T in rows]
        return tuple(each_TD @ _probe(each_TD) for each_TD in hidden)

    def _columns(self, decoded: _Decoded, micro_batch: MicroBatch, request: ForwardRequest) -> Outputs:
        """See `columns`. With sequence parallelism, the columns are gathered from all sequence ranks."""
        piece, ranks = micro_batch.piece, micro_batch.rows.sequence_ranks
        hidden_ND = decoded.hidden_MD[decoded.predictors_N]
        if isinstance(request, ValueRequest):
            columns: Outputs = (self._values(hidden_ND, by_probe=request.by_probe),)
        else:
            targets_N = micro_batch.targets_N if piece is None else micro_batch.targets_N[piece.responses]
            columns = self._distribution(hidden_ND, targets_N, request)
        if piece is None or ranks is None:
            return columns
        gathered = iter(ranks.gathered([each for each in columns if each is not None], piece.counts))
        return tuple(None if each is None else next(gathered) for each in columns)

    def _distribution(self, hidden_ND: Tensor, targets_N: Tensor, request: LogprobRequest) -> Outputs:
        head, form = output_head_of(self.language_model)

        def distribution(inputs_ND: Tensor, module: nn.Linear) -> Outputs:
            found = token_distribution(
                inputs_ND,
                targets_N,
                OutputHead(module.weight, module.bias, form.multiplier, form.soft_cap, self.has_float32_head),
                temperature=request.temperature,
                entropy=request.entropy,
                with_squares=request.with_squares,
            )
            return found.logprobs_N, found.entropy_N, found.squares_N

        return computed_in_head(head, hidden_ND, distribution)

    def _values(self, hidden_ND: Tensor, *, by_probe: bool) -> Tensor:
        # In float32, because the value is a sum over hidden units without any later normalization.
        hidden_ND = hidden_ND.float()
        if by_probe:
            return hidden_ND @ _probe(hidden_ND)
        head = self.language_model.get_submodule(VALUE_HEAD)
        assert isinstance(head, nn.Linear)
        values_N = hidden_ND @ head.weight[0].float()
        return values_N if head.bias is None else values_N + head.bias.float()

    def _decoded(self, micro_batch: MicroBatch, *, with_logits: bool = False) -> _Decoded:
        """Runs the decoder on the tokens; with sequence parallelism, on this rank's piece."""
        decoder = self.language_model.get_decoder()  # type: ignore[operator]
        rows, piece = micro_batch.rows, micro_batch.piece
        options = {"use_cache": False, "output_router_logits": True} if with_logits else {"use_cache": False}
        if self.attention.is_flat:
            tokens = slice(None) if piece is None else piece.tokens
            output = decoder(
                input_ids=micro_batch.tokens_M[None, tokens],
                position_ids=rows.position_ids_1M[:, tokens],
                flat_rows=rows,
                **options,
            )
            predictors_N = micro_batch.predictors_N
            if piece is not None:
                predictors_N = predictors_N[piece.responses] - piece.tokens.start
            non_filler_tokens: slice | Tensor = micro_batch.non_filler_tokens
        else:
            # Rows are padded on the right. With causal attention no token sees this padding, so no mask is passed.
            tokens_BT = micro_batch.tokens_M[rows.padding_BT].view(len(rows.lengths), rows.longest)
            output = decoder(input_ids=tokens_BT, **options)
            predictors_N = rows.unpadding_M[micro_batch.predictors_N]
            non_filler_tokens = rows.unpadding_M[micro_batch.non_filler_tokens]
        logits = tuple(output.get("router_logits") or ()) if with_logits else ()
        return _Decoded(output.last_hidden_state.flatten(0, 1), predictors_N, non_filler_tokens, logits)

    def _use(self, decoded: _Decoded) -> RouterUse | None:
        if self.router is None or not decoded.router_logits:
            return None
        logits = [each.flatten(0, -2) for each in decoded.router_logits]
        return router_use(logits, decoded.non_filler_tokens, self.router.num_chosen)


def _probe(hidden_ND: Tensor) -> Tensor:
    """[D]: a fixed vector of norm 1."""
    probe_D = torch.linspace(-1.0, 1.0, hidden_ND.shape[1], device=hidden_ND.device)
    unit_D: Tensor = probe_D / probe_D.norm()
    return unit_D
