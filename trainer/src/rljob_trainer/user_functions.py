"""Imports the user's own functions and classes, which a job names as `package.module:name`."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

from rljob_api.names import similar_names, standard_library_clash
from rljob_trainer.errors import ConfigurationError

TRAINER_FOLDER = Path(__file__).parent
MAX_FRAMES = 3
"""Maximum number of traceback frames in a message; the trainer's own frames are left out."""

_WITHOUT_RESULT: Mapping[str, Callable[[object], bool]] = {
    "an async function": inspect.iscoroutinefunction,
    "an async generator": inspect.isasyncgenfunction,
    "a generator (it has `yield`)": inspect.isgeneratorfunction,
}


def find_named(path: str, where: str) -> object:
    """Imports and returns the object that `path` names. Raises ConfigurationError, starting with `where`, if it cannot
    be imported or does not exist."""
    module_name, _, name = path.partition(":")
    if problem := standard_library_clash(path):
        raise ConfigurationError(f"{where}: {problem}")
    module = _imported(module_name, path, where)
    if name in vars(module):
        return vars(module)[name]
    near = similar_names(name, [each for each, value in vars(module).items() if callable(value)], max_names=3)
    hint = f"; did you mean {' or '.join(near)}?" if near else "; check the name"
    raise ConfigurationError(f"{where}: module {module_name} ({module.__file__}) has no {name!r}{hint}")


def refuse_missing_module(path: str, where: str) -> None:
    """Raises ConfigurationError, starting with `where`, if the module that `path` names cannot be found. Imports
    nothing. If only an import could show whether the module exists (for example because the code of its package may
    create it), the module counts as found."""
    if problem := standard_library_clash(path):
        raise ConfigurationError(f"{where}: {problem}")
    name, *inner = path.partition(":")[0].split(".")
    try:
        spec = importlib.util.find_spec(name)
    except ValueError:
        # The module is loaded but has no spec, such as a module that a test has created.
        return
    for part in inner:
        if spec is None or spec.submodule_search_locations is None or not _is_plain_package(spec):
            break
        name += f".{part}"
        spec = PathFinder.find_spec(name, list(spec.submodule_search_locations))
    if spec is None:
        raise _missing_module(name, path, where)


def is_async_function(found: object) -> bool:
    """Whether a call returns a coroutine."""
    return inspect.iscoroutinefunction(_called(found))


def plain_function(
    found: object, path: str, where: str, *, may_be_async: bool = False
) -> tuple[Callable[..., object], inspect.Signature]:
    """Returns `found` and its signature if it is a plain function or a callable object: not a class, not a generator,
    and not async unless `may_be_async`. Raises ConfigurationError, starting with `where`, otherwise."""
    is_allowed = may_be_async and is_async_function(found)
    if not callable(found) or (_gives_no_result(found) and not is_allowed):
        raise ConfigurationError(f"{where}: {path} is {kind_of(found)}; name a plain function")
    try:
        signature = inspect.signature(found)
    except (ValueError, TypeError) as error:
        # Functions written in C may have no signature.
        raise ConfigurationError(
            f"{where}: {path} has no signature that Python can read ({error}); name a plain function"
        ) from error
    if isinstance(found, type):
        raise ConfigurationError(f"{where}: {path} is a class; name a plain function or a callable object")
    return found, signature


def refuse_hiding_modules(error: Exception) -> None:
    """Raises ConfigurationError if `error`, raised by an import of the trainer, comes from a user's file that has the
    name of an installed package or a standard module, such as numpy.py or queue.py.

    Raises nothing if the user's folder contains a working version of the package and the import failed for another
    reason, such as a missing system library."""
    libraries = [sysconfig.get_path(name) for name in ("purelib", "platlib")]
    for name, module in sys.modules.items():
        file = vars(module).get("__file__")
        if "." in name or name == "__main__" or not isinstance(file, str) or _is_installed(Path(file)):
            continue
        if Path(file).is_relative_to(TRAINER_FOLDER) or not _comes_from(error, name, Path(file)):
            continue
        is_standard = name in sys.stdlib_module_names
        if is_standard or PathFinder.find_spec(name, libraries) is not None:
            hidden = f"Python's own module {name!r}" if is_standard else f"the installed package {name!r}"
            raise ConfigurationError(
                f"{file}: hides {hidden}, which the trainer needs; rename the file, and use the new name in the job"
                f"\n{last_lines(error)}"
            ) from error


def kind_of(found: object) -> str:
    """Describes the kind of an object for an error message, such as `a generator (it has `yield`)`."""
    called = _called(found)
    return next((kind for kind, is_kind in _WITHOUT_RESULT.items() if is_kind(called)), f"a {type(found).__name__}")


