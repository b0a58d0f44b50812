"""The module that FSDP2 wraps: a causal language model that is asked about the tokens of flat rows.

Legend: B rows, T tokens of the longest, N tokens that are read, R response tokens, D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, nn
from transformers.utils import ModelOutput

from rljob_trainer.engines.train.attention import AttentionPlan
from rljob_trainer.engines.train.output_head import output_head_of
from rljob_trainer.engines.train.router import RouterPlan, RouterUse, router_use
from rljob_trainer.engines.train.sequence_parallel import SequenceRanks
from rljob_trainer.engines.train.token_batch import MicroBatch
from rljob_trainer.engines.train.token_logprobs import Entropy, OutputHead, TokenDistribution, token_distribution

Outputs = tuple[Tensor | None, ...]
Pass = Callable[["TokenModel"], Outputs]


class TokenModel(nn.Module):
    """The root of the sharded modules. Whatever needs whole parameters runs within its forward."""

    def __init__(self, language_model: nn.Module, attention: AttentionPlan, router: RouterPlan | None) -> None:
        super().__init__()
        self.language_model = language_model
        self.attention = attention
        self.router = router

    def forward(self, run: Pass) -> Outputs:
        """What `run` gives for this module. FSDP2 finds tensors that carry a gradient in a plain tuple."""
        return run(self)

    def distribution(
        self, micro_batch: MicroBatch, temperature: float, entropy: Entropy, *, with_squares: bool
    ) -> tuple[TokenDistribution, RouterUse | None]:
        """Of the response tokens, [R] each, and how this rank's tokens were dealt out to experts. To be called within
        `forward`."""
        head, form = output_head_of(self.language_model)
        piece = micro_batch.piece
        hidden_RD, use = self._hidden_RD(micro_batch)
        found = token_distribution(
            hidden_RD,
            micro_batch.targets_R if piece is None else micro_batch.targets_R[piece.responses],
            OutputHead(head.weight, head.bias, form.multiplier, form.soft_cap),
            temperature=temperature,
            entropy=entropy,
            with_squares=with_squares,
        )
        ranks = micro_batch.rows.sequence_ranks
        whole = found if piece is None or ranks is None else _of_all_pieces(found, ranks, piece.counts)
        return whole, use

    def own_logprobs(self, rows: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """[T - 1] for each row of tokens [T]: log-probability of every token but the first, by the module's own forward
        on the row alone. To be called within `forward`."""
        found = []
        for tokens_T in rows:
            logits_TV = self.language_model(input_ids=tokens_T[None], use_cache=False).logits[0, :-1].float()
            found.append(logits_TV.log_softmax(dim=-1).gather(1, tokens_T[1:, None])[:, 0].clone())
        return tuple(found)

    def _hidden_RD(self, micro_batch: MicroBatch) -> tuple[Tensor, RouterUse | None]:
        """Hidden states of the tokens before the response tokens; of those in this rank's piece, where there is one."""
        decoder = self.language_model.get_decoder()  # type: ignore[operator]
        rows, piece = micro_batch.rows, micro_batch.piece
        asked = {"use_cache": False} if self.router is None else {"use_cache": False, "output_router_logits": True}
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
            return output.last_hidden_state[0][predictors_R], self._use(output, micro_batch.own_tokens)
        # Rows are filled up on the right, where under the causal mask no token looks: no mask is passed.
        tokens_BT = micro_batch.tokens_N[rows.padding_BT].view(len(rows.lengths), rows.longest)
        output = decoder(input_ids=tokens_BT, **asked)
        hidden_ND = output.last_hidden_state.flatten(0, 1)[rows.unpadding_N]
        use = self._use(output, rows.unpadding_N[micro_batch.own_tokens])
        return hidden_ND[micro_batch.predictors_R], use

    def _use(self, output: ModelOutput, tokens: slice | Tensor) -> RouterUse | None:
        logits = None if self.router is None else output.get("router_logits")
        if self.router is None or not logits:
            return None
        return router_use([each.flatten(0, -2) for each in logits], tokens, self.router)


def _of_all_pieces(found: TokenDistribution, ranks: SequenceRanks, counts: Sequence[int]) -> TokenDistribution:
    columns = (found.logprobs_N, found.entropy_N, found.squares_N)
    gathered = iter(ranks.gathered([each for each in columns if each is not None], counts))
    logprobs_R, entropy_R, squares_R = (None if each is None else next(gathered) for each in columns)
    assert logprobs_R is not None
    return TokenDistribution(logprobs_R, entropy_R, squares_R)
