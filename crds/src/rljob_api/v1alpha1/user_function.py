"""A user-defined advantage or policy loss."""

from __future__ import annotations

from rljob_api.base import WireModel
from rljob_api.scalars import FunctionPath


class Function(WireModel):
    """A user-defined function, in a module that Python can import (see spec.code)."""

    path: FunctionPath
    """`package.module:function`, for example `my_losses:tapered`."""
