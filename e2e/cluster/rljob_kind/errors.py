"""The exceptions of this package."""

from __future__ import annotations

from collections.abc import Sequence


class KindError(Exception):
    """The cluster, or something that it needs, could not be created; the message says what to do."""


class CommandError(KindError):
    """A program failed. `output` is the end of what it printed."""

    def __init__(self, command: Sequence[str], exit_code: int, output: str) -> None:
        super().__init__(f"{' '.join(command)}: exit code {exit_code}: {output[-4000:]}")
        self.exit_code = exit_code
        self.output = output
