"""The module that FSDP2 wraps: a causal language model that is asked about the tokens of flat rows.

Legend: B rows, T tokens of the longest, N tokens that are read, R response tokens, D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, nn

from rljob_trainer.engines.train.attention import AttentionPlan
from rljob_trainer.engines.train.output_head import output_head_of
from rljob_trainer.engines.train.sequence_parallel import SequenceRanks
from rljob_trainer.engines.train.token_batch import MicroBatch
from rljob_trainer.engines.train.token_logprobs import Entropy, OutputHead, TokenDistribution, token_distribution

Outputs = tuple[Tensor | None, ...]
Pass = Callable[["TokenModel"], Outputs]


class TokenModel(nn.Module):
    """The root of the sharded modules. Whatever needs whole parameters runs within its forward."""

    def __init__(self, language_model: nn.Module, attention: AttentionPlan) -> None:
        super().__init__()
        self.language_model = language_model
        self.attention = attention

    def forward(self, run: Pass) -> Outputs:
        """What `run` gives for this module. FSDP2 finds tensors that carry a gradient in a plain tuple."""
        return run(self)

    def distribution(
        self, micro_batch: MicroBatch, temperature: float, entropy: Entropy, *, with_squares: bool
    ) -> TokenDistribution:
        """Of the response tokens, [R] each. To be called within `forward`."""
        head, form = output_head_of(self.language_model)
        piece = micro_batch.piece
        found = token_distribution(
            self._hidden_RD(micro_batch),
            micro_batch.targets_R if piece is None else micro_batch.targets_R[piece.responses],
            OutputHead(head.weight, head.bias, form.multiplier, form.soft_cap),
            temperature=temperature,
            entropy=entropy,
            with_squares=with_squares,
        )
        ranks = micro_batch.rows.sequence_ranks
        return found if piece is None or ranks is None else _of_all_pieces(found, ranks, piece.counts)

    def own_logprobs(self, rows: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """[T - 1] for each row of tokens [T]: log-probability of every token but the first, by the module's own forward
        on the row alone. To be called within `forward`."""
        found = []
        for tokens_T in rows:
            logits_TV = self.language_model(input_ids=tokens_T[None], use_cache=False).logits[0, :-1].float()
            found.append(logits_TV.log_softmax(dim=-1).gather(1, tokens_T[1:, None])[:, 0].clone())
        return tuple(found)

    def _hidden_RD(self, micro_batch: MicroBatch) -> Tensor:
        """Hidden states of the tokens before the response tokens; of those in this rank's piece, where there is one."""
        decoder = self.language_model.get_decoder()  # type: ignore[operator]
        rows, piece = micro_batch.rows, micro_batch.piece
        if self.attention.is_flat:
            tokens = slice(None) if piece is None else piece.tokens
            hidden_ND = decoder(
                input_ids=micro_batch.tokens_N[None, tokens],
                position_ids=rows.position_ids_1N[:, tokens],
                use_cache=False,
                flat_rows=rows,
            ).last_hidden_state[0]
            predictors_R = micro_batch.predictors_R
            if piece is not None:
                predictors_R = predictors_R[piece.responses] - piece.tokens.start
            return hidden_ND[predictors_R]  # type: ignore[no-any-return]
        # Rows are filled up on the right, where under the causal mask no token looks: no mask is passed.
        tokens_BT = micro_batch.tokens_N[rows.padding_BT].view(len(rows.lengths), rows.longest)
        hidden_BTD = decoder(input_ids=tokens_BT, use_cache=False).last_hidden_state
        return hidden_BTD.flatten(0, 1)[rows.unpadding_N[micro_batch.predictors_R]]  # type: ignore[no-any-return]


def _of_all_pieces(found: TokenDistribution, ranks: SequenceRanks, counts: Sequence[int]) -> TokenDistribution:
    columns = (found.logprobs_N, found.entropy_N, found.squares_N)
    gathered = iter(ranks.gathered([each for each in columns if each is not None], counts))
    logprobs_R, entropy_R, squares_R = (None if each is None else next(gathered) for each in columns)
    assert logprobs_R is not None
    return TokenDistribution(logprobs_R, entropy_R, squares_R)
