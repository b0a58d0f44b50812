"""Chooses which files of a job's folder in its claim are copied, and where each goes.

The copy looks like the folder of a run on one machine: the content of `run/` directly, and `checkpoints/`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from rljob.errors import RejectedError
from rljob_api.constants import (
    LOGS_FOLDER,
    POD_CHECKPOINT_FOLDER,
    POD_RUN_FOLDER,
    POD_STORAGE_FOLDER,
    RUN_STATE_FILE_NAME,
)

RUN_FOLDER = POD_RUN_FOLDER.removeprefix(f"{POD_STORAGE_FOLDER}/")
CHECKPOINT_FOLDER = POD_CHECKPOINT_FOLDER.removeprefix(f"{POD_STORAGE_FOLDER}/")
MARKER_FILE = ".rljob-results.json"
"""File in the local folder that names the job whose results are there."""
PARTIAL_FOLDER = ".partial"
"""Folder in the local folder for files that are not complete yet."""
_NEVER = (RUN_STATE_FILE_NAME, "view.html", "initial-models")
"""Never copied, like names that begin with a point, such as `.lock`. The command writes the first two itself: it must
not show a page that the job's own code has written. The last one has copies of models of other runs."""
_MANIFEST = "manifest.json"
"""A checkpoint without this file is not complete."""
_STARTS = f"{CHECKPOINT_FOLDER}/starts/"
"""Folder with the lists of the checkpoints that each start of the trainer accepts."""


class Part(StrEnum):
    """A part of a job's results."""

    MODEL = "model"
    METRICS = "metrics"
    SAMPLES = "samples"
    PAGE = "page"
    PROFILES = "profiles"
    LOGS = "logs"
    CHECKPOINTS = "checkpoints"


_NAMES: Mapping[Part, Collection[str]] = {
    Part.MODEL: ("export", "export-best"),
    Part.METRICS: ("metrics.jsonl", "tensorboard", "plots"),
    Part.SAMPLES: ("samples.jsonl", "tokens"),
    Part.PROFILES: ("profiles",),
    Part.LOGS: (LOGS_FOLDER,),
    Part.CHECKPOINTS: ("model-config",),
}
"""Files and folders of the run folder that belong to a part. The checkpoints themselves are beside the run folder."""
_FOR_PAGE = (
    *("attempts.jsonl", "job.yaml", "metrics.jsonl", "resolved.yaml", "samples.jsonl"),
    *("timelines", "tokens"),
)


