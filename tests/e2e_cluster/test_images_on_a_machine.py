"""The commands for Docker and containerd; the programs are replaced by ones that record their arguments."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tarfile
from itertools import pairwise
from pathlib import Path

import pytest

from rljob_kind import layering
from rljob_kind.errors import CommandError, KindError
from rljob_kind.images import build_image, content_hash
from rljob_kind.layering import KnownLayers, write_archive
from rljob_kind.loading import full_name
from rljob_kind.settings import data_folder, program_folder

RECORDER = """#!{python}
import json, pathlib, sys
mounted = [pathlib.Path(word.split("src=")[1]).read_text() for word in sys.argv if "src=" in word]
pathlib.Path("{record}").write_text(json.dumps([sys.argv[1:], mounted]))
sys.exit({exit_code})
"""


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache folder of its own, and no settings of the machine that runs the tests."""
    monkeypatch.setenv("RLJOB_CACHE", str(tmp_path / "cache"))
    for name in ("UV_DEFAULT_INDEX", "PIP_INDEX_URL", "PIP_CERT", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "https_proxy"):
        monkeypatch.delenv(name, raising=False)


def recorder(tmp_path: Path, program: str, exit_code: int = 0) -> Path:
    """Puts a program on the path that records its arguments and the secrets among them; returns the record."""
    record = tmp_path / f"{program}.json"
    program_folder().mkdir(parents=True)
    file = program_folder() / program
    file.write_text(RECORDER.format(python=sys.executable, record=record, exit_code=exit_code))
    file.chmod(0o755)
    return record


def test_index_and_certificates_reach_a_build_only_as_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = recorder(tmp_path, "docker")
    authorities = tmp_path / "authorities.pem"
    authorities.write_text("CERTIFICATE")
    monkeypatch.setenv("PIP_INDEX_URL", "https://user:secret@index.example/simple")
    monkeypatch.setenv("SSL_CERT_FILE", str(authorities))
    monkeypatch.setenv("https_proxy", "http://proxy.example")
    build_image(tmp_path / "Dockerfile", "a/b:1", tmp_path, {"DEVICE": "cpu"}, target="dependencies")
    arguments, secrets = json.loads(record.read_text())
    assert "index.example" not in " ".join(arguments)
    assert "proxy.example" not in " ".join(arguments)
    assert secrets == [
        "PIP_INDEX_URL='https://user:secret@index.example/simple'\n"
        "UV_DEFAULT_INDEX='https://user:secret@index.example/simple'\n"
        "SSL_CERT_FILE=/run/secrets/certificates\n"
        "PIP_CERT=/run/secrets/certificates\n"
        "REQUESTS_CA_BUNDLE=/run/secrets/certificates\n",
        "CERTIFICATE",
    ]
    pairs = list(pairwise(arguments))
    for pair in (
        ("--network", "host"),
        ("--build-arg", "DEVICE=cpu"),
        ("--build-arg", "https_proxy"),
        ("--target", "dependencies"),
        ("--tag", "a/b:1"),
    ):
        assert pair in pairs
    assert arguments[-1] == str(tmp_path)
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file() and "secret@" in path.read_text()]


def test_a_failed_build_is_reported_with_the_end_of_its_log(tmp_path: Path) -> None:
    recorder(tmp_path, "docker", exit_code=3)
    with pytest.raises(CommandError, match=r"docker build .*exit code 3"):
        build_image(tmp_path / "Dockerfile", "a/b:1", tmp_path)


