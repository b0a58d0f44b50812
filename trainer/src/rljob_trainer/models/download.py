"""Downloads models of the Hugging Face hub with its library, into the library's cache."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.file_download import repo_folder_name

from rljob_trainer.errors import ConfigurationError, ResourceError, storage_failure
from rljob_trainer.models.model_files import WHERE, read_json_object
from rljob_trainer.observability.growth import OnGrowth, watched_growth

SETTINGS_FILES = ("*.json", "*.model", "*.txt", "*.jinja")
"""Files of configuration and tokenizer."""
ALL_FILES = (*SETTINGS_FILES, "*.safetensors")
"""Pickled weights are not downloaded, because loading them can run code."""


def download_once(repository: str, revision: str, where: str, marker: Path, on_growth: OnGrowth) -> Path:
    """Downloads the files of a commit (ALL_FILES) and returns their folder. After the first success, which the file
    `marker` records, the cache is used without contacting the hub. `revision`: the commit. `where`: the field that
    errors name. `on_growth` is called with the number of bytes that the cache has of this repository.

    The caller must hold a lock. Raises the errors of `download_model`, and ConfigurationError if weights are
    missing."""
    if marker.exists():
        try:
            return Path(snapshot_download(repository, revision=revision, local_files_only=True))
        except LocalEntryNotFoundError:
            marker.unlink()
    with watched_growth(_cache_of(repository), on_growth):
        folder = download_model(repository, revision, where, ALL_FILES)
    missing = [name for name in _weight_files(folder) if not (folder / name).is_file()]
    if missing:
        raise ConfigurationError(
            f"{where}: {repository!r} at revision {revision!r} has no {missing[0]}; choose a model or "
            "revision whose weights are safetensors files"
        )
    marker.touch()
    return folder


def _cache_of(repository: str) -> Path:
    """Returns the folder into which the library downloads this repository."""
    return Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=repository, repo_type="model")


def _weight_files(folder: Path) -> Sequence[str]:
    """Returns the names of the files that must have the weights. Raises ConfigurationError for a damaged index."""
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return ["model.safetensors"]
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise ConfigurationError(
            f"{WHERE}: {index} has no weight_map (seen: {weight_map!r:.80}); choose another revision"
        )
    return sorted(set(map(str, weight_map.values())))


def download_model(repository: str, revision: str | None, where: str, files: Sequence[str]) -> Path:
    """Downloads the files of one revision that match the patterns `files`. Returns their folder, whose name is the
    commit.

    Raises ConfigurationError if the model does not exist, needs permission or has no config.json, and
    ResourceError if the hub is unreachable and the model is not in the cache, or if the disk fails. The messages start
    with `where`, the field of the job.
    """
    seen = f"{repository!r}" + (f" at revision {revision!r}" if revision else "")
    try:
        folder = Path(snapshot_download(repository, revision=revision, allow_patterns=list(files)))
    except HFValidationError as error:
        raise ConfigurationError(
            f"{where}: {seen} is neither a path nor a repository's name ({error}); name an existing path, or "
            "<owner>/<name>"
        ) from error
    except GatedRepoError as error:
        raise ConfigurationError(
            f"{where}: access to {seen} must be granted by its owner; request access, and set HF_TOKEN in spec.env"
        ) from error
    except RevisionNotFoundError as error:
        raise ConfigurationError(
            f"{where}: {seen} not found; name a branch, a tag or a commit of this repository"
        ) from error
    except RepositoryNotFoundError as error:
        raise ConfigurationError(
            f"{where}: {seen} not found on the Hugging Face hub; check the name, or set HF_TOKEN if it is private"
        ) from error
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        is_network_error = isinstance(error, LocalEntryNotFoundError | HfHubHTTPError | TimeoutError | ConnectionError)
        if not is_network_error and (failure := storage_failure(error)):
            raise ResourceError(
                f"{where}: {seen} cannot be stored in the local cache or read from it ({failure}); check the disk"
            ) from error
        if constants.HF_HUB_OFFLINE:
            raise ConfigurationError(
                f"{where}: {seen} not found in the local cache, and HF_HUB_OFFLINE disables downloads from the Hugging "
                "Face hub; use a local folder, or unset HF_HUB_OFFLINE"
            ) from error
        raise ResourceError(
            f"{where}: {seen} not found in the local cache, and the Hugging Face hub is unreachable "
            f"({str(error).splitlines()[0]}); check the network, or use a local folder"
        ) from error
    if not (folder / "config.json").is_file():
        raise ConfigurationError(f"{where}: {seen} has no config.json; choose a model in transformers' format")
    return folder
