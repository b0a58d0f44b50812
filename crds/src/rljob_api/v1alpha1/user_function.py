"""A function of the user's own in the place of a part of the learning rule."""

from __future__ import annotations

from rljob_api.base import WireModel
from rljob_api.scalars import FunctionPath


class Function(WireModel):
    """The user's own function, importable on PYTHONPATH as that of a reward is."""

    path: FunctionPath
    """`package.module:function`."""
