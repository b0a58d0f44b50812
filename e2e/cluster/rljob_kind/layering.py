"""Sends a node only the layers that it lacks, of an image that was built on one it has.

`docker save` writes whole images: minutes for the trainer's, whose last layer is all that a change of code changes. An
OCI archive may leave out what its reader has already, so one is put together here from the daemon's own folders.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import stat
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from rljob_kind.images import scratch_folder
from rljob_kind.processes import run

Json = dict[str, object]
LAYER_TYPE = "application/vnd.oci.image.layer.v1.tar"
CONFIGURATION_TYPE = "application/vnd.oci.image.config.v1+json"
MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"
INDEX_TYPE = "application/vnd.oci.image.index.v1+json"


@dataclass(frozen=True)
class BaseImage:
    """An image as a node has it."""

    layers: list[Json]
    """Descriptors of its layers, lowest first."""
    diff_ids: list[str]
    """Digests of its layers' uncompressed archives, lowest first."""


def layers_on_top(tag: str, base: str) -> list[Path]:
    """The folders of an image's layers above those of its base, lowest first.

    Empty where that cannot be told or read: not built on that base, another storage driver, not root, or a layer that
    removes files of the base (which is written differently in folders and in archives).
    """
    image, below = _inspected(tag), _inspected(base)
    layers, base_layers = _diff_ids(image), _diff_ids(below)
    driver = cast(Json, image.get("GraphDriver") or {})
    if layers[: len(base_layers)] != base_layers or driver.get("Name") != "overlay2":
        return []
    data = cast(dict[str, str], driver["Data"])
    folders = [Path(data["UpperDir"]), *map(Path, filter(None, data.get("LowerDir", "").split(":")))]
    wanted = folders[: len(layers) - len(base_layers)]
    readable = all(os.access(folder, os.R_OK | os.X_OK) and not _removes_files(folder) for folder in wanted)
    return wanted[::-1] if readable else []


def write_archive(archive: Path, name: str, tag: str, base: BaseImage, folders: list[Path]) -> None:
    """Writes an OCI archive of the image `tag` under the full name `name`: the base's layers by reference only, and one
    layer from each folder."""
    with tarfile.open(archive, "w") as output, scratch_folder("layers") as scratch:
        layers, diff_ids = list(base.layers), list(base.diff_ids)
        for number, folder in enumerate(folders):
            layer = scratch / f"{number}.tar"
            run(["tar", "-C", str(folder), "--numeric-owner", "--create", "--file", str(layer), "."])
            digest = _file_digest(layer)
            output.add(layer, arcname=_blob_path(digest))
            layers.append({"mediaType": LAYER_TYPE, "digest": digest, "size": layer.stat().st_size})
            diff_ids.append(digest)
        image = _inspected(tag)
        configuration = {
            "architecture": image["Architecture"],
            "os": image["Os"],
            "config": image["Config"],
            "rootfs": {"type": "layers", "diff_ids": diff_ids},
        }
        manifest = {
            "schemaVersion": 2,
            "mediaType": MANIFEST_TYPE,
            "config": _add_blob(output, configuration, CONFIGURATION_TYPE),
            "layers": layers,
        }
        entry = _add_blob(output, manifest, MANIFEST_TYPE) | {"annotations": {"io.containerd.image.name": name}}
        index = {"schemaVersion": 2, "mediaType": INDEX_TYPE, "manifests": [entry]}
        _add_file(output, "index.json", json.dumps(index).encode())
        _add_file(output, "oci-layout", b'{"imageLayoutVersion":"1.0.0"}')


def base_image(manifest: str, configuration: str) -> BaseImage:
    """Reads a manifest and the configuration that it names, both as JSON."""
    rootfs = cast(Json, json.loads(configuration)["rootfs"])
    return BaseImage(cast(list[Json], json.loads(manifest)["layers"]), cast(list[str], rootfs["diff_ids"]))


def _inspected(tag: str) -> Json:
    return cast(Json, json.loads(run(["docker", "image", "inspect", tag]))[0])


def _diff_ids(image: Json) -> list[str]:
    return cast(list[str], cast(Json, image["RootFS"])["Layers"])


def _removes_files(folder: Path) -> bool:
    """Whether an overlay folder hides files below it: character devices 0/0, and folders marked as opaque."""
    return any(_hides(path) for path in (folder, *folder.rglob("*")))


def _hides(path: Path) -> bool:
    status = path.lstat()
    if stat.S_ISCHR(status.st_mode):
        return status.st_rdev == 0
    return stat.S_ISDIR(status.st_mode) and any(name.endswith("overlay.opaque") for name in os.listxattr(path))


def _file_digest(file: Path) -> str:
    with file.open("rb") as content:
        return f"sha256:{hashlib.file_digest(content, 'sha256').hexdigest()}"


def _add_blob(output: tarfile.TarFile, value: Json, media_type: str) -> Json:
    data = json.dumps(value).encode()
    digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
    _add_file(output, _blob_path(digest), data)
    return {"mediaType": media_type, "digest": digest, "size": len(data)}


def _blob_path(digest: str) -> str:
    return f"blobs/{digest.replace(':', '/')}"


def _add_file(output: tarfile.TarFile, path: str, data: bytes) -> None:
    entry = tarfile.TarInfo(path)
    entry.size = len(data)
    output.addfile(entry, io.BytesIO(data))
