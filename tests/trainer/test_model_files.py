"""Damaged files of a model's folder: the error is a configuration error and names the file or its field."""

from __future__ import annotations

import json
import shutil
from importlib.resources import files
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rljob_testing.models import tiny_models
from rljob_trainer.controller.checks.fit import position_limit
from rljob_trainer.engines.train.attention import choose_attention
from rljob_trainer.engines.train.layout import ParallelLayout, check_layout
from rljob_trainer.engines.train.model import build_on_meta, read_config
from rljob_trainer.engines.train.weight_loading import WeightFiles
from rljob_trainer.errors import ConfigurationError
from rljob_trainer.models.download import _weight_files
from rljob_trainer.models.model_files import OBJECT_FILES
from rljob_trainer.models.tokenizer import Tokenizer

MODEL = Path(str(files("rljob_trainer"))) / "assets/sort_digits/model"
WHERE = r"^spec\.training\.model\.source: "
CONFIG: dict[str, object] = json.loads((MODEL / "config.json").read_text())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The quickstart's model."""
    return Path(shutil.copytree(MODEL, tmp_path / "model"))


@pytest.mark.parametrize("name", [name for name in OBJECT_FILES if name != "vocab.json"])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            b'{"eos_token_id": [1, ',
            r" is not valid JSON \(.*line 1 column 22.*\); it may be truncated: copy or download",
        ),
        (b"", r" is not valid JSON \(Expecting value"),
        (b'{"a": "\xff"}', r" is not valid JSON \('utf-8' codec can't decode byte 0xff"),
        (b"[" * 100_000, r" is not valid JSON \(maximum recursion depth"),
        (b"[1, 2]", r" contains \[1, 2\], not a JSON object \{\.\.\.\}"),
        (b'"text"', r' contains "text", not a JSON object'),
        (b"null", r" contains null, not a JSON object"),
    ],
)
def test_a_file_that_is_not_a_json_object_is_named(folder: Path, name: str, content: bytes, message: str) -> None:
    (folder / name).write_bytes(content)
    with pytest.raises(ConfigurationError, match=WHERE + ".*/" + name.replace(".", r"\.") + message):
        Tokenizer(folder)


@pytest.mark.parametrize("value", ["1", 1.5, True, {"a": 1}, [1, "2"], [[1]], [None]])
def test_end_tokens_of_another_type_are_named(folder: Path, value: object) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    with pytest.raises(
        ConfigurationError, match=WHERE + r"eos_token_id in .*generation_config\.json must be a token id"
    ):
        Tokenizer(folder)
    (folder / "generation_config.json").unlink()
    tiny_models.change_json(folder / "config.json", eos_token_id=value)
    with pytest.raises(ConfigurationError, match=WHERE + ".*field 'eos_token_id'"):
        read_config(folder)


@pytest.mark.parametrize("value", [None, [], 1, [1, 2]])
def test_end_tokens_of_the_right_type_are_accepted(folder: Path, value: object) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    expected = value if isinstance(value, list) and value else [1]
    assert Tokenizer(folder).eos_token_ids == tuple(expected)


ODD_VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 3), st.floats(), st.text(max_size=3), st.just([]), st.just({}),
    st.just([1]), st.just({"a": 1}), st.just([[]]),
    st.fixed_dictionaries({"rope_type": st.sampled_from(["linear", "dynamic", "yarn", "longrope", "no"])},
        optional={"factor": st.sampled_from([2, 0.5, "x", None, float("inf")])}),
)  # fmt: skip


@pytest.fixture(scope="module")
def any_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(shutil.copytree(MODEL, tmp_path_factory.mktemp("any") / "model"))


@given(st.sampled_from([*sorted(CONFIG), "rope_scaling", "text_config"]), ODD_VALUES)
@settings(max_examples=150, deadline=None)
def test_any_config_json_is_accepted_or_a_configuration_error(any_folder: Path, name: str, value: object) -> None:
    (any_folder / "config.json").write_text(json.dumps(CONFIG | {name: value}))
    try:
        config = read_config(any_folder)
        choose_attention(config)
        position_limit(config)
        check_layout(ParallelLayout.of(2, sequence_parallel=2), config, "spec.roles.actor.sequenceParallel")
        build_on_meta(any_folder)
    except ConfigurationError:
        return


def test_an_index_of_weights_without_a_map_is_named(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    index = folder / "model.safetensors.index.json"
    for text, message in (
        ('{"weight_map": {"a": ', "is not valid JSON"),
        ("[]", r"contains \[\], not a JSON object"),
        ("{}", "has no weight_map"),
        ('{"weight_map": ["a"]}', "has no weight_map"),
    ):
        index.write_text(text)
        with pytest.raises(ConfigurationError, match=WHERE + r".*model\.safetensors\.index\.json " + message):
            WeightFiles(folder)
        with pytest.raises(ConfigurationError, match=WHERE + r".*model\.safetensors\.index\.json " + message):
            _weight_files(folder)
