"""The reward model: its scores equal those of transformers' own classifiers, however they are computed.

Legend: B rows.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer as Backend
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from tokenizers.processors import TemplateProcessing
from transformers import (
    Gemma2Config,
    Gemma2ForSequenceClassification,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForSequenceClassification,
)

from rljob_testing.models import tiny_models
from rljob_testing.training import gloo_ranks
from rljob_trainer.batch.proto import DataProto
from rljob_trainer.batch.ragged import RaggedColumn
from rljob_trainer.dispatch.worker import WorkerContext
from rljob_trainer.engines.train.layout import ParallelLayout
from rljob_trainer.engines.train.output_head import VALUE_WEIGHT, Head
from rljob_trainer.engines.train.settings import TrainEngineSettings
from rljob_trainer.errors import ConfigurationError, RewardError
from rljob_trainer.models.tokenizer import Tokenizer
from rljob_trainer.workers.columns import (
    IS_TRUNCATED,
    PLAIN_RESPONSE_TEXTS,
    PLAIN_TURN_BEGINNINGS,
    PROMPT_MESSAGES,
    PROMPT_TEXTS,
    TOKENS,
    score_column,
)
from rljob_trainer.workers.reward_model import RewardModelSettings, RewardModelWorker, conversations

SIZES = {**tiny_models.CLASSIFIER_SIZES, "max_position_embeddings": 32}
NAME = "preference"
LENGTHS = (9, 1, 23, 2, 14)
TURNS = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}"
TEMPLATE = TURNS + "{% if add_generation_prompt %}a:{% endif %}"
CHARACTERS = "abcdefgu:;\n?!"


def random_model(kind: str, num_labels: int = 1) -> PreTrainedModel:
    torch.manual_seed(0)
    if kind == "gemma2":
        config = Gemma2Config(**SIZES, sliding_window=4, attn_logit_softcapping=5.0, query_pre_attn_scalar=8)
        config.num_labels = num_labels
        return Gemma2ForSequenceClassification(config)
    return Qwen3ForSequenceClassification(Qwen3Config(**SIZES, num_labels=num_labels, tie_word_embeddings=True))


def rows() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(2, 64, (length,), generator=generator) for length in LENGTHS]


def batch_of(token_rows: list[torch.Tensor]) -> DataProto:
    return DataProto(ragged={TOKENS: RaggedColumn.from_rows(token_rows)})


def settings_of(folder: Path, *, reads_tokens: bool = True, max_tokens: int | None = 32) -> RewardModelSettings:
    engine = TrainEngineSettings(folder, torch.device("cpu"), torch.float32, False, 64, None, head=Head.SCORE)
    return RewardModelSettings(engine, NAME, "spec.training.rewards[0].rewardModel.", reads_tokens, max_tokens)


def scores_of(worker: RewardModelWorker, batch: DataProto) -> torch.Tensor:
    """Does what the worker's process does for a call."""
    return RewardModelWorker.compute_scores(worker, batch)[score_column(NAME)]


def expected(folder: Path, token_rows: list[torch.Tensor]) -> torch.Tensor:
    """[B]: scores of transformers' own class, one row at a time."""
    reference = type(random_model("gemma2" if "gemma2" in folder.name else "qwen3")).from_pretrained(
        folder, attn_implementation="eager"
    )
    with torch.no_grad():
        return torch.stack([reference.eval()(input_ids=row[None]).logits[0, 0] for row in token_rows]).double()


def failure_of(folder: Path, context: WorkerContext) -> str:
    """The error of a rank while the other rank has a row that is too long; both ranks are in step for the next call."""
    worker = RewardModelWorker(context, settings_of(folder, max_tokens=22))
    mine = rows()
    with pytest.raises(RewardError) as raised:
        scores_of(worker, batch_of(mine[:2] if context.rank == 0 else mine[2:]))
    assert len(scores_of(worker, batch_of(mine[:2]))) == 2
    return str(raised.value)


@dataclass(frozen=True)
class Layout:
    """The layout of the ranks, and the limit of a micro-batch."""

    num_ranks: int
    shard_size: int | None = None
    sequence_parallel: int = 1
    max_tokens: int = 64


LAYOUTS = {
    "one": Layout(1),
    "small micro-batches": Layout(1, max_tokens=23),
    "two ranks": Layout(2),
    "two that share rows": Layout(2, sequence_parallel=2),
    "two copies": Layout(2, shard_size=1),
}


def laid_out(folder: Path, layout: Layout, context: WorkerContext) -> torch.Tensor:
    settings = settings_of(folder)
    parallel = ParallelLayout.of(layout.num_ranks, layout.shard_size, layout.sequence_parallel)
    engine = replace(settings.engine, layout=parallel, max_tokens_per_micro_batch=layout.max_tokens)
    worker = RewardModelWorker(context, replace(settings, engine=engine))
    # The first data rank has more rows than the second.
    mine = rows()
    if parallel.num_data_ranks == 2:
        mine = mine[:3] if context.rank == 0 else mine[3:]
    return scores_of(worker, batch_of(mine))


