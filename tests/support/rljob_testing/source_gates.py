"""The repository's rules for source text. Each gate takes files and returns one line per violation."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_MODULES_OF_FOLDER = 30
MAX_CHAIN = 9
VAGUE_NAMES = frozenset({"util", "utils", "common", "helper", "helpers", "misc"})
UNSAFE_MODULES = frozenset({"pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve"})
UNSAFE_BUILTINS = frozenset({"eval", "exec", "compile", "__import__"})
SANDBOXED = frozenset({"rljob_trainer.sandbox.programs"})
"""Modules whose processes may run code that arrives as data, because the kernel confines them."""
UNSAFE_CALLS = frozenset({"torch.load", "torch.save", "os.system", "numpy.load", "np.load"})
ENVIRONMENT_NAMES = frozenset({"environ", "environb", "getenv", "putenv", "unsetenv"})

_Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Source:
    """One Python file: `module` is its dotted name, such as `rljob_cli.local.run`."""

    path: Path
    module: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        """The parsed file."""
        return ast.parse(self.text, str(self.path))

    @property
    def is_package(self) -> bool:
        """Whether the file is an `__init__.py`."""
        return self.path.name == "__init__.py"


def sources_below(root: Path) -> list[Source]:
    """All Python files below a folder that is on the import path."""
    return [_source(root, path) for path in sorted(root.rglob("*.py"))]


def _source(root: Path, path: Path) -> Source:
    parts = path.relative_to(root).with_suffix("").parts
    named = parts[:-1] if parts[-1] == "__init__" else parts
    return Source(path, ".".join(named), path.read_text(encoding="utf-8"))


def long_files(sources: Iterable[Source]) -> list[str]:
    """Files of more than 400 lines."""
    found = []
    for source in sources:
        num_lines = len(source.text.splitlines())
        if num_lines > MAX_FILE_LINES:
            found.append(f"{source.path}: {num_lines} lines, at most {MAX_FILE_LINES}")
    return found


def long_functions(sources: Iterable[Source]) -> list[str]:
    """Functions of more than 60 lines, docstring included."""
    found = []
    for source in sources:
        for node in ast.walk(source.tree):
            if isinstance(node, _Function) and node.end_lineno is not None:
                num_lines = node.end_lineno - node.lineno + 1
                if num_lines > MAX_FUNCTION_LINES:
                    found.append(f"{source.path}:{node.lineno}: {node.name} has {num_lines} lines")
    return found


def vague_names(sources: Iterable[Source]) -> list[str]:
    """Modules and packages whose name does not say what they contain."""
    return [
        f"{source.path}: the name must say what the module contains"
        for source in sources
        if VAGUE_NAMES & set(source.module.split("."))
    ]


def undocumented(sources: Iterable[Source]) -> list[str]:
    """Non-empty modules, public classes and public functions without a docstring."""
    found = []
    for source in sources:
        tree = source.tree
        if tree.body and ast.get_docstring(tree) is None:
            found.append(f"{source.path}:1: module {source.module}")
        found += [f"{source.path}:{node.lineno}: {name}" for name, node in _public(tree.body, "")]
    return found


def _public(body: Sequence[ast.stmt], prefix: str) -> Iterator[tuple[str, ast.stmt]]:
    for node in body:
        if not isinstance(node, _Function | ast.ClassDef) or node.name.startswith("_"):
            continue
        if ast.get_docstring(node) is None and not _is_overload(node):
            yield prefix + node.name, node
        if isinstance(node, ast.ClassDef):
            yield from _public(node.body, f"{prefix}{node.name}.")


def _is_overload(node: _Function | ast.ClassDef) -> bool:
    return any(ast.unparse(decorator).split(".")[-1] == "overload" for decorator in node.decorator_list)


def misplaced_imports(sources: Iterable[Source], places: Mapping[str, Sequence[str]]) -> list[str]:
    """Imports of a third-party package outside the modules or packages that may import it."""
    found = []
    for source in sources:
        for name, line in _imported_names(source):
            allowed = places.get(name.split(".")[0])
            if allowed is not None and not any(_within(source.module, place) for place in allowed):
                found.append(f"{source.path}:{line}: {name} belongs in {', '.join(allowed) or 'no module'}")
    return found


def environment_reads(sources: Iterable[Source]) -> list[str]:
    """Uses of environment variables outside modules called `settings`."""
    found = []
    for source in sources:
        if source.module.split(".")[-1] == "settings":
            continue
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Attribute) and node.attr in ENVIRONMENT_NAMES and ast.unparse(node.value) == "os":
                found.append(f"{source.path}:{node.lineno}: {ast.unparse(node)} belongs in settings.py")
            if isinstance(node, ast.ImportFrom) and node.module == "os":
                found += [
                    f"{source.path}:{node.lineno}: os.{alias.name} belongs in settings.py"
                    for alias in node.names
                    if alias.name in ENVIRONMENT_NAMES
                ]
    return found


def unsafe_code(sources: Iterable[Source]) -> list[str]:
    """Ways to run code that arrives as data: pickle and similar modules, torch.load, eval, shells."""
    found = []
    for source in sources:
        if source.module in SANDBOXED:
            continue
        for name, line in _imported_names(source):
            if name.split(".")[0] in UNSAFE_MODULES:
                found.append(f"{source.path}:{line}: {name}")
        for node in ast.walk(source.tree):
            if not isinstance(node, ast.Call):
                continue
            called = ast.unparse(node.func)
            shell = any(word.arg == "shell" and ast.unparse(word.value) != "False" for word in node.keywords)
            if called in UNSAFE_BUILTINS or called in UNSAFE_CALLS or shell:
                found.append(f"{source.path}:{node.lineno}: {called}")
    return found


def import_time_work(sources: Iterable[Source]) -> list[str]:
    """Statements that do something at import: bare calls, loops, with-blocks. `__main__` modules may."""
    found = []
    for source in sources:
        for node in source.tree.body:
            call = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call | ast.Await)
            if call or isinstance(node, ast.For | ast.While | ast.With | ast.Delete):
                found.append(f"{source.path}:{node.lineno}: {ast.unparse(node).splitlines()[0]}")
    return found


def repeated_constants(sources: Iterable[Source]) -> list[str]:
    """Names in capitals to which a module assigns twice."""
    found = []
    for source in sources:
        seen: set[str] = set()
        for node in source.tree.body:
            single = [node.target] if isinstance(node, ast.AnnAssign) else []
            for target in node.targets if isinstance(node, ast.Assign) else single:
                if isinstance(target, ast.Name) and target.id.isupper():
                    if target.id in seen:
                        found.append(f"{source.path}:{node.lineno}: {target.id} is assigned twice")
                    seen.add(target.id)
    return found


def import_cycles(sources: Sequence[Source]) -> list[str]:
    """Groups of modules that import each other in a cycle. Imports inside functions and for type checking count."""
    modules = {source.module for source in sources}
    graph = {source.module: _imported_modules(source, modules) for source in sources}
    return [" <-> ".join(sorted(group)) for group in _circles(graph)]


def crowded_folders(sources: Iterable[Source]) -> list[str]:
    """Folders with more than 30 modules."""
    numbers = Counter(source.path.parent for source in sources if not source.is_package)
    return [
        f"{folder}: {number} modules, at most {MAX_MODULES_OF_FOLDER}"
        for folder, number in numbers.items()
        if number > MAX_MODULES_OF_FOLDER
    ]


def long_import_chains(sources: Sequence[Source]) -> list[str]:
    """Import chains of more than 9 modules within one folder: the first imports the second, that one the third, and so
    on. Modules must not import each other in a cycle."""
    folders = {source.module: source.path.parent for source in sources if not source.is_package}
    graph = {
        source.module: [
            module for module in _imported_modules(source, set(folders)) if folders[module] == source.path.parent
        ]
        for source in sources
        if not source.is_package
    }
    chains: dict[str, list[str]] = {}

    def chain_from(module: str) -> list[str]:
        if module not in chains:
            chains[module] = [module, *max(map(chain_from, graph[module]), key=len, default=[])]
        return chains[module]

    longest = {
        folder: max((chain_from(m) for m in graph if folders[m] == folder), key=len) for folder in set(folders.values())
    }
    return [f"{folder}: {' > '.join(chain)}" for folder, chain in longest.items() if len(chain) > MAX_CHAIN]


def forbidden_text(files: Iterable[Path], patterns: Mapping[str, str]) -> list[str]:
    """Lines of text files that match a pattern (meaning -> regular expression)."""
    compiled = {meaning: re.compile(pattern) for meaning, pattern in patterns.items()}
    found = []
    for path in files:
        data = path.read_bytes()
        if b"\0" in data:
            continue
        for number, line in enumerate(data.decode("utf-8", errors="replace").splitlines(), start=1):
            found += [f"{path}:{number}: {meaning}" for meaning, pattern in compiled.items() if pattern.search(line)]
    return found


def _imported_names(source: Source) -> Iterator[tuple[str, int]]:
    """Every absolute dotted name that is imported anywhere in the file, with its line."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(source, node)
            yield base, node.lineno
            yield from ((f"{base}.{alias.name}", node.lineno) for alias in node.names)


