"""Which models of a reference are rejected before Ray starts."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest

from rljob_api.v1alpha1.job import RLJob
from rljob_testing.models import tiny_models
from rljob_testing.training import training_runs
from rljob_trainer.controller.checks.fit import check_algorithm
from rljob_trainer.controller.checks.reference_model import reference_model
from rljob_trainer.controller.prompt_sets import Prompts
from rljob_trainer.datasets.prompts import PromptRow
from rljob_trainer.engines.train.layout import ParallelLayout
from rljob_trainer.errors import ConfigurationError
from rljob_trainer.models.source import ModelLocation

PROMPTS = Prompts((PromptRow(0, "1>", "1>", (3,), None, {}),), {}, 0)
FIELD = r"spec\.roles\.ref\.model\.source: "
POLICY = tiny_models.QUICKSTART_MODEL


def found(source: Path, policy: Path = POLICY) -> ModelLocation | None:
    roles: training_runs.Document = {"ref": {"model": {"source": str(source)}}}
    spec = RLJob.from_wire(training_runs.small_job(roles=roles, algorithm={"type": "Distillation"})).spec
    return reference_model(spec, policy, PROMPTS, ParallelLayout.of(1), source.parent, source.parent)


def copied(folder: Path) -> Path:
    shutil.copytree(POLICY, folder)
    return folder


def llama(folder: Path) -> Path:
    """Another architecture and size with the policy's tokenizer, and more rows of embeddings."""
    tiny_models.save("llama", folder)
    tiny_models.copy_tokenizer(folder)
    return folder


def test_another_architecture_with_the_policys_tokenizer_is_accepted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    location = found(llama(tmp_path / "teacher"))
    assert location is not None
    assert location.folder() == tmp_path / "teacher"
    assert [record.message for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_a_job_without_such_a_model_has_none() -> None:
    spec = RLJob.from_wire(training_runs.small_job(algorithm={"kl": {"coefficient": 0.1}})).spec
    assert reference_model(spec, POLICY, PROMPTS, ParallelLayout.of(1), POLICY, POLICY) is None


@pytest.mark.parametrize(
    ("old", "new", "difference"),
    [
        (
            '"7": ',
            '"x": ',
            r"the token '7' is \d+ for the policy, and missing for this model \(64 and 64 tokens in all\)",
        ),
        (
            '"<eos>"',
            '"<end>"',
            r"the token '<end>' is missing for the policy, and 1 for this model \(64 and 64 tokens in all\)",
        ),
    ],
)
def test_the_first_token_that_differs_is_named(tmp_path: Path, old: str, new: str, difference: str) -> None:
    """An ordinary token, and a special one."""
    folder = copied(tmp_path / "teacher")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        path = folder / file
        path.write_text(path.read_text().replace(old, new))
    with pytest.raises(ConfigurationError, match=FIELD + rf".* other tokens .* texts: the id of {difference}"):
        found(folder)


def test_a_model_that_lacks_rows_of_the_policys_vocabulary_is_rejected(tmp_path: Path) -> None:
    folder = copied(tmp_path / "teacher")
    tiny_models.change_json(folder / "config.json", vocab_size=63)
    with pytest.raises(ConfigurationError, match=FIELD + r".* has 63 tokens \(vocab_size\), .* 64; choose"):
        found(folder)


def test_a_model_that_reads_only_shorter_rows_is_rejected(tmp_path: Path) -> None:
    folder = copied(tmp_path / "teacher")
    tiny_models.change_json(folder / "config.json", max_position_embeddings=8)
    with pytest.raises(ConfigurationError, match=r"maxNewTokens \(8\): .* 9 tokens, .*teacher is 8"):
        found(folder)


def test_other_end_tokens_are_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A base model and a chat model of one family have the same tokens and end responses differently."""
    policy = copied(tmp_path / "policy")
    tiny_models.change_json(policy / "generation_config.json", eos_token_id=[1, 5])
    with caplog.at_level(logging.WARNING):
        assert found(copied(tmp_path / "teacher"), policy) is not None
    [record] = caplog.records
    assert "spec.roles.ref.model.source: the policy ends responses with ['<eos>', '" in record.getMessage()


def test_a_model_that_no_function_needs_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_own.py").write_text("def advantage(inputs):\n    return inputs.rewards_B - 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    own: training_runs.Document = {"type": "Function", "function": {"path": "my_own:advantage"}}
    roles: training_runs.Document = {"ref": {"model": {"source": "./teacher"}}}
    spec = RLJob.from_wire(training_runs.small_job(roles=roles, algorithm={"advantage": own})).spec
    with pytest.raises(ConfigurationError, match=r"^spec\.roles\.ref\.model: nothing needs the reference model; rem"):
        check_algorithm(spec)