@pytest.fixture(scope="module")
def laid_out_scores(tmp_path_factory: pytest.TempPathFactory) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    folder = tmp_path_factory.mktemp("qwen3")
    random_model("qwen3").save_pretrained(folder)
    runs = [gloo_ranks.RankedRun(partial(laid_out, folder, layout), layout.num_ranks) for layout in LAYOUTS.values()]
    found = {}
    for (name, layout), ranks in zip(LAYOUTS.items(), gloo_ranks.run_on_ranks(runs), strict=True):
        parts = [each for each in ranks if isinstance(each, torch.Tensor)]
        assert len(parts) == layout.num_ranks
        if layout.sequence_parallel == 2:
            assert torch.equal(*parts)
            parts = parts[:1]
        found[name] = torch.cat(parts)
    return expected(folder, rows()), found


@pytest.mark.parametrize("name", list(LAYOUTS))
def test_scores_equal_those_of_a_sequence_classifier(
    laid_out_scores: tuple[torch.Tensor, dict[str, torch.Tensor]], name: str
) -> None:
    right_B, found = laid_out_scores
    torch.testing.assert_close(found[name], right_B, rtol=1e-5, atol=1e-6)
    assert right_B.std() > 0.01


def test_windows_and_soft_caps_equal_those_of_the_model(tmp_path: Path) -> None:
    folder = tmp_path / "gemma2"
    random_model("gemma2").save_pretrained(folder)
    (tmp_path / "group").mkdir()
    with gloo_ranks.process_group_of_one(tmp_path / "group") as context:
        scores_B = scores_of(RewardModelWorker(context, settings_of(folder)), batch_of(rows()))
    torch.testing.assert_close(scores_B, expected(folder, rows()), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("num_labels", "message"),
    [(None, f"rewardModel.source: .* has no tensor '{VALUE_WEIGHT}'"), (2, f"'{VALUE_WEIGHT}' in .* has shape")],
)
def test_a_model_without_a_head_for_one_score_is_rejected(tmp_path: Path, num_labels: int | None, message: str) -> None:
    folder = tmp_path / "qwen3"
    random_model("qwen3", num_labels or 1).save_pretrained(folder)
    if num_labels is None:
        file = folder / "model.safetensors"
        save_file({name: each for name, each in load_file(file).items() if name != VALUE_WEIGHT}, file)
    (tmp_path / "group").mkdir()
    with gloo_ranks.process_group_of_one(tmp_path / "group") as context, pytest.raises(ConfigurationError) as raised:
        RewardModelWorker(context, settings_of(folder))
    assert raised.match(message.replace("rewardModel.source", "spec.training.model.source"))


def test_a_row_beyond_the_models_positions_is_rejected_on_all_ranks(tmp_path: Path) -> None:
    folder = tmp_path / "qwen3"
    random_model("qwen3").save_pretrained(folder)
    [messages] = gloo_ranks.run_on_ranks([gloo_ranks.RankedRun(partial(failure_of, folder), 2)])
    assert len(messages) == 2
    for message in messages:
        assert re.search(r"rewardModel\.source: prompt and response have 23 tokens.* maximum of 22", str(message))


def test_a_row_longer_than_a_micro_batch_is_computed_alone(tmp_path: Path) -> None:
    """The job was checked with the policy's tokens, and this model may need more."""
    folder = tmp_path / "qwen3"
    random_model("qwen3").save_pretrained(folder)
    (tmp_path / "group").mkdir()
    settings = settings_of(folder)
    settings = replace(settings, engine=replace(settings.engine, max_tokens_per_micro_batch=10))
    with gloo_ranks.process_group_of_one(tmp_path / "group") as context:
        scores_B = scores_of(RewardModelWorker(context, settings), batch_of(rows()))
    torch.testing.assert_close(scores_B, expected(folder, rows()), rtol=1e-5, atol=1e-6)


