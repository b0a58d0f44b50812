"""A result that need not be waited for, in the place of that of a call."""

from __future__ import annotations

from dataclasses import dataclass

from rljob_trainer.batch.proto import DataProto


@dataclass(frozen=True)
class Known:
    """A batch that is there already."""

    batch: DataProto

    def result(self) -> DataProto:
        """The batch."""
        return self.batch