def test_a_content_hash_follows_the_files(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    (folder / "below").mkdir(parents=True)
    file = folder / "below" / "a"
    file.write_text("1")
    seen = [content_hash([folder])]
    file.chmod(0o755)
    seen.append(content_hash([folder]))
    file.write_text("2")
    seen.append(content_hash([folder]))
    file.rename(folder / "b")
    seen.append(content_hash([folder]))
    seen.append(content_hash([folder], "value"))
    assert len(set(seen)) == 5
    (folder / "__pycache__").mkdir()
    (folder / "__pycache__" / "a.pyc").write_text("made")
    assert content_hash([folder], "value") == seen[-1]
    with pytest.raises(KindError, match="missing"):
        content_hash([tmp_path / "nowhere"])


@pytest.mark.parametrize(
    ("tag", "expected"),
    [
        ("debian:bookworm-slim", "docker.io/library/debian:bookworm-slim"),
        ("rljob-e2e/trainer:1", "docker.io/rljob-e2e/trainer:1"),
        ("quay.io/kuberay/operator:v1", "quay.io/kuberay/operator:v1"),
        ("localhost:5000/a:1", "localhost:5000/a:1"),
    ],
)
def test_images_have_the_names_that_containerd_uses(tag: str, expected: str) -> None:
    assert full_name(tag) == expected


def test_an_archive_holds_new_layers_and_names_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    new = tmp_path / "new"
    new.mkdir()
    (new / "code.py").write_text("x = 1\n")
    inspected = {"Architecture": "amd64", "Os": "linux", "Config": {"User": "1000:1000"}}
    monkeypatch.setattr(layering, "_inspected", lambda _tag: inspected)
    base_layer: dict[str, object] = {"mediaType": "any", "digest": "sha256:aa", "size": 7}
    archive = tmp_path / "image.tar"
    write_archive(archive, "docker.io/a/b:1", "a/b:1", KnownLayers([base_layer], ["sha256:aa"]), [new])

    with tarfile.open(archive) as content:
        files = {member.name: content.extractfile(member).read() for member in content}  # type: ignore[union-attr]
    blobs = {name.removeprefix("blobs/sha256/"): data for name, data in files.items() if name.startswith("blobs")}
    assert all(hashlib.sha256(data).hexdigest() == name for name, data in blobs.items())
    entry = json.loads(files["index.json"])["manifests"][0]
    assert entry["annotations"]["io.containerd.image.name"] == "docker.io/a/b:1"
    manifest = json.loads(blobs[entry["digest"].removeprefix("sha256:")])
    assert manifest["layers"][0] == base_layer
    layer = manifest["layers"][1]["digest"].removeprefix("sha256:")
    assert manifest["layers"][1]["size"] == len(blobs[layer])
    configuration = json.loads(blobs[manifest["config"]["digest"].removeprefix("sha256:")])
    assert configuration["config"] == {"User": "1000:1000"}
    assert configuration["rootfs"]["diff_ids"] == ["sha256:aa", f"sha256:{layer}"]
    (tmp_path / "layer.tar").write_bytes(blobs[layer])
    with tarfile.open(tmp_path / "layer.tar") as content:
        assert [name for name in content.getnames() if name != "."] == ["./code.py"]


def test_known_layers_end_where_the_images_differ() -> None:
    layers: list[dict[str, object]] = [{"digest": digest} for digest in "abc"]
    known = KnownLayers(layers, ["a", "b", "c"])
    assert known.common_with(["a", "b", "x", "c"]) == KnownLayers(layers[:2], ["a", "b"])
    assert known.common_with(["a", "b", "c", "d"]) == known
    assert known.common_with(["a"]) == KnownLayers(layers[:1], ["a"])
    assert known.common_with(["b"]) == KnownLayers([], [])


def test_folders_replace_layers_only_if_they_hide_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = [tmp_path / name for name in ("lowest", "middle", "highest")]
    for folder in folders:
        folder.mkdir()
        (folder / "file").write_text("content")
    lowest, middle, highest = folders
    data = {"UpperDir": str(highest), "LowerDir": f"{middle}:{lowest}"}
    inspected = {"GraphDriver": {"Name": "overlay2", "Data": data}}
    monkeypatch.setattr(layering, "_inspected", lambda _tag: inspected)
    assert layering.layer_folders("a", 1) == [middle, highest]
    assert layering.layer_folders("a", 3) == []
    monkeypatch.setattr(layering, "_hides", lambda path: path == middle / "file")
    assert layering.layer_folders("a", 1) is None
    assert layering.layer_folders("a", 2) == [highest]
    monkeypatch.setattr(layering, "MAX_COPIED_BYTES", 3)
    assert layering.layer_folders("a", 2) is None
    inspected["GraphDriver"]["Name"] = "other"
    assert layering.layer_folders("a", 3) is None


BUNDLE = {
    "process": {
        "capabilities": {"bounding": ["CAP_CHOWN", "CAP_SYS_RESOURCE"], "effective": ["CAP_SYS_RESOURCE"]},
        "rlimits": [{"type": "RLIMIT_NOFILE"}],
        "oomScoreAdj": -500,
        "args": ["sh"],
    },
    "root": {"path": "rootfs"},
}
BOUNDED = {
    "capabilities": {"bounding": ["CAP_CHOWN"], "effective": []},
    "oomScoreAdj": 0,
    "args": ["sh"],
}


@pytest.mark.parametrize(
    ("arguments", "file", "before", "after"),
    [
        (["--root", "r", "create", "--bundle", "{folder}", "id"], "config.json", BUNDLE, BUNDLE | {"process": BOUNDED}),
        (["run", "--bundle={folder}", "id"], "config.json", BUNDLE, BUNDLE | {"process": BOUNDED}),
        (["exec", "--process", "{folder}/p.json", "id"], "p.json", BUNDLE["process"], BOUNDED),
        (["state", "id"], "config.json", BUNDLE, BUNDLE),
    ],
    ids=["create", "run", "exec", "state"],
)
def test_a_container_uses_only_features_that_the_machine_has(
    tmp_path: Path, arguments: list[str], file: str, before: object, after: object
) -> None:
    record = recorder(tmp_path, "runc")
    (tmp_path / file).write_text(json.dumps(before))
    expected = [argument.format(folder=tmp_path) for argument in arguments]
    runtime = data_folder() / "runtime" / "runc-within-bounds"
    environment = {"PATH": f"{program_folder()}{os.pathsep}{os.defpath}"}
    subprocess.run([sys.executable, str(runtime), *expected], env=environment, check=True)
    assert json.loads((tmp_path / file).read_text()) == after
    assert json.loads(record.read_text())[0] == expected
