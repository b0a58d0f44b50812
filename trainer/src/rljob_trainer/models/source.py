"""The model as a folder in Hugging Face's layout on this machine, whatever the job calls it."""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rljob_api.v1alpha1.model import Model
from rljob_trainer.errors import ConfigurationError, TrainerError, described, storage_checked
from rljob_trainer.models.model_files import WHERE
from rljob_trainer.observability.growth import GrowthTold, tell_downloaded
from rljob_trainer.source_paths import local_path, looks_local

log = logging.getLogger(__name__)

CONVERSION_VERSION = 1
"""Part of the name of a converted model; to be raised when conversion comes to write something else."""
FINGERPRINTED_SUFFIXES = frozenset({".json", ".model", ".safetensors", ".tiktoken", ".txt"})
FINGERPRINTED_BYTES = 1024 * 1024
"""Of each file of weights."""


@dataclass(frozen=True)
class ModelPlace:
    """A model by what leads to it on every machine alike: the folder itself may have to be made on each."""

    model: Model
    """With a commit as `revision` where it is one of the hub, so that no machine gets another version of it."""
    cache_folder: Path
    base_folder: Path

    def folder(self, told: GrowthTold = tell_downloaded) -> Path:
        """The model's folder on this machine; raises as `controller_model`. May be called by several processes at
        once: one downloads or converts, the others wait, and later calls use what is there. `told`: of the bytes of a
        download as they come."""
        if looks_local(self.model.source, self.base_folder):
            return local_model_folder(self.model, self.cache_folder, self.base_folder)
        from rljob_trainer.models.download import download_once

        assert self.model.revision is not None, "the controller names a commit"
        locks = self.cache_folder / "models"
        locks.mkdir(parents=True, exist_ok=True)
        name = f"{self.model.source.replace('/', '--')}-{self.model.revision}"
        with _locked(locks / f"{name}.lock"):
            return download_once(self.model.source, self.model.revision, WHERE, locks / f"{name}.complete", told)


def controller_model(model: Model, cache_folder: Path, base_folder: Path) -> tuple[Path, ModelPlace]:
    """What the controller needs of the model (its configuration and tokenizer, with weights where they are local), and
    where the workers get theirs.

    Raises ConfigurationError if there is no such model, ResourceError if the hub cannot be reached."""
    if looks_local(model.source, base_folder):
        return local_model_folder(model, cache_folder, base_folder), ModelPlace(model, cache_folder, base_folder)
    from rljob_trainer.models.download import SETTINGS_FILES, download_model

    folder = download_model(model.source, model.revision, WHERE, SETTINGS_FILES)
    pinned = model.model_copy(update={"revision": folder.name})
    return folder, ModelPlace(pinned, cache_folder, base_folder)


def local_model_folder(model: Model, cache_folder: Path, base_folder: Path) -> Path:
    """A folder with configuration, weights and tokenizer, of a model that is no repository of the hub.

    A folder is taken as it is; relative paths start at `base_folder`. A `.gguf` file is converted once into
    `cache_folder`. Raises ConfigurationError if there is no such model.
    """
    path = local_path(model.source, base_folder, WHERE)
    if model.revision is not None:
        raise ConfigurationError(
            f"spec.training.model.revision: {model.revision!r} means nothing for a local model ({model.source}); "
            "leave it out"
        )
    if path.is_file() and path.suffix == ".gguf":
        return converted_gguf(path, cache_folder)
    if not (path / "config.json").is_file():
        raise ConfigurationError(
            f"{WHERE}: {path} holds no config.json; name a folder in Hugging Face's layout or a .gguf file"
        )
    return path


def converted_gguf(gguf_file: Path, cache_folder: Path) -> Path:
    """The model of a GGUF file as a plain 32-bit folder, converted at the first call for the file's content.

    Several processes may call this at once: one converts, the others wait. A folder appears complete or not at all.
    """
    digest = _digest(gguf_file)
    folder = cache_folder / "models" / f"{gguf_file.stem}-{digest[:16]}-v{CONVERSION_VERSION}"
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _locked(folder.with_name(folder.name + ".lock")):
        if folder.is_dir():
            return folder
        from rljob_trainer.models.gguf_conversion import convert_gguf

        started = time.monotonic()
        log.info("converting %s into %s (once)", gguf_file.name, folder)
        unfinished = folder.with_name(folder.name + ".unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        try:
            with storage_checked(f"{WHERE}: converting {gguf_file} into {folder}"):
                convert_gguf(gguf_file, unfinished)
                os.replace(unfinished, folder)
        except (TrainerError, MemoryError):
            raise
        except Exception as error:
            # The reader of a damaged file raises anything, such as IndexError and struct.error.
            raise ConfigurationError(
                f"{WHERE}: cannot convert {gguf_file} into {folder}: {described(error)}; is the file damaged, or "
                "may the folder not be written to?"
            ) from error
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
        log.info("converted %s in %.0f s", gguf_file.name, time.monotonic() - started)
    return folder


def fingerprint(folder: Path) -> str:
    """Mostly tells a model's folder from one with other contents: of its settings and its tokenizer all counts, of
    weights the sizes and the first megabyte of each file."""
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.is_file() and path.suffix in FINGERPRINTED_SUFFIXES:
            digest.update(f"{path.name} {path.stat().st_size}\n".encode())
            with storage_checked(f"{WHERE}: {path}"), path.open("rb") as file:
                digest.update(file.read(FINGERPRINTED_BYTES if path.suffix == ".safetensors" else -1))
    return digest.hexdigest()


def _digest(path: Path) -> str:
    with storage_checked(f"{WHERE}: {path}"), path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def _locked(lock_file: Path) -> Iterator[None]:
    # The kernel drops the lock with its process, so a killed conversion blocks nobody.
    with lock_file.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