@dataclass(frozen=True)
class Selection:
    """Which files are copied: all of the run folder except `without`, or only the files of `only`."""

    only: frozenset[Part] = frozenset()
    """Empty: everything except `without`."""
    without: frozenset[Part] = frozenset({Part.LOGS, Part.CHECKPOINTS})
    tail_bytes: int | None = None
    """Only so many bytes of the end of the samples are needed; the copy lacks the bytes before them (a sparse file).
    None for all bytes."""

    @property
    def has_page(self) -> bool:
        """Whether the page is wanted."""
        return not self.only or Part.PAGE in self.only

    @property
    def folders(self) -> list[str]:
        """Folders to list, relative to the job's folder."""
        return [RUN_FOLDER, *([CHECKPOINT_FOLDER] if self._has(Part.CHECKPOINTS) else [])]

    @property
    def skipped_folders(self) -> list[str]:
        """Folders of the run folder that need not be listed, relative to the job's folder."""
        return [f"{RUN_FOLDER}/{name}" for names in _NAMES.values() for name in names if not self._has_name(name)]

    def wants(self, path: str) -> bool:
        """Whether this file is copied. `path`: relative to the job's folder, such as `run/metrics.jsonl`."""
        top, _, rest = path.partition("/")
        if top == CHECKPOINT_FOLDER:
            return self._has(Part.CHECKPOINTS)
        return top == RUN_FOLDER and self._has_name(rest.partition("/")[0])

    def start_of(self, path: str, size: int) -> int:
        """The first byte of a file that is copied. It stays the same while the file grows by less than `tail_bytes`, so
        that a later copy reads only what is new."""
        if self.tail_bytes is None or path != f"{RUN_FOLDER}/samples.jsonl":
            return 0
        return max(0, size // self.tail_bytes - 1) * self.tail_bytes

    def _has(self, part: Part) -> bool:
        return part in self.only if self.only else part not in self.without

    def _has_name(self, name: str) -> bool:
        """Whether a file or folder directly in the run folder is copied. Names that this version does not know belong
        to no part; so they are copied unless the user chose parts."""
        if name.casefold() in _NEVER or name.startswith("."):
            return False
        part = next((part for part, names in _NAMES.items() if name in names), None)
        if part is not None and self._has(part):
            return True
        if Part.PAGE in self.only:
            return name in _FOR_PAGE
        return part is None and not self.only


DEFAULT_SELECTION = Selection()
FOR_PAGE = Selection(only=frozenset({Part.PAGE}), tail_bytes=8 * 2**20)
"""The files that the page needs, and no more of them than it reads."""


def selection_of(only: Collection[str], *, checkpoints: bool = False, logs: bool = False) -> Selection:
    """The selection of these parts; without any, of everything except checkpoints and logs, unless they are wanted.
    Raises RejectedError."""
    unknown = sorted(set(only) - set(Part))
    if unknown:
        raise RejectedError(f"only: there is no part {unknown[0]}; use some of {', '.join(Part)}")
    if only and (checkpoints or logs):
        raise RejectedError("only: cannot be combined with checkpoints or logs; add them to the parts instead")
    without = {part for part, is_wanted in ((Part.CHECKPOINTS, checkpoints), (Part.LOGS, logs)) if not is_wanted}
    return Selection(frozenset(Part(part) for part in only), frozenset(without))


def complete_checkpoints(paths: Collection[str]) -> list[str]:
    """The paths without files of checkpoints that have no manifest and without unfinished lists of starts.

    In their order, a copy that is stopped never looks complete: the lists of the starts are first, because without them
    checkpoints that a later start does not accept would look valid, and the manifests are last.
    """
    given = set(paths)
    kept = [
        path
        for path in paths
        if not path.startswith(f"{CHECKPOINT_FOLDER}/")
        or (path.endswith(".json") if path.startswith(_STARTS) else manifest_of(path) in given)
    ]
    return sorted(kept, key=lambda path: (path == manifest_of(path), not path.startswith(_STARTS), path))


def manifest_of(path: str) -> str | None:
    """The path of the manifest of the checkpoint to which a file belongs; None for files outside of checkpoints."""
    top, _, rest = path.partition("/")
    return f"{top}/{rest.partition('/')[0]}/{_MANIFEST}" if top == CHECKPOINT_FOLDER else None


def is_withheld(path: str, incomplete: Collection[str | None]) -> bool:
    """Whether a file is a manifest that must not be copied: another file of its checkpoint is missing, or one of the
    lists of the starts, or the list of the checkpoints.

    Args:
        incomplete: `manifest_of` of each file and folder that is missing.
    """
    needed = (path, manifest_of(_STARTS), manifest_of(CHECKPOINT_FOLDER))
    return path == manifest_of(path) and any(each in incomplete for each in needed)


def local_path(path: str, folder: Path) -> Path | None:
    """Where a file goes in the local folder; None if its path could leave the folder, or is not usable. The path comes
    from the pod, which is not trusted: the job's own code may have written anything.

    Args:
        path: Path relative to the job's folder, such as `run/export/config.json`.
    """
    top, *rest = path.split("/")
    names = rest if top == RUN_FOLDER else [top, *rest]
    if top not in (RUN_FOLDER, CHECKPOINT_FOLDER) or not rest:
        return None
    # On Windows, `name` of a path drops what is before a backslash or a colon.
    if any(name in ("", ".", "..") or "\0" in name or Path(name).name != name for name in names):
        return None
    # Some file systems treat upper and lower case as the same; so `.PARTIAL` is rejected, too.
    if names[0].casefold() in (MARKER_FILE, PARTIAL_FOLDER):
        return None
    # `run/` becomes the folder itself, so this would be mixed with the job's checkpoints.
    if top == RUN_FOLDER and names[0].casefold() == CHECKPOINT_FOLDER:
        return None
    return folder.joinpath(*names)
