"""The reward model: a frozen model that scores responses.

Legend: B responses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rljob_trainer.batch.proto import DataProto
from rljob_trainer.batch.ragged import RaggedColumn
from rljob_trainer.dispatch.mesh import MeshPosition
from rljob_trainer.dispatch.modes import Dispatch
from rljob_trainer.dispatch.register import register
from rljob_trainer.dispatch.worker import Worker, WorkerContext
from rljob_trainer.engines.train.engine import TrainEngine
from rljob_trainer.engines.train.settings import TrainEngineSettings
from rljob_trainer.engines.train.token_batch import TokenBatch
from rljob_trainer.errors import ChatTemplateError, RewardError
from rljob_trainer.models.tokenizer import ChatMessage, Tokenizer
from rljob_trainer.observability.memory import MEMORY, Boundary, Bytes, Owner
from rljob_trainer.workers.columns import (
    IS_TRUNCATED,
    PLAIN_RESPONSE_TEXTS,
    PLAIN_TURN_BEGINNINGS,
    PROMPT_MESSAGES,
    PROMPT_TEXTS,
    TOKENS,
    score_column,
)

TOKEN_COLUMNS = (TOKENS,)
TEXT_COLUMNS = (PROMPT_TEXTS, PROMPT_MESSAGES, PLAIN_TURN_BEGINNINGS, PLAIN_RESPONSE_TEXTS, IS_TRUNCATED)
"""The columns that `compute_scores` reads: TOKEN_COLUMNS for a model with the policy's tokenizer, TEXT_COLUMNS for a
model with another tokenizer."""


@dataclass(frozen=True)
class RewardModelSettings:
    """The settings of a reward model's worker."""

    engine: TrainEngineSettings
    reward: str
    """The reward's name in the job."""
    field: str
    """The prefix of the reward model's fields in the job, for messages: `spec.training.rewards[0].rewardModel.`"""
    reads_tokens: bool
    """True if the model has the policy's tokenizer and reads the generated tokens; False if it tokenizes the texts."""
    max_tokens: int | None
    """The model's maximum number of positions; None if it has no limit."""