def test_an_end_token_that_is_the_padding_is_not_the_last_token(tmp_path: Path) -> None:
    """As transformers handles it: the score is that of the token before."""
    folder = tmp_path / "qwen3"
    model = random_model("qwen3")
    model.config.pad_token_id = 1
    model.save_pretrained(folder)
    ended = [torch.cat([row, torch.tensor([1])]) for row in rows()]
    (tmp_path / "group").mkdir()
    with gloo_ranks.process_group_of_one(tmp_path / "group") as context:
        scores_B = scores_of(RewardModelWorker(context, settings_of(folder)), batch_of(ended))
    torch.testing.assert_close(scores_B, expected(folder, ended), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(scores_B, expected(folder, rows()), rtol=1e-5, atol=1e-6)


def save_tokenizer(folder: Path, *, template: str | None = TEMPLATE, ends_texts: bool = False) -> Tokenizer:
    """One token for each character, and none in front; with `ends_texts` the tokenizer appends its end token."""
    backend = Backend(WordLevel({"<pad>": 0, "<end>": 1} | {each: 2 + i for i, each in enumerate(CHARACTERS)}, "?"))
    backend.pre_tokenizer = Split("", "isolated")
    if ends_texts:
        backend.post_processor = TemplateProcessing(single="$A <end>", special_tokens=[("<end>", 1)])
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<end>")
    fast.chat_template = template
    fast.save_pretrained(folder)
    return Tokenizer(folder)


PROMPTS = ("policy:ab", "cd")
CHATS = ([{"role": "user", "content": "ab"}], None)
ANSWERS = ("e", "fg")


def ids(text: str) -> list[int]:
    return [2 + CHARACTERS.index(each) for each in text]


def test_a_chat_uses_the_reward_models_own_template(tmp_path: Path) -> None:
    found = conversations(save_tokenizer(tmp_path), PROMPTS, CHATS, ANSWERS, (False, False))
    assert found == [ids("u:ab;a:e;"), [*ids("cdfg"), 1]]


def test_without_a_template_a_chat_is_lines(tmp_path: Path) -> None:
    found = conversations(save_tokenizer(tmp_path, template=None), PROMPTS, CHATS, ANSWERS, (False, True))
    assert found == [[*ids("ab\ne"), 1], ids("cdfg")]


def test_a_tokenizer_that_appends_an_end_token_does_so_once_and_only_to_complete_responses(tmp_path: Path) -> None:
    tokenizer = save_tokenizer(tmp_path, template=None, ends_texts=True)
    found = conversations(tokenizer, PROMPTS, CHATS, ANSWERS, (False, True))
    assert found == [[*ids("ab\ne"), 1], ids("cdfg")]
    chatting = save_tokenizer(tmp_path / "chatting", ends_texts=True)
    assert conversations(chatting, PROMPTS, CHATS, ANSWERS, (False, False)) == [ids("u:ab;a:e;"), [*ids("cdfg"), 1]]


def test_a_text_without_a_token_is_rejected(tmp_path: Path) -> None:
    """Otherwise its score would be that of the row before, or none."""
    folder = tmp_path / "qwen3"
    random_model("qwen3").save_pretrained(folder)
    save_tokenizer(folder)
    batch = DataProto(
        {IS_TRUNCATED: torch.tensor([False, True])},
        objects={
            PROMPT_TEXTS: ("a", ""),
            PROMPT_MESSAGES: (None, None),
            PLAIN_TURN_BEGINNINGS: ("", ""),
            PLAIN_RESPONSE_TEXTS: ("b", ""),
        },
    )
    (tmp_path / "group").mkdir()
    with gloo_ranks.process_group_of_one(tmp_path / "group") as context:
        worker = RewardModelWorker(context, settings_of(folder, reads_tokens=False))
        with pytest.raises(RewardError, match=r"rewardModel\.source: .* nothing to score"):
            scores_of(worker, batch)


def test_a_chat_that_the_template_rejects_is_named(tmp_path: Path) -> None:
    tokenizer = save_tokenizer(tmp_path, template="{{ raise_exception('only two turns') }}")
    with pytest.raises(RewardError, match=r"chat template rejects .* user, .*only two turns"):
        conversations(tokenizer, PROMPTS, CHATS, ANSWERS, (False, False))


def test_scores_of_texts_equal_scores_of_their_tokens(tmp_path: Path) -> None:
    folder = tmp_path / "qwen3"
    random_model("qwen3").save_pretrained(folder)
    save_tokenizer(folder)
    batch = DataProto(
        {IS_TRUNCATED: torch.tensor([False, True])},
        objects={
            PROMPT_TEXTS: PROMPTS,
            PROMPT_MESSAGES: CHATS,
            # The start of the turn that the policy's template has written.
            PLAIN_TURN_BEGINNINGS: ("g\n", ""),
            PLAIN_RESPONSE_TEXTS: ANSWERS,
        },
    )
    (tmp_path / "group").mkdir()
    with gloo_ranks.process_group_of_one(tmp_path / "group") as context:
        scores_B = scores_of(RewardModelWorker(context, settings_of(folder, reads_tokens=False)), batch)
    right_B = expected(folder, [torch.tensor(ids("u:ab;a:g\ne;")), torch.tensor(ids("cdfg"))])
    torch.testing.assert_close(scores_B, right_B, rtol=1e-5, atol=1e-6)
