"""The order in which parallel test processes get the test files: each keeps to one folder as long as it has files.

The first test of a folder often starts what all its tests share: a Ray cluster, an API server, a process with torch and
vLLM. Each process that runs tests of a folder starts its own, which takes ten seconds of a core and more memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable

from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController


class FolderScheduling(LoadFileScheduling):  # type: ignore[misc]
    """`--dist loadfile` with `next_file`."""

    def _assign_work_unit(self, node: WorkerController) -> None:
        last = {each: _folder(list(files)[-1]) for each, files in self.assigned_work.items() if files}
        own = last.pop(node, None)
        self.workqueue.move_to_end(next_file(self.workqueue, own, last.values()), last=False)
        super()._assign_work_unit(node)


def next_file(waiting: Iterable[str], own: str | None, others: Collection[str]) -> str:
    """The path of the file that a process gets: the first one of the folder that it works on (`own`), otherwise of the
    first folder on which no other process works (`others`), otherwise of the folder that has the most files left.

    `waiting` are the paths of the files that no process has yet, at least one.
    """
    first: dict[str, str] = {}
    num_left: Counter[str] = Counter()
    for path in waiting:
        first.setdefault(_folder(path), path)
        num_left[_folder(path)] += 1
    free = [folder for folder in first if folder not in others]
    if own in first:
        return first[own]
    return first[free[0]] if free else first[num_left.most_common(1)[0][0]]


def _folder(path: str) -> str:
    return path.rpartition("/")[0]
