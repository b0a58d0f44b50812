"""Which critics and reward models are rejected before Ray starts, and whether a reward model receives tokens or
text."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest
import torch

from rljob_api.v1alpha1.job import RLJob
from rljob_testing.models import tiny_models
from rljob_testing.training import training_runs
from rljob_testing.training.finished_rollouts import FinishedRollouts
from rljob_testing.training.joined_workers import FinishedCall
from rljob_trainer.batch.proto import DataProto
from rljob_trainer.controller.critic_and_reward_models import critic_model, found_reward_model
from rljob_trainer.controller.prompt_sets import Prompts
from rljob_trainer.controller.rollout_phase import RewardModelWorkers, RolloutPhase
from rljob_trainer.controller.sampler import Engines, Sampler
from rljob_trainer.controller.stop_request import StopRequest
from rljob_trainer.datasets.prompts import PromptRow
from rljob_trainer.engines.rollout.base import Outcome, SamplingSettings
from rljob_trainer.engines.train.layout import ParallelLayout
from rljob_trainer.errors import ConfigurationError
from rljob_trainer.observability.timing import PhaseTimer
from rljob_trainer.workers.columns import (
    NUM_TOKENS,
    PLAIN_TURN_BEGINNINGS,
    POLICY_VERSIONS,
    PROMPT_MESSAGES,
    PROMPT_TEXTS,
    RESPONSE_LENGTHS,
    RESPONSE_MASK,
    RESPONSE_TEXTS,
    ROLLOUT_LOGPROBS,
    SAMPLE_IDS,
    SCORES,
    TOKENS,
    outcome_columns,
    score_column,
)

CHAT = PromptRow(0, "1>", "1>", (3,), None, {}, ({"role": "user", "content": "1>"},))
PROMPTS = Prompts((CHAT,), {}, 0)
FIELD = r"spec\.training\.rewards\[0\]\.rewardModel\.source: "


def with_other_token(folder: Path) -> Path:
    """A tokenizer that has another text for one of the digits."""
    file = folder / "tokenizer.json"
    text = file.read_text()
    assert '"7"' in text
    file.write_text(text.replace('"7"', '"x"'))
    return folder


def reward_job(source: Path) -> RLJob:
    reward = {"type": "RewardModel", "rewardModel": {"source": str(source)}}
    return RLJob.from_wire(training_runs.small_job(rewards=[reward]))


def uses_tokens(
    source: Path, prompt: PromptRow = CHAT, longest: int = 8, policy: Path = tiny_models.QUICKSTART_MODEL
) -> bool:
    """Whether the reward model receives tokens."""
    spec = reward_job(source).spec
    rows = (prompt, PromptRow(1, "", "", (3,) * longest, None, {}))
    found = found_reward_model(spec, policy, rows, ParallelLayout.of(1), source.parent, source.parent)
    assert found is not None
    assert found.settings.reward == "score"
    return found.settings.reads_tokens


def test_a_model_with_the_policys_tokens_receives_tokens(tmp_path: Path) -> None:
    assert uses_tokens(tiny_models.save_scoring(tmp_path / "same"))
    assert not uses_tokens(with_other_token(tiny_models.save_scoring(tmp_path / "other")))


def test_a_template_that_continues_after_the_end_token_requires_text(tmp_path: Path) -> None:
    """The score would be read at another token than in training."""
    policy, template = tmp_path / "policy", "{% for m in messages %}{{ m.content }}<eos>{% endfor %}"
    for text, is_given_tokens in ((template, True), (template + "1", False)):
        source = tiny_models.save_scoring(tmp_path / f"model-{is_given_tokens}")
        shutil.copytree(source, policy, dirs_exist_ok=True)
        for folder in (source, policy):
            tiny_models.change_json(folder / "tokenizer_config.json", chat_template=text)
        assert uses_tokens(source, policy=policy) is is_given_tokens


def test_a_causal_model_needs_only_a_head_in_its_files(tmp_path: Path) -> None:
    classifier = tiny_models.save_scoring(
        tmp_path / "a", architectures=["Qwen3ForSequenceClassification"], id2label={"0": "good"}
    )
    assert uses_tokens(classifier)
    assert uses_tokens(tiny_models.save_scoring(tmp_path / "b", architectures=["Qwen3ForCausalLM"]))


@pytest.mark.parametrize(
    ("num_labels", "config", "message"),
    [
        (2, {}, rf"{FIELD}.* \(score\.weight\) has 2 outputs, .*; choose"),
        (
            1,
            {"architectures": ["Qwen3ForSequenceClassification"], "id2label": {"0": "a", "1": "b", "2": "c"}},
            rf"{FIELD}.* is a classifier with 3 labels \(config\.json\)",
        ),
        (None, {}, rf"{FIELD}.* has no tensor 'score\.weight'.*choose a model"),
        (1, {"model_type": "deberta-v2"}, rf"{FIELD}.* holds no causal language model"),
        (1, {"max_position_embeddings": 15}, rf"{FIELD}with the longest prompt \(8 tokens\) .* 16 tokens, .* 15"),
    ],
)
def test_a_model_without_a_score_is_rejected_by_its_field(
    tmp_path: Path, num_labels: int | None, config: dict[str, object], message: str
) -> None:
    folder = tiny_models.save_scoring(tmp_path / "model", num_labels=num_labels, **config)
    with pytest.raises(ConfigurationError, match=message):
        uses_tokens(folder)


def test_a_template_that_rejects_the_prompts_is_rejected(tmp_path: Path) -> None:
    folder = with_other_token(tiny_models.save_scoring(tmp_path / "model"))
    tiny_models.change_json(folder / "tokenizer_config.json", chat_template="{{ raise_exception('no system') }}")
    with pytest.raises(ConfigurationError, match=rf"{FIELD}.*chat template rejects .* user.*no system"):
        uses_tokens(folder)


@pytest.mark.parametrize("is_alike", [True, False])
@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{% if messages[-1].role == 'assistant' %}{{ raise_exception('no replies') }}{% endif %}", "no replies"),
        ("{{ messages[-1].content + 1 }}", "TypeError: can only concatenate str"),
        ("{% for m in messages %}", "line 1 is not valid Jinja: Unexpected end of template"),
    ],
)
def test_a_failing_template_is_rejected_before_a_device_is_used(
    tmp_path: Path, template: str, words: str, is_alike: bool
) -> None:
    """Also where the model has the policy's tokens and its template is only used to find where a response ends."""
    folder = tiny_models.save_scoring(tmp_path / "model")
    tiny_models.change_json(folder / "tokenizer_config.json", chat_template=template)
    policy = folder if is_alike else tiny_models.QUICKSTART_MODEL
    with pytest.raises(ConfigurationError, match=rf"{FIELD}.*chat template rejects .* user.*{words}"):
        uses_tokens(folder, policy=policy)


