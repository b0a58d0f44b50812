"""The reward model: a frozen model that says what a response is worth.

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
"""What `compute_scores` reads: of a model with the policy's tokens, and of another one."""


@dataclass(frozen=True)
class RewardModelSettings:
    """What a reward model's worker is built from."""

    engine: TrainEngineSettings
    reward: str
    """Its name among the job's rewards."""
    field: str
    """Its block in the job, for messages: such as `spec.training.rewards[0].rewardModel.`"""
    reads_tokens: bool
    """It has the policy's tokens and is given those that were generated; else texts, which become tokens anew."""
    max_tokens: int | None
    """Positions that the model knows."""


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
        """What this role has on the device now."""
        return {Owner.REWARD_MODEL: self.engine.memory.parameters, Owner.OTHER: self.engine.memory.gathered}

    def mesh_position(self, mesh: str) -> MeshPosition:
        """By the layout of the engine."""
        del mesh
        return self.engine.layout.position(self.context.rank)

    @register(Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def compute_scores(self, batch: DataProto) -> DataProto:
        """The reward's `score_column`, [B] float64, for a batch with TOKEN_COLUMNS or TEXT_COLUMNS: what the head gives
        at the last token, as transformers' sequence classifiers do.

        Raises RewardError, on all ranks, for a text of any rank that is longer than the model can read, that has none
        of its tokens, or that its chat template does not take."""
        rows, failures = list[Tensor](), list[str]()
        try:
            rows = self._token_rows(batch)
            self._check_lengths(rows)
        except RewardError as error:
            failures.append(str(error))
        # A rank that went on alone would meet the others in the collectives of another call.
        if everywhere := self.engine.names_over_ranks(failures):
            raise RewardError(everywhere[0])
        scores_B = self.engine.values(last_token_batch(rows, self.pad_token_id))
        MEMORY.mark(Boundary.REWARD_MODEL)
        return DataProto({score_column(self.settings.reward): scores_B.double()})

    def _token_rows(self, batch: DataProto) -> list[Tensor]:
        if self.tokenizer is None:
            return list(batch.ragged_column(TOKENS).row_tensors())
        prompts, chats, beginnings, written = (
            batch.object_column(name)
            for name in (PROMPT_TEXTS, PROMPT_MESSAGES, PLAIN_TURN_BEGINNINGS, PLAIN_RESPONSE_TEXTS)
        )
        # The policy's template has begun the turn (`<think>\n`), and the policy has written the rest.
        responses = [f"{beginning}{text}" for beginning, text in zip(beginnings, written, strict=True)]
        token_ids = conversations(self.tokenizer, prompts, chats, responses, batch[IS_TRUNCATED].tolist())
        return [torch.tensor(row, dtype=torch.int64) for row in token_ids]

    def _check_lengths(self, rows: Sequence[Tensor]) -> None:
        if not all(map(len, rows)):
            raise RewardError(
                f"{self.settings.field}source: a prompt and its response have none of this model's tokens, and there "
                "is nothing to score; take such prompts out, or choose another model"
            )
        longest = max(map(len, rows), default=0)
        if self.settings.max_tokens is not None and longest > self.settings.max_tokens:
            raise RewardError(
                f"{self.settings.field}source: prompt and response have {longest} of this model's tokens, and it reads "
                f"at most {self.settings.max_tokens} (max_position_embeddings); lower dataset.maxPromptTokens or "
                "rollout.maxNewTokens, or choose another model"
            )


def conversations(
    tokenizer: Tokenizer,
    prompts: Sequence[object],
    chats: Sequence[object],
    responses: Sequence[object],
    is_truncated: Sequence[bool],
) -> list[list[int]]:
    """Token ids of prompts with their responses. A prompt that is a chat (a list of messages) goes through the
    tokenizer's chat template with the response as the assistant's turn; where there is no template, its messages and
    the response are lines. Of a prompt that is none (None) the text is continued. What no template has made ends with
    the tokenizer's end token, once, unless the response was cut off.

    Raises RewardError for a chat that the template does not take."""
    found: list[list[int]] = [[]] * len(prompts)
    for is_chat in (False, True):
        places = [place for place, chat in enumerate(chats) if (chat is not None) is is_chat]
        texts = [_text(tokenizer, prompts[place], chats[place], str(responses[place])) for place in places]
        # A rendered chat has the special tokens in its text.
        has_special_tokens = is_chat and tokenizer.has_chat_template
        encoded = tokenizer.encode_all(texts, add_special_tokens=not has_special_tokens)
        end = [] if has_special_tokens or tokenizer.end_token_id is None else [tokenizer.end_token_id]
        # Some tokenizers end every text with it, also one that was cut off.
        num_own = len(end) if end and tokenizer.encode("text")[-1:] == end else 0
        for place, token_ids in zip(places, encoded, strict=True):
            own_ids = token_ids[: len(token_ids) - num_own]
            found[place] = own_ids if is_truncated[place] else [*own_ids, *end]
    return found


def _text(tokenizer: Tokenizer, prompt: object, chat: object, response: str) -> str:
    if chat is None:
        return f"{prompt}{response}"
    assert isinstance(chat, list | tuple)
    if not tokenizer.has_chat_template:
        return "\n".join([*(message["content"] for message in chat), response])
    answer: ChatMessage = {"role": "assistant", "content": response}
    try:
        return tokenizer.render_conversation([*chat, answer])
    except ChatTemplateError as error:
        roles = ", ".join(message["role"] for message in chat)
        raise RewardError(
            f"the reward model's chat template does not take a chat of {roles}, and the response as the assistant's "
            f"turn ({error}); change the prompts, or choose another model"
        ) from error


def last_token_batch(rows: Sequence[Tensor], pad_token_id: int | None) -> TokenBatch:
    """Rows of which the engine is asked what it says of the last token: it is asked about the token before a response
    token, so that each row gets one more, which no model reads. The last token is the last that is no padding, as in
    transformers, also where the end token is that for padding."""
    extended = [torch.cat([row[: _num_read(row, pad_token_id)], row.new_zeros(1)]) for row in rows]
    lengths_B = torch.tensor([len(row) for row in extended], dtype=torch.int64)
    tokens_L = torch.cat(extended) if extended else torch.zeros(0, dtype=torch.int64)
    mask_L = torch.zeros(len(tokens_L), dtype=torch.bool)
    mask_L[lengths_B.cumsum(0) - 1] = True
    return TokenBatch(RaggedColumn(tokens_L, lengths_B), RaggedColumn(mask_L, lengths_B), {})


def _num_read(row: Tensor, pad_token_id: int | None) -> int:
    places = torch.arange(len(row)) if pad_token_id is None else (row != pad_token_id).nonzero()[:, 0]
    return int(places[-1]) + 1 if len(places) else 1
