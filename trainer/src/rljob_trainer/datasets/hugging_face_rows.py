"""Reads rows of a dataset on the Hugging Face hub, or in a folder with its layout, with the `datasets` library."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import cast

from datasets import load_dataset
from huggingface_hub.errors import HfHubHTTPError

from rljob_trainer.errors import DatasetError, ResourceError, TrainerError, described, storage_checked, storage_failure

NETWORK_LIBRARIES = ("aiohttp", "httpcore", "httpx", "requests", "urllib3")
NETWORK_WORDS = ("Connect", "Network", "Protocol", "ReadError", "Timeout")
"""Words in the names of these libraries' network errors. Other errors of these libraries, such as HTTPStatusError, mean
that the server has responded."""
TOO_MANY_REQUESTS = 429
DISK_FULL = "Not enough disk space"
"""Beginning of the message with which `datasets` reports a full disk, in an error without errno."""


def hugging_face_rows(
    source: str, subset: str | None, split: str, revision: str | None, where: str
) -> Iterator[Mapping[str, object]]:
    """Yields all rows of one split, with values of any type.

    Raises DatasetError, starting with `where`, or ResourceError if the hub cannot be reached or the disk fails.
    """
    seen = f"{source!r} (subset {subset}, split {split}, revision {revision})"
    try:
        rows = cast(
            "Iterator[Mapping[str, object]]", iter(load_dataset(source, subset, split=split, revision=revision))
        )
    except MemoryError:
        raise
    except Exception as error:
        if _is_of_network(error):
            raise ResourceError(
                f"{where}: {source!r} is not in the local cache, and the Hugging Face hub is unreachable "
                f"({described(error)}); check the name and the network, or use a local folder"
            ) from error
        if failure := storage_failure(error) or (str(error) if str(error).startswith(DISK_FULL) else None):
            raise ResourceError(
                f"{where}: {seen}: the disk or file system failed ({failure}); check the disk, the mount and the free "
                "space"
            ) from error
        # The library and its file readers raise many types of errors: for missing datasets, subsets and splits, for a
        # missing network, for damaged files and for damaged headers of README.md.
        raise DatasetError(f"{where}: cannot load {seen}: {described(error)}; check the names and the files") from error
    number = -1
    try:
        with storage_checked(f"{where}: {seen}"):
            for number, row in enumerate(rows):  # noqa: B007 (after an error)
                yield row
    except (TrainerError, MemoryError):
        raise
    except Exception as error:
        # Values are only decoded here, which fails for strings that are not UTF-8 and for damaged images.
        raise DatasetError(
            f"{where}: row {number + 1} of {seen} cannot be read ({described(error)}); fix it, or remove the row or "
            "the column"
        ) from error


def _is_of_network(error: BaseException) -> bool:
    """Whether the error or one of its causes means that a server is unreachable or has failed."""
    if isinstance(error, ConnectionError | TimeoutError):
        return True
    if isinstance(error, HfHubHTTPError) and error.response is not None:
        return error.response.status_code >= 500 or error.response.status_code == TOO_MANY_REQUESTS
    library, name = type(error).__module__.partition(".")[0], type(error).__name__
    if library in NETWORK_LIBRARIES and any(word in name for word in NETWORK_WORDS):
        return True
    return error.__cause__ is not None and _is_of_network(error.__cause__)
