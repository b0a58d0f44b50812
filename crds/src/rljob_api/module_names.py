"""Names that a file of the user's cannot have as a Python module. Light: every scoring process imports it."""

from __future__ import annotations

import sys


def standard_module_problem(path: str) -> str | None:
    """An error message if the user's module has the name of a standard library module, else None. Python imports only
    one of the two, and code that needs the other one fails."""
    top = path.partition(":")[0].partition(".")[0]
    if top not in sys.stdlib_module_names:
        return None
    return (
        f"{top!r} is the name of a module of Python's standard library, which is imported in place of yours or fails"
        f" because of it (seen: {path!r}); rename your file or folder, for example to my_{top.strip('_')}, and name"
        " it here"
    )