def test_damaged_files_of_a_reward_model_are_named(tmp_path: Path) -> None:
    """By the reward model's field, not the policy's."""
    folder = tiny_models.save_scoring(tmp_path / "model")
    weights = (folder / "model.safetensors").read_bytes()
    for name, content, message in (
        ("model.safetensors", weights[:-100], "the weights in .* cannot be read .*SafetensorError"),
        ("generation_config.json", b'{"eos_token_id": [1', r"generation_config\.json is not valid JSON"),
        ("tokenizer_config.json", b"[]", r"tokenizer_config\.json contains \[\], not a JSON object"),
        ("config.json", b"null", r"config\.json contains null, not a JSON object"),
    ):
        whole = (folder / name).read_bytes()
        (folder / name).write_bytes(content)
        with pytest.raises(ConfigurationError, match=FIELD + ".*" + message):
            uses_tokens(folder)
        (folder / name).write_bytes(whole)
    assert uses_tokens(folder)


def test_a_model_that_lacks_tokens_of_the_policy_is_rejected(tmp_path: Path) -> None:
    """Their tokenizers are the same; the policy's embeddings have more rows."""
    folder = tiny_models.save_scoring(tmp_path / "model", vocab_size=63)
    message = r"source: .* has 63 tokens \(vocab_size\), .* 64; choose"
    with pytest.raises(ConfigurationError, match=FIELD.removesuffix("source: ") + message):
        uses_tokens(folder)
    spec = RLJob.from_wire(
        training_runs.small_job(algorithm={"type": "PPO"}, critic={"model": {"source": str(folder)}})
    ).spec
    with pytest.raises(ConfigurationError, match=r"spec\.training\.critic\.model\." + message):
        critic_model(spec, tiny_models.QUICKSTART_MODEL, PROMPTS, ParallelLayout.of(1), tmp_path, tmp_path)


def test_a_critic_with_other_tokens_is_rejected(tmp_path: Path) -> None:
    folder = with_other_token(tiny_models.save_scoring(tmp_path / "critic"))
    critic = {"model": {"source": str(folder)}}
    spec = RLJob.from_wire(training_runs.small_job(algorithm={"type": "PPO"}, critic=critic)).spec
    with pytest.raises(
        ConfigurationError,
        match=r"spec\.training\.critic\.model\.source: .* other tokens than the policy's, .* the token '7' is \d+ for",
    ):
        critic_model(spec, tiny_models.QUICKSTART_MODEL, PROMPTS, ParallelLayout.of(1), tmp_path, tmp_path)


def test_a_critic_that_reads_only_shorter_rows_is_rejected(tmp_path: Path) -> None:
    folder = tiny_models.save_scoring(tmp_path / "critic", max_position_embeddings=8)
    critic = {"model": {"source": str(folder)}}
    spec = RLJob.from_wire(training_runs.small_job(algorithm={"type": "PPO"}, critic=critic)).spec
    with pytest.raises(ConfigurationError, match=r"maxNewTokens \(8\): .* 9 tokens, .*critic is 8"):
        critic_model(spec, tiny_models.QUICKSTART_MODEL, PROMPTS, ParallelLayout.of(1), tmp_path, tmp_path)


