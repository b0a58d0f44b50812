"""The module that FSDP2 wraps: a causal language model that is asked about the tokens of flat rows.

Legend: B rows, T tokens of the longest, N tokens that are read, R response tokens, D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from rljob_trainer.engines.train.attention import AttentionPlan
from rljob_trainer.engines.train.output_head import output_head_of
from rljob_trainer.engines.train.router import AuxiliaryLoss, ExpertLoad, RouterUse, router_use
from rljob_trainer.engines.train.sequence_parallel import SequenceRanks
from rljob_trainer.engines.train.token_batch import MicroBatch
from rljob_trainer.engines.train.token_logprobs import Entropy, OutputHead, TokenDistribution, token_distribution

Outputs = tuple[Tensor | None, ...]
Pass = Callable[["TokenModel"], Outputs]


@dataclass(frozen=True)
class _Decoded:
    """Of the tokens that this rank's layers have read, filled up ones included."""

    hidden_ND: Tensor
    predictors_R: Tensor
    """Where in `hidden_ND` the token before each response token stands."""
    own_tokens: slice | Tensor
    """Where tokens of rows stand."""
    router_logits: tuple[Tensor, ...]
    """Of each layer with experts, where they were asked for."""


class TokenModel(nn.Module):
    """The root of the sharded modules. Whatever needs whole parameters runs within its forward."""

    def __init__(self, language_model: nn.Module, attention: AttentionPlan, router: AuxiliaryLoss | None) -> None:
        super().__init__()
        self.language_model = language_model
        self.attention = attention
        self.router = router
        self.expert_load = ExpertLoad(language_model)

    def forward(self, run: Pass) -> Outputs:
        """What `run` gives for this module. FSDP2 finds tensors that carry a gradient in a plain tuple."""
        return run(self)

    def distribution(
        self, micro_batch: MicroBatch, temperature: float, entropy: Entropy, *, with_squares: bool
    ) -> TokenDistribution:
        """Of the response tokens, [R] each. To be called within `forward`."""
        return self._distribution(self._decoded(micro_batch), micro_batch, temperature, entropy, with_squares)

    def routed_distribution(
        self, micro_batch: MicroBatch, temperature: float, entropy: Entropy, *, with_squares: bool
    ) -> tuple[TokenDistribution, Tensor | None, RouterUse | None]:
        """The same; how many of this rank's tokens each expert was given, [L, E], where there are experts; and for the
        auxiliary loss, where one is wanted, its routers' use."""
        with self.expert_load.noted() as chosen:
            decoded = self._decoded(micro_batch, with_logits=self.router is not None)
        counts_LE = self.expert_load.counts(chosen, decoded.own_tokens)
        found = self._distribution(decoded, micro_batch, temperature, entropy, with_squares)
        return found, counts_LE, self._use(decoded)

    def router_use(self, micro_batch: MicroBatch) -> RouterUse | None:
        """Of this rank's tokens, without log-probabilities. To be called within `forward`."""
        return self._use(self._decoded(micro_batch, with_logits=True))

    def own_logprobs(self, rows: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """[T - 1] for each row of tokens [T]: log-probability of every token but the first, by the module's own forward
        on the row alone. To be called within `forward`."""
        found = []
        for tokens_T in rows:
            logits_TV = self.language_model(input_ids=tokens_T[None], use_cache=False).logits[0, :-1].float()
            found.append(logits_TV.log_softmax(dim=-1).gather(1, tokens_T[1:, None])[:, 0].clone())
        return tuple(found)

    def _distribution(
        self, decoded: _Decoded, micro_batch: MicroBatch, temperature: float, entropy: Entropy, with_squares: bool
    ) -> TokenDistribution:
        head, form = output_head_of(self.language_model)
        piece = micro_batch.piece
        found = token_distribution(
            decoded.hidden_ND[decoded.predictors_R],
            micro_batch.targets_R if piece is None else micro_batch.targets_R[piece.responses],
            OutputHead(head.weight, head.bias, form.multiplier, form.soft_cap),
            temperature=temperature,
            entropy=entropy,
            with_squares=with_squares,
        )
        ranks = micro_batch.rows.sequence_ranks
        return found if piece is None or ranks is None else _of_all_pieces(found, ranks, piece.counts)

    def _decoded(self, micro_batch: MicroBatch, *, with_logits: bool = False) -> _Decoded:
        """What the layers make of the tokens; of those in this rank's piece, where there is one."""
        decoder = self.language_model.get_decoder()  # type: ignore[operator]
        rows, piece = micro_batch.rows, micro_batch.piece
        asked = {"use_cache": False, "output_router_logits": True} if with_logits else {"use_cache": False}
        if self.attention.is_flat:
            tokens = slice(None) if piece is None else piece.tokens
            output = decoder(
                input_ids=micro_batch.tokens_N[None, tokens],
                position_ids=rows.position_ids_1N[:, tokens],
                flat_rows=rows,
                **asked,
            )
            predictors_R = micro_batch.predictors_R
            if piece is not None:
                predictors_R = predictors_R[piece.responses] - piece.tokens.start
            own_tokens: slice | Tensor = micro_batch.own_tokens
        else:
            # Rows are filled up on the right, where under the causal mask no token looks: no mask is passed.
            tokens_BT = micro_batch.tokens_N[rows.padding_BT].view(len(rows.lengths), rows.longest)
            output = decoder(input_ids=tokens_BT, **asked)
            predictors_R = rows.unpadding_N[micro_batch.predictors_R]
            own_tokens = rows.unpadding_N[micro_batch.own_tokens]
        logits = tuple(output.get("router_logits") or ()) if with_logits else ()
        return _Decoded(output.last_hidden_state.flatten(0, 1), predictors_R, own_tokens, logits)

    def _use(self, decoded: _Decoded) -> RouterUse | None:
        if self.router is None or not decoded.router_logits:
            return None
        logits = [each.flatten(0, -2) for each in decoded.router_logits]
        return router_use(logits, decoded.own_tokens, self.router.num_chosen)


def _of_all_pieces(found: TokenDistribution, ranks: SequenceRanks, counts: Sequence[int]) -> TokenDistribution:
    columns = (found.logprobs_N, found.entropy_N, found.squares_N)
    gathered = iter(ranks.gathered([each for each in columns if each is not None], counts))
    logprobs_R, entropy_R, squares_R = (None if each is None else next(gathered) for each in columns)
    assert logprobs_R is not None
    return TokenDistribution(logprobs_R, entropy_R, squares_R)
