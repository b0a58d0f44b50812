"""The program of a sandboxed process: it runs the code of a response as a script, calls one of its functions, serves
the requests of an assert statement, or runs such a statement.

The parent passes the descriptors. The process of the code has only the code and the input of one test: expected outputs
are never in its memory, and an assert statement runs in another process.
"""

from __future__ import annotations

import ast
import atexit
import base64
import contextlib
import importlib
import json
import os
import sys
import threading
import traceback
import types
from collections import Counter
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any, TextIO

from rljob_trainer.sandbox.exchange import Connection, Names, UnsupportedTest, serve

FIRST_CHANNEL = 3
"""The first descriptor after standard input, output and error."""
CODE_FILE = "<response>"
PRELUDE_MODULES = (
    *("bisect", "collections", "copy", "datetime", "functools", "heapq", "itertools", "math", "operator", "random"),
    *("re", "string", "sys"),
)
PRELUDE = f"""
import {", ".join(PRELUDE_MODULES)}
from bisect import *
from collections import *
from functools import *
from heapq import *
from itertools import *
from math import *
from typing import *
from builtins import *
"""
"""Runs before code whose function is called, as on LeetCode and in the reward functions of DeepCoder and PRIME:
solutions of such tasks use `List` and `deque` without an import. The builtins come last, because `math` has another
`pow`."""


USUAL_MODULES = ("dataclasses", "decimal", "enum", "fractions", "io", "json", "statistics", "time", "numpy")
"""Further modules that many programs import. NumPy needs 0.2 s to load; it may be missing."""
MODULES_OF_STATEMENTS = {**{name: name for name in (*PRELUDE_MODULES, *USUAL_MODULES, "typing")}, "np": "numpy"}
"""The modules that a statement can use without an import, by their names in statements."""


class Mode(StrEnum):
    """What the process does with the program."""

    SCRIPT = "SCRIPT"
    """Runs the code as `__main__`."""
    CALL = "CALL"
    """Calls `function` with `arguments`, and writes the returned value as JSON into the channel."""
    SERVE = "SERVE"
    """Executes the code, then reads requests from the first channel and writes replies to the second."""
    STATEMENT = "STATEMENT"
    """Runs an assert statement: requests go to the first channel, replies come from the second one, and the result goes
    to the third one."""


def load_usual_modules() -> None:
    """Loads the modules that most programs import, so that processes that are forked later have them."""
    exec(PRELUDE, {})
    for name in USUAL_MODULES:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


def run(program: Mapping[str, Any]) -> None:
    """Runs the program and ends this process, with exit code 0 if it raised nothing."""
    exit_code = 0
    output = sys.stdout
    try:
        _run(program)
    except SystemExit as error:
        exit_code = 0 if error.code is None else error.code if isinstance(error.code, int) else 1
        if not isinstance(error.code, int | None):
            print(error.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc(limit=-3)
        exit_code = 1
    _finish(exit_code, [output, sys.stderr])


def _finish(exit_code: int, streams: Sequence[TextIO]) -> None:
    """Ends the process as Python does: waits for threads, runs the functions of `atexit` and flushes. A normal exit
    would need 10 ms more to free the memory."""
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        for stream in (*streams, sys.stdout, sys.__stdout__):
            if stream is not None:
                stream.flush()
    except BaseException:
        exit_code = exit_code or 1
    os._exit(exit_code & 0xFF)


def _run(program: Mapping[str, Any]) -> None:
    match Mode(program["mode"]):
        case Mode.SCRIPT:
            _define(program["code"], "__main__", "")
        case Mode.CALL:
            function = _function(_define(program["code"], "solution", PRELUDE), program["function"])
            value = function(*program["arguments"], **program["keywords"])
            with os.fdopen(FIRST_CHANNEL, "w") as channel:
                json.dump(value, channel, default=_plain)
        case Mode.SERVE:
            namespace = _define(program["code"], "solution", "")
            with os.fdopen(FIRST_CHANNEL, "rb") as requests, os.fdopen(FIRST_CHANNEL + 1, "wb") as replies:
                serve(namespace, requests, replies)
        case Mode.STATEMENT:
            with os.fdopen(FIRST_CHANNEL + 2, "w") as channel:
                json.dump(_run_statement(program["statement"]), channel)


def _define(code: str, name: str, prelude: str) -> dict[str, Any]:
    """Runs the code in a new module."""
    module = types.ModuleType(name)
    sys.modules[name] = module
    exec(prelude, module.__dict__)
    exec(compile(code, CODE_FILE, "exec", dont_inherit=True), module.__dict__)
    return module.__dict__


def _function(namespace: Mapping[str, Any], name: str) -> Any:
    """The function, or the method of LeetCode's class `Solution`."""
    if callable(namespace.get(name)):
        return namespace[name]
    if hasattr(namespace.get("Solution"), name):
        return getattr(namespace["Solution"](), name)
    raise NameError(f"the code defines no function {name!r}")


def _plain(value: object) -> object:
    """The JSON of a value that JSON does not have: scalars and arrays of NumPy, and other sequences."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, bytes):
        return {"bytes": base64.b64encode(value).decode()}
    return list(value)  # type: ignore[call-overload]


def _run_statement(statement: str) -> dict[str, str]:
    """The result of an assert statement."""
    try:
        tree = ast.parse(statement)
        compiled = compile(tree, "<test>", "exec", dont_inherit=True)
    except Exception as error:
        return {"unusable": f"{type(error).__name__}: {error}"}
    # Not closed here: if the code has ended its process, closing fails as writing does.
    requests = os.fdopen(FIRST_CHANNEL, "wb")
    with os.fdopen(FIRST_CHANNEL + 1, "rb") as replies:
        names = Names(Connection(requests, replies), _modules_of(tree))
        try:
            exec(compiled, names)
        except UnsupportedTest as error:
            return {"unusable": f"{type(error).__name__}: {error}"}
        except BaseException as error:
            return {"failed": f"{type(error).__name__}: {error}"[:1000]}
        return {"passed": ""}


def _modules_of(statement: ast.AST) -> dict[str, types.ModuleType]:
    """The modules that the statement uses without an import, such as `math` in `assert math.isclose(f(1), 2)`. A name
    is read as a module only if each use of it is an attribute that the module has. Otherwise it is a name of the code,
    such as a function `copy`."""
    uses: dict[str, list[str]] = {name: [] for name in MODULES_OF_STATEMENTS}
    num_names = Counter(node.id for node in ast.walk(statement) if isinstance(node, ast.Name))
    for node in ast.walk(statement):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in uses:
            uses[node.value.id].append(node.attr)
    found = {}
    for name, attributes in uses.items():
        module = sys.modules.get(MODULES_OF_STATEMENTS[name])
        if (
            module is not None
            and len(attributes) == num_names[name]
            and all(hasattr(module, each) for each in attributes)
        ):
            found[name] = module
    return found
