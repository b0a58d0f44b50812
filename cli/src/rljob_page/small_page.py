"""Makes a page small enough: removes parts of the document in a fixed order, and says what was left out.

1. the oldest samples, 2. points of the curves, 3. the middle of long texts, 4. timelines, 5. conversations with tokens,
6. all samples, 7. the job, 8. the fields that differ between two runs, 9. all curves.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator

from rljob_page.curves import thinned
from rljob_page.run_files import Json

MAX_PAGE_BYTES = 5 * 2**20
_LEAST_SAMPLES = 256
"""At least this many samples stay while other parts can still be removed."""
_LEAST_POINTS = 200
_TEXT_LIMITS = (20_000, 4_000, 1_000, 200)
_UNPAIRED = re.compile("[\ud800-\udfff]")
_ESCAPES = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}


def script_json(value: object) -> str:
    """JSON that can stand in a script element: nothing in it can end the element or begin a comment. An
    unpaired surrogate is escaped, because UTF-8 cannot represent it."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for letter, escape in _ESCAPES.items():
        text = text.replace(letter, escape)
    return _UNPAIRED.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def size_of(value: object) -> int:
    """The bytes of a part of the document in the page."""
    return len(script_json(value).encode())


def fit(data: Json, limit: Callable[[], int]) -> list[str]:
    """Removes parts of `data` in place until it has at most `limit()` bytes, which may grow with each removed part.
    Returns what was left out, in words."""
    notes: list[str] = []
    stages: list[Callable[[Json, int], Iterator[str]]] = [
        lambda data, excess: _drop_samples(data, excess, _LEAST_SAMPLES),
        lambda data, _: _thin_curves(data),
        lambda data, excess: _shorten_texts(data, size_of(data) - excess),
        lambda data, _: _clear(data, "timelines", "the timelines; they are in the folder timelines/"),
        lambda data, _: _clear(data, "conversations", "the conversations with tokens; they are in the folder tokens/"),
        lambda data, excess: _drop_samples(data, excess, 0),
        lambda data, _: _clear(data, "spec", "the job; it is in resolved.yaml"),
        lambda data, _: _clear_differences(data),
        lambda data, _: _clear_curves(data),
    ]
    for stage in stages:
        excess = size_of(data) - limit()
        if excess <= 0:
            break
        notes += stage(data, excess)
    return notes


def _drop_samples(data: Json, excess: int, least: int) -> Iterator[str]:
    """Removes the oldest samples until `excess` bytes are saved, or `least` samples remain."""
    samples = data["samples"]
    assert isinstance(samples, list)
    dropped = 0
    while len(samples) - dropped > least and excess > 0:
        excess -= size_of(samples[dropped]) + 1
        dropped += 1
    if dropped:
        del samples[:dropped]
        first = f", those before step {samples[0]['step']}" if samples else ""
        yield f"the {dropped} oldest samples{first}; all are in samples.jsonl"


def _thin_curves(data: Json) -> Iterator[str]:
    """Thins the curves of both runs."""
    is_thinned = False
    for part in _runs(data):
        curves = part["curves"]
        assert isinstance(curves, dict)
        for points in curves.values():
            is_thinned |= len(points["index"]) > _LEAST_POINTS
            values = [math.nan if value is None else value for value in points["data"]]
            points["index"], remaining = thinned((points["index"], values), _LEAST_POINTS)
            points["data"] = [None if math.isnan(value) else value for value in remaining]
    if is_thinned:
        kept = f"each has at most {_LEAST_POINTS}, with the smallest and the largest values"
        yield f"points of the curves: {kept}; all are in metrics.jsonl"


def _runs(data: Json) -> list[Json]:
    """The parts with the curves of each run."""
    against = data.get("against")
    return [data, against] if isinstance(against, dict) else [data]


def _clear_differences(data: Json) -> Iterator[str]:
    for part in _runs(data)[1:]:
        part["differences"] = None
        yield "the fields that differ; `diff` of both resolved.yaml shows them"


def _clear_curves(data: Json) -> Iterator[str]:
    for part in _runs(data):
        part["curves"] = {}
        part["averages"] = {"window": 0, "curves": {}}
    yield "the curves; they are in metrics.jsonl"


def _shorten_texts(data: Json, max_bytes: int) -> Iterator[str]:
    """Cuts long texts of samples, and more of them until the document is small enough."""
    samples = data["samples"]
    assert isinstance(samples, list)
    note = ""
    for limit in _TEXT_LIMITS:
        if num_cut := sum([_cut_texts(sample, limit) for sample in samples]):
            note = f"parts of {num_cut} texts of samples that have more than {limit:,} characters"
        if size_of(data) <= max_bytes:
            break
    if note:
        yield note


def _cut_texts(value: object, limit: int) -> int:
    """Cuts long texts in a sample, in place. Returns their number. A text keeps its beginning and its end."""
    num_cut = 0
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in entries:
        if isinstance(each, str) and len(each) > limit and key != "group":
            assert isinstance(value, dict | list)
            value[key] = f"{each[: limit // 2]}\n… ({len(each) - limit:,} characters left out) …\n{each[-limit // 2 :]}"
            num_cut += 1
        else:
            num_cut += _cut_texts(each, limit)
    return num_cut


def _clear(data: Json, name: str, what: str) -> Iterator[str]:
    """Empties a part of the document."""
    if data[name]:
        data[name] = type(data[name])()
        yield what