class RewardModelWorker(Worker):
    """Scores whole responses."""

    def __init__(self, context: WorkerContext, settings: RewardModelSettings) -> None:
        """Collective."""
        super().__init__(context)
        self.settings = settings
        self.engine = TrainEngine(settings.engine)
        self.tokenizer = None if settings.reads_tokens else Tokenizer(settings.engine.model_folder)
        self.pad_token_id: int | None = self.engine.language_model.config.get_text_config().pad_token_id
        MEMORY.watch(self.memory)

    def memory(self) -> Bytes:
        """Bytes that this role has on the device now, by owner."""
        return {Owner.REWARD_MODEL: self.engine.memory.parameters, Owner.OTHER: self.engine.memory.gathered}

    def mesh_position(self, mesh: str) -> MeshPosition:
        """The position of this rank in the engine's layout."""
        del mesh
        return self.engine.layout.position(self.context.rank)

    @register(Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def compute_scores(self, batch: DataProto) -> DataProto:
        """Collective. Returns the reward's `score_column`, [B] float64: the output of the model's head at the last
        token, as in transformers' sequence classifiers. Needs TOKEN_COLUMNS if the model reads tokens, else
        TEXT_COLUMNS.

        Raises RewardError on all ranks if a text on any rank is longer than the model's maximum, has no tokens, or is
        rejected by the model's chat template."""
        rows, failures = list[Tensor](), list[str]()
        try:
            rows = self._token_rows(batch)
            self._check_lengths(rows)
        except RewardError as error:
            failures.append(str(error))
        # All ranks must fail together: a rank that continued alone would hang in its next collective.
        if everywhere := self.engine.names_over_ranks(failures):
            raise RewardError(everywhere[0])
        scores_B = self.engine.values(last_token_batch(rows, self.pad_token_id))
        MEMORY.mark(Boundary.REWARD_MODEL)
        return DataProto({score_column(self.settings.reward): scores_B.double()})

    def _token_rows(self, batch: DataProto) -> list[Tensor]:
        """The token ids that the model reads, one row per response."""
        if self.tokenizer is None:
            return list(batch.ragged_column(TOKENS).row_tensors())
        prompts, chats, beginnings, written = (
            batch.object_column(name)
            for name in (PROMPT_TEXTS, PROMPT_MESSAGES, PLAIN_TURN_BEGINNINGS, PLAIN_RESPONSE_TEXTS)
        )
        # The policy's chat template may have started the turn (`<think>\n`); the policy generated the rest.
        responses = [f"{beginning}{text}" for beginning, text in zip(beginnings, written, strict=True)]
        token_ids = conversations(self.tokenizer, prompts, chats, responses, batch[IS_TRUNCATED].tolist())
        return [torch.tensor(row, dtype=torch.int64) for row in token_ids]

    def _check_lengths(self, rows: Sequence[Tensor]) -> None:
        if not all(map(len, rows)):
            raise RewardError(
                f"{self.settings.field}source: a prompt and its response have no tokens with this model's tokenizer, "
                "so there is nothing to score; remove such prompts, or choose another model"
            )
        longest = max(map(len, rows), default=0)
        if self.settings.max_tokens is not None and longest > self.settings.max_tokens:
            raise RewardError(
                f"{self.settings.field}source: prompt and response have {longest} tokens with this model's tokenizer, "
                f"more than its maximum of {self.settings.max_tokens} (max_position_embeddings); reduce "
                "dataset.maxPromptTokens or rollout.maxNewTokens, or choose another model"
            )


def conversations(
    tokenizer: Tokenizer,
    prompts: Sequence[object],
    chats: Sequence[object],
    responses: Sequence[object],
    is_truncated: Sequence[bool],
) -> list[list[int]]:
    """The token ids of each prompt with its response.

    A chat (a list of messages) is rendered by the tokenizer's chat template, with the response as the assistant's turn;
    without a template, its messages and the response are joined by line breaks. For a prompt that is not a chat (None),
    the response is appended to the text. A text that no template rendered gets exactly one end token, unless the
    response was truncated or the tokenizer has no end token.

    Raises RewardError for a chat that the template rejects."""
    found: list[list[int]] = [[]] * len(prompts)
    for is_chat in (False, True):
        rows = [row for row, chat in enumerate(chats) if (chat is not None) is is_chat]
        texts = [_text(tokenizer, prompts[row], chats[row], str(responses[row])) for row in rows]
        # A rendered chat has the special tokens in its text.
        has_special_tokens = is_chat and tokenizer.has_chat_template
        encoded = tokenizer.encode_all(texts, add_special_tokens=not has_special_tokens)
        end = [] if has_special_tokens or tokenizer.end_token_id is None else [tokenizer.end_token_id]
        # Some tokenizers append the end token to every text, also to a truncated one.
        num_appended = len(end) if end and tokenizer.encode("text")[-1:] == end else 0
        for row, token_ids in zip(rows, encoded, strict=True):
            text_ids = token_ids[: len(token_ids) - num_appended]
            found[row] = text_ids if is_truncated[row] else [*text_ids, *end]
    return found


def _text(tokenizer: Tokenizer, prompt: object, chat: object, response: str) -> str:
    if chat is None:
        return f"{prompt}{response}"
    assert isinstance(chat, list | tuple)
    if not tokenizer.has_chat_template:
        return "\n".join([*(message["content"] for message in chat), response])
    turn: ChatMessage = {"role": "assistant", "content": response}
    try:
        return tokenizer.render_conversation([*chat, turn])
    except ChatTemplateError as error:
        roles = ", ".join(message["role"] for message in chat)
        raise RewardError(
            f"the reward model's chat template rejects a chat with the roles {roles}, followed by the response as the "
            f"assistant's turn ({error}); change the prompts, or choose another model"
        ) from error


def last_token_batch(rows: Sequence[Tensor], pad_token_id: int | None) -> TokenBatch:
    """Returns a batch for which the engine computes one value per row, at the row's last token.

    The engine computes values at the token before each response token. So each row gets one more token, which is
    marked as the only response token, and which the model does not read. The last token of a row is the last one that
    is not padding, as in transformers, even if the end token is also the padding token."""
    extended = [torch.cat([row[: _num_read(row, pad_token_id)], row.new_zeros(1)]) for row in rows]
    lengths_B = torch.tensor([len(row) for row in extended], dtype=torch.int64)
    tokens_L = torch.cat(extended) if extended else torch.zeros(0, dtype=torch.int64)
    mask_L = torch.zeros(len(tokens_L), dtype=torch.bool)
    mask_L[lengths_B.cumsum(0) - 1] = True
    return TokenBatch(RaggedColumn(tokens_L, lengths_B), RaggedColumn(mask_L, lengths_B), {})


def _num_read(row: Tensor, pad_token_id: int | None) -> int:
    positions = torch.arange(len(row)) if pad_token_id is None else (row != pad_token_id).nonzero()[:, 0]
    return int(positions[-1]) + 1 if len(positions) else 1
