"""Writes an image for a node without the layers that the node already has from an older image.

`docker save` writes whole images, which takes minutes for the trainer's, although a change of code changes only its
last layer. An OCI archive may leave out layers that its reader has, so one is built here from the daemon's own folders.
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


MAX_COPIED_BYTES = 2**30
"""For more data `docker save` is faster, because here layers are copied twice."""


@dataclass(frozen=True)
class KnownLayers:
    """Layers that a node has, lowest first."""

    layers: list[Json]
    """The descriptors of the layers."""
    diff_ids: list[str]
    """The digests of the layers' uncompressed archives."""

    def common_with(self, diff_ids: list[str]) -> KnownLayers:
        """The lowest layers that an image with these digests shares."""
        number = 0
        while number < min(len(self.diff_ids), len(diff_ids)) and self.diff_ids[number] == diff_ids[number]:
            number += 1
        return KnownLayers(self.layers[:number], self.diff_ids[:number])


def known_layers(manifest: str, configuration: str) -> KnownLayers:
    """Parses an image's manifest and the configuration to which it refers, both JSON."""
    rootfs = cast(Json, json.loads(configuration)["rootfs"])
    return KnownLayers(cast(list[Json], json.loads(manifest)["layers"]), cast(list[str], rootfs["diff_ids"]))


def layer_digests(tag: str) -> list[str]:
    """The digests of an image's layers, lowest first."""
    return cast(list[str], cast(Json, _inspected(tag)["RootFS"])["Layers"])


def layer_folders(tag: str, num_known: int) -> list[Path] | None:
    """The daemon's folders of an image's layers, lowest first, without the lowest known ones.

    None if the folders cannot replace the layers: the storage driver is another one, they are not readable or too
    large, or they remove files of lower layers (which folders and archives represent differently).
    """
    driver = cast(Json, _inspected(tag).get("GraphDriver") or {})
    if driver.get("Name") != "overlay2":
        return None
    data = cast(dict[str, str], driver["Data"])
    highest_first = [Path(data["UpperDir"]), *map(Path, filter(None, data.get("LowerDir", "").split(":")))]
    folders = highest_first[::-1][num_known:]
    return folders if all(os.access(folder, os.R_OK | os.X_OK) for folder in folders) and _are_plain(folders) else None


def write_archive(archive: Path, name: str, tag: str, known: KnownLayers, folders: list[Path]) -> None:
    """Writes an OCI archive of the image `tag` under the full name `name`: known layers only by reference, and above
    them one layer per folder."""
    with tarfile.open(archive, "w") as output, scratch_folder("layers") as scratch:
        layers, diff_ids = list(known.layers), list(known.diff_ids)
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


def _inspected(tag: str) -> Json:
    return cast(Json, json.loads(run(["docker", "image", "inspect", tag]))[0])


def _are_plain(folders: list[Path]) -> bool:
    """Whether the folders are small and remove nothing from layers below them."""
    num_bytes = 0
    for folder in folders:
        for path in (folder, *folder.rglob("*")):
            num_bytes += path.lstat().st_size
            if num_bytes > MAX_COPIED_BYTES or _hides(path):
                return False
    return True


def _hides(path: Path) -> bool:
    """Whether an overlay entry removes something from lower layers: a character device 0/0, or a mark on a folder."""
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
