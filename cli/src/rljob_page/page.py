"""Writes the page of a run: the template, the scripts and styles of `assets/`, and the document of `page_data`.

Charts are drawn by uPlot 1.6.32 (npm package `uplot`, MIT licence in assets/uPlot.LICENSE): 51 kB, draws 10,000 points
in milliseconds, with zoom and a cursor that moves in all charts. Larger libraries (Plotly: 4.5 MB, ECharts: 1 MB) would
be most of the page; a curve drawn by scripts of our own would be a library, too. Its two files are unmodified; a test
compares them with their digests.

What a model or a user wrote must not run as a script. The template escapes everything, the document is data and not a
script, the page's scripts only set `textContent`, and a Content-Security-Policy allows the page's own script and style
by their digests and nothing else, no connections either.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from rljob_api.standard_streams import printable
from rljob_page.errors import PageError
from rljob_page.page_data import OtherRun, PageContent, page_content
from rljob_page.replaced_file import replace_file
from rljob_page.run_files import READ_NAMES, Json, RunFiles
from rljob_page.small_page import MAX_PAGE_BYTES, fit, script_json

PAGE_FILE_NAME = "view.html"
STYLES = ("uPlot.min.css", "page.css")
SCRIPTS = ("elements.js", "charts.js", "samples.js", "tokens.js", "timeline.js", "memory.js", "page.js")
"""The page's own scripts. They share one scope."""
CHART_SCRIPT = "uPlot.iife.min.js"
_ASSETS = Path(__file__).parent / "assets"
_RESERVE_BYTES = 8 * 2**10
"""For the notes about what was left out."""


@dataclass(frozen=True)
class PageOptions:
    """What `write_page` writes, and where."""

    output: Path | None = None
    """None for `view.html` in the run's folder. A page elsewhere may be passed on, so it has no paths of this
    machine."""
    json_file: Path | None = None
    """Where the page's document is written as JSON; None for nowhere."""
    other: OtherRun | None = None
    """A run to compare with."""
    advice: Sequence[str] = ()
    """Lines with suggestions that make steps shorter; shown if the run has nothing to fix."""
    reload_seconds: int | None = None
    """How often the open page reloads itself while the run goes on; None for never."""
    is_active: bool | None = None
    """Whether the run goes on; None: as its files say."""


@dataclass(frozen=True)
class WrittenPage:
    """A page that was written."""

    path: Path
    num_bytes: int
    omitted: tuple[str, ...]
    """What was left out, in words."""
    is_active: bool
    """Whether the run goes on."""


def write_page(
    files: RunFiles, options: PageOptions | None = None, now: datetime | None = None, max_bytes: int = MAX_PAGE_BYTES
) -> WrittenPage:
    """Writes the page of a run; a page that exists is replaced atomically (`replace_file`). Raises PageError if it
    cannot be written, or would replace a file of the run.

    Example: `write_page(read_files(Path("runs/x")))`
    """
    options = options or PageOptions()
    for file in (options.output, options.json_file):
        if file is not None and _is_of_a_run(file, files, options.other):
            raise PageError(f"{file}: is a file of the run; name another file with --output or --json")
    has_paths = options.output is None
    content = page_content(files, options.other, options.advice, now, has_paths=has_paths)
    is_active = content.verdict.is_active if options.is_active is None else options.is_active
    docs_folder = _docs_folder() if has_paths else ""
    page = html_of(content, options.reload_seconds if is_active else None, docs_folder, max_bytes)
    output = options.output or files.folder / PAGE_FILE_NAME
    # Whoever owns the folder of the run may have put a link there.
    _write(output, page, follows_links=options.output is not None)
    if options.json_file is not None:
        # `ensure_ascii` escapes unpaired surrogates.
        _write(options.json_file, (json.dumps(content.data, allow_nan=False) + "\n").encode())
    omitted = content.data["omitted"]
    assert isinstance(omitted, list)
    return WrittenPage(output.absolute(), len(page), tuple(omitted), is_active)


def html_of(content: PageContent, reload_seconds: int | None, docs_folder: str, max_bytes: int) -> bytes:
    """The page. Removes parts of the document until the page has at most `max_bytes` bytes."""
    style, script = _joined(STYLES), _script()
    environment = Environment(loader=PackageLoader("rljob_page", "assets"), autoescape=True, undefined=StrictUndefined)
    environment.filters["printable"] = printable
    template = environment.get_template("page.html.jinja")

    def rendered(document: str) -> bytes:
        text = template.render(
            data=content.data,
            document=document,
            policy=_policy(style, script),
            style=style,
            script=script,
            reload_seconds=reload_seconds,
            docs_folder=docs_folder,
        )
        return text.encode("utf-8", errors="replace")

    # The template has some parts of the document a second time, and escaped: the verdict, the job, the comparison.
    notes = fit(content.data, lambda: max_bytes - len(rendered("")) - _RESERVE_BYTES)
    _omitted(content.data).extend(
        f"the page is limited to {max_bytes / 2**20:.2g} MiB, so it lacks {note}" for note in notes
    )
    return rendered(script_json(content.data))


def _policy(style: str, script: str) -> str:
    """The Content-Security-Policy."""
    own = f"style-src '{_digest(style)}'; script-src '{_digest(script)}'"
    return f"default-src 'none'; {own}; base-uri 'none'; form-action 'none'"


def _omitted(data: Json) -> list[str]:
    omitted = data["omitted"]
    assert isinstance(omitted, list)
    return omitted


@cache
def _joined(names: tuple[str, ...]) -> str:
    return "\n".join((_ASSETS / name).read_text(encoding="utf-8") for name in names)


def _script() -> str:
    return f'{_joined((CHART_SCRIPT,))}\n(() => {{\n"use strict";\n{_joined(SCRIPTS)}\n}})();\n'


def _digest(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _docs_folder() -> str:
    """URL of the docs, if the page is made from a clone of the repository; else empty, and the page names the file."""
    folder = Path(__file__).absolute().parents[3] / "docs"
    return folder.as_uri() if folder.is_dir() else ""


def _is_of_a_run(path: Path, files: RunFiles, other: OtherRun | None) -> bool:
    """Whether the path, or the target of the link that it is, is among the files that a page is made of."""
    target = Path(os.path.realpath(path))
    folders = [each.folder.resolve() for each in (files, *((other.files,) if other is not None else ()))]
    return any(
        target.is_relative_to(folder) and target != folder and target.relative_to(folder).parts[0] in READ_NAMES
        for folder in folders
    )


def _write(path: Path, content: bytes, *, follows_links: bool = True) -> None:
    """Writes or replaces a file. Raises PageError."""
    try:
        replace_file(path, content, follows_links=follows_links)
    except OSError as error:
        raise PageError(
            f"{path}: cannot be written ({error.strerror}); name another file with --output or --json, or free"
            " disk space"
        ) from None