def last_lines(error: BaseException) -> str:
    """Formats the error with the last frames of its traceback outside the trainer."""
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [frame for frame in frames if not Path(frame.filename).is_relative_to(TRAINER_FOLDER)]
    lines = [*traceback.format_list(theirs[-MAX_FRAMES:]), *traceback.format_exception_only(error)]
    return "".join(lines).rstrip()


def _comes_from(error: BaseException | None, name: str, file: Path) -> bool:
    """Whether the error or one of its causes comes from the module `name` in `file`: the module or a submodule cannot
    be imported, lacks an attribute, or raised the error itself."""
    files = file.parent if file.name == "__init__.py" else file
    while error is not None:
        if isinstance(error, ImportError | AttributeError):
            frames = traceback.extract_tb(error.__traceback__)
            is_by_its_code = any(Path(frame.filename).is_relative_to(files) for frame in frames)
            if is_by_its_code or _module_of(error).partition(".")[0] == name:
                return True
        error = error.__cause__
    return False


def _module_of(error: ImportError | AttributeError) -> str:
    """Returns the name of the module that cannot be imported or lacks an attribute; empty if the error has no name."""
    if isinstance(error, ImportError):
        return error.name or ""
    return error.obj.__name__ if isinstance(error.obj, ModuleType) else ""


def _gives_no_result(found: object) -> bool:
    """Whether a call only returns a coroutine or a generator instead of a result."""
    called = _called(found)
    return any(is_kind(called) for is_kind in _WITHOUT_RESULT.values())


def _called(found: object) -> object:
    """Returns the function that runs when the object is called."""
    while isinstance(found, partial):
        found = found.func
    if inspect.isroutine(found) or isinstance(found, type) or not callable(found):
        return found
    return type(found).__call__


def _imported(module_name: str, path: str, where: str) -> ModuleType:
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and (module_name == error.name or module_name.startswith(error.name + ".")):
            _refuse_hidden(path, where, is_found=False)
            raise _missing_module(error.name, path, where) from error
        raise _import_failed(error, path, where) from error
    except BaseException as error:
        # A user's module may raise anything while it is imported, even SystemExit. Every such error is the job's fault.
        raise _import_failed(error, path, where) from error
    _refuse_hidden(path, where, is_found=True)
    return module


def _missing_module(name: str, path: str, where: str) -> ConfigurationError:
    *parents, last = name.split(".")
    files = {file.stem: file for file in _user_modules(parents)}
    near = similar_names(last, files)
    advice = "add its folder to PYTHONPATH, or to spec.code on a cluster"
    if near:
        advice = f"did you mean {'.'.join([*parents, near[0]])} ({files[near[0]]})?"
    return ConfigurationError(f"{where}: no module {name!r} (looking for {path}); {advice}")


def _user_modules(parents: list[str]) -> Iterator[Path]:
    """Yields the user's files and folders that can be imported as submodules of the package `parents`, or as top-level
    modules if `parents` is empty."""
    for folder in (Path(each, *parents) for each in sys.path):
        if _is_installed(folder) or not folder.is_dir():
            continue
        with suppress(OSError):
            for file in sorted(folder.iterdir()):
                if file.suffix == ".py" or (file / "__init__.py").exists():
                    yield file


def _is_plain_package(spec: ModuleSpec) -> bool:
    """Whether a package of the user has no code of its own that could create submodules."""
    if spec.origin is None:
        return True
    return not _is_installed(Path(spec.origin)) and Path(spec.origin).stat().st_size == 0


def _refuse_hidden(path: str, where: str, *, is_found: bool) -> None:
    """Raises ConfigurationError if an installed package was imported instead of the user's file or folder of the same
    name, because other code had already imported the package or because the package comes first on sys.path."""
    top = path.partition(":")[0].partition(".")[0]
    origin = vars(sys.modules[top]).get("__file__") if top in sys.modules else None
    if not isinstance(origin, str) or not _is_installed(Path(origin)):
        return
    # A folder without `__init__.py` may contain only data. It counts only if the package lacks the requested module.
    names = (f"{top}.py", f"{top}/__init__.py" if is_found else top)
    for file in (Path(folder, name) for folder in sys.path for name in names):
        if file.exists() and not _is_installed(file):
            raise ConfigurationError(
                f"{where}: {file} is hidden by the installed package {top!r} ({origin}), which was imported instead"
                f" (seen: {path!r}); rename your file or folder, and use the new name here"
            )


def _is_installed(file: Path) -> bool:
    libraries = [folder for name, folder in sysconfig.get_paths().items() if "lib" in name]
    return any(file.resolve().is_relative_to(Path(folder).resolve()) for folder in libraries)


def _import_failed(error: BaseException, path: str, where: str) -> ConfigurationError:
    return ConfigurationError(f"{where}: importing {path} failed; fix this error:\n{last_lines(error)}")