class Group(FinishedRollouts):
    """Four responses; functions give 1 to each, the model gives the first token of its input. With `has_two_rows` each
    response has another row before."""

    def __init__(self, *, has_two_rows: bool = False) -> None:
        super().__init__()
        self.has_two_rows = has_two_rows
        self.given: list[list[int]] = []
        self.beginnings: list[tuple[object, ...]] = []
        self.asked: list[int] = []

    def generate(self, batch: DataProto, sampling: SamplingSettings) -> DataProto:
        del sampling
        lengths_B = torch.tensor([1, 6, 2, 5, 3][: len(batch)])
        return DataProto(
            {
                RESPONSE_LENGTHS: lengths_B,
                **outcome_columns([Outcome.COMPLETED] * len(batch)),
                TOKENS: torch.arange(len(batch)),
                **dict.fromkeys((RESPONSE_MASK, ROLLOUT_LOGPROBS, POLICY_VERSIONS, NUM_TOKENS), lengths_B),
            },
            objects={RESPONSE_TEXTS: tuple("abcde"[: len(batch)])},
        )

    def take(self, max_seconds: float) -> DataProto:
        batch = super().take(max_seconds)
        if not self.has_two_rows:
            return batch
        tokens = torch.stack([torch.full((len(batch),), 99), batch[TOKENS]], dim=1).flatten()
        return batch.repeat(2).with_columns({TOKENS: tokens})

    def start_scoring(self, batch: list[DataProto]) -> FinishedCall[DataProto]:
        assert PROMPT_MESSAGES not in batch[0]
        self.asked += batch[0][SAMPLE_IDS].tolist()
        return FinishedCall(DataProto())

    def completed_ids(self, max_seconds: float) -> list[list[int]]:
        del max_seconds
        return [self.asked]

    def finish_scoring(self, batch: list[DataProto]) -> DataProto:
        return DataProto({score_column("one"): torch.ones(sum(map(len, batch)), dtype=torch.float64)})

    def response_texts(self, batch: DataProto) -> DataProto:
        return batch

    def compute_scores(self, batch: DataProto) -> FinishedCall[DataProto]:
        assert set(batch.column_names()) == {TOKENS, PROMPT_TEXTS, PLAIN_TURN_BEGINNINGS}
        self.beginnings.append(batch.object_column(PLAIN_TURN_BEGINNINGS))
        self.given.append(batch[TOKENS].tolist())
        return FinishedCall(DataProto({score_column("model"): batch[TOKENS].double()}))


@pytest.mark.parametrize("has_two_rows", [False, True])
@pytest.mark.parametrize(
    ("num_ranks", "num_rows", "given"), [(1, 4, [0, 1, 2, 3]), (2, 4, [1, 0, 3, 2]), (2, 5, [0, 1, 2, 3, 4])]
)
def test_rows_are_distributed_evenly_and_scores_come_back_in_order(
    monkeypatch: pytest.MonkeyPatch, num_ranks: int, num_rows: int, given: list[int], has_two_rows: bool
) -> None:
    """6 and 1, 5 and 2 tokens. Rows that do not divide evenly keep their order. Of a response with several rows, the
    model scores the last one."""
    monkeypatch.setattr("rljob_trainer.controller.rollout_phase.stored", lambda batch: batch)
    group = Group(has_two_rows=has_two_rows)
    model = RewardModelWorkers("model", group, (TOKENS, PROMPT_TEXTS, PLAIN_TURN_BEGINNINGS), num_ranks)
    weights = {"one": 0.5, "model": 2.0}
    stop = StopRequest()
    phase = RolloutPhase(Sampler(group, group, Engines(), stop), weights, PhaseTimer(time.perf_counter), stop, model)
    prompts = [PromptRow(index, "p", "p", (1, 2), "", {}, plain_turn_beginning=str(index)) for index in range(num_rows)]
    seeds = torch.zeros(num_rows, dtype=torch.int64)
    rollout = phase.run(prompts, 1, SamplingSettings(1.0, 1.0, 0, 8, ()), seeds)
    assert sorted(group.given[0]) == list(range(num_rows))
    assert group.beginnings[0] == tuple(map(str, group.given[0]))
    if num_ranks == 2 and num_rows == 4:
        halves = {frozenset(group.given[0][:2]), frozenset(group.given[0][2:])}
        assert halves == {frozenset(given[:2]), frozenset(given[2:])}
    else:
        assert group.given[0] == given
    assert rollout.batch[SCORES].tolist() == [0.5 + 2.0 * index for index in range(num_rows)]
    assert rollout.named_rewards_B["model"].tolist() == list(range(num_rows))