def _absolute(source: Source, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    package = source.module.split(".") if source.is_package else source.module.split(".")[:-1]
    base = package[: len(package) - node.level + 1]
    return ".".join([*base, *([node.module] if node.module else [])])


def _imported_modules(source: Source, modules: set[str]) -> set[str]:
    """The members of `modules` that the file imports. `from package import module` counts for the module, not the
    package."""
    found = set()
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(source, node)
            submodules = {f"{base}.{alias.name}" for alias in node.names} & modules
            found |= submodules
            if len(submodules) < len(node.names):
                found.add(base)
    return (found & modules) - {source.module}


def _circles(graph: Mapping[str, set[str]]) -> list[set[str]]:
    """Strongly connected components of more than one module: modules that reach each other."""
    reach = {module: _reachable(graph, module) for module in graph}
    groups: list[set[str]] = []
    for module in graph:
        group = {other for other in reach[module] if module in reach[other]} | {module}
        if len(group) > 1 and group not in groups:
            groups.append(group)
    return groups


def _reachable(graph: Mapping[str, set[str]], start: str) -> set[str]:
    seen: set[str] = set()
    waiting = [start]
    while waiting:
        new = graph[waiting.pop()] - seen
        seen |= new
        waiting.extend(new)
    return seen


def _within(module: str, place: str) -> bool:
    return module == place or module.startswith(place + ".")
