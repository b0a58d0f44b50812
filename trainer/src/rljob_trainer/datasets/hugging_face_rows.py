"""Rows of a dataset of the Hugging Face hub, or of a folder in its layout, by the `datasets` library."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import cast

from datasets import load_dataset

from rljob_trainer.datasets.plain_values import plain_row
from rljob_trainer.errors import DatasetError, ResourceError


def hugging_face_rows(
    source: str, subset: str | None, split: str, revision: str | None, where: str
) -> Iterator[dict[str, object]]:
    """All rows of one split, as `plain_row` leaves them.

    Raises DatasetError, starting with `where`, or ResourceError if the hub cannot be reached.
    """
    try:
        rows = cast(
            "Iterator[Mapping[str, object]]", iter(load_dataset(source, subset, split=split, revision=revision))
        )
    except ConnectionError as error:
        raise ResourceError(
            f"{where}: {source!r} is not in the local cache, and the Hugging Face hub cannot be reached ({error}); "
            "check the name and the network, or name a folder"
        ) from error
    except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
        # The library raises any of these for missing data sets, subsets and splits, and for want of a network.
        raise DatasetError(
            f"{where}: cannot load {source!r} (subset {subset}, split {split}, revision {revision}): {error}; check "
            "the names"
        ) from error
    for row in rows:
        yield plain_row(row)
