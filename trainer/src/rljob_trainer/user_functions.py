"""What the job names by `package.module:name` in the user's own code."""

from __future__ import annotations

import importlib
import inspect
import traceback
from pathlib import Path
from types import ModuleType

from rljob_api.near_names import near_names
from rljob_trainer.errors import ConfigurationError

OUR_FOLDER = Path(__file__).parent
MAX_FRAMES = 3
"""Of a traceback that go into a message; ours are left out."""


def find_named(path: str, where: str) -> object:
    """What `path` names. Raises ConfigurationError, starting with `where`, if it cannot be imported or is not there."""
    module_name, _, name = path.partition(":")
    module = _imported(module_name, path, where)
    if name in vars(module):
        return vars(module)[name]
    near = near_names(name, [each for each, value in vars(module).items() if callable(value)], max_names=3)
    hint = f"; did you mean {' or '.join(near)}?" if near else "; check the name"
    raise ConfigurationError(f"{where}: module {module_name} ({module.__file__}) has no {name!r}{hint}")


def kind_of(found: object) -> str:
    """For messages about something that is not what was looked for."""
    return "an async function" if inspect.iscoroutinefunction(found) else f"a {type(found).__name__}"


def last_lines(error: BaseException) -> str:
    """The error with the last places in the user's code, and what they called, that led to it."""
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [frame for frame in frames if not Path(frame.filename).is_relative_to(OUR_FOLDER)]
    lines = [*traceback.format_list(theirs[-MAX_FRAMES:]), *traceback.format_exception_only(error)]
    return "".join(lines).rstrip()


def _imported(module_name: str, path: str, where: str) -> ModuleType:
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and (module_name == error.name or module_name.startswith(error.name + ".")):
            raise ConfigurationError(
                f"{where}: no module {error.name!r} (looking for {path}); put the folder that holds it on PYTHONPATH, "
                "or in spec.code on a cluster"
            ) from error
        raise _import_failed(error, path, where) from error
    except BaseException as error:
        # A module may raise anything while it is imported, SystemExit included; all of it is the job's fault.
        raise _import_failed(error, path, where) from error


def _import_failed(error: BaseException, path: str, where: str) -> ConfigurationError:
    return ConfigurationError(f"{where}: importing {path} failed; mend it:\n{last_lines(error)}")
