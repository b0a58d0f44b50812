"""Checks of names that users write: suggestions for a misspelled name ("did you mean"), and names that a user's Python
module must not have. Every scoring process imports this module, so it imports little itself."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from difflib import SequenceMatcher

_MIN_SIMILARITY = 0.8
_MAX_ABBREVIATION_LETTERS = 6


def similar_names(name: str, known: Iterable[str], max_names: int = 1) -> list[str]:
    """The known names that differ from `name` only by a likely typing error, the most similar first.

    Letter case and separators are ignored, and `++` is `PlusPlus`. Names with the same letters in another order match.
    An abbreviation matches in no other case, because each of its letters has a meaning (DPO is not DAPO). Any other
    known name matches if the similarity is at least 0.8, the first letters are equal (Float16 is not BFloat16), and so
    are the digits (H800 is not H200); the last digits of one of the two may be missing."""
    scored = [(_similarity(name, each), each) for each in known]
    near = sorted((each for each in scored if each[0] >= _MIN_SIMILARITY), key=lambda each: (-each[0], each[1]))
    return [each for _, each in near[:max_names]]


def standard_library_clash(path: str) -> str | None:
    """The error message if the module in `path` (`package.module:function`) has the name of a module of Python's
    standard library, else None. Python imports only one of two modules with the same name, and code that needs the
    other one fails."""
    top = path.partition(":")[0].partition(".")[0]
    if top not in sys.stdlib_module_names:
        return None
    return (
        f"the module must not have the name of a module of Python's standard library, {top!r} (seen: {path!r}); rename"
        f" the file or folder, for example to my_{top.strip('_')}, and use the new name here"
    )


def _similarity(name: str, known: str) -> float:
    """Similarity from 0 to 1; 0 if the names have different meanings."""
    ours, theirs = _plain(name), _plain(known)
    if ours == theirs:
        return 1.0
    if sorted(ours) == sorted(theirs):
        return _MIN_SIMILARITY
    if _is_abbreviation(known):
        return 0.0
    digits, their_digits = (re.sub(r"\D", "", each) for each in (ours, theirs))
    digits_agree = digits.startswith(their_digits) or their_digits.startswith(digits)
    if ours[:1] != theirs[:1] or not digits_agree:
        return 0.0
    return SequenceMatcher(None, name.lower(), known.lower()).ratio()


def _plain(name: str) -> str:
    """The name in lower case, without separators."""
    return re.sub(r"[\W_]", "", name.lower().replace("++", "plusplus"))


def _is_abbreviation(known: str) -> bool:
    """Whether the name is an abbreviation, such as `GRPO`, `DrGRPO` and `K1`, but not `MaxMin`."""
    return len(known) <= _MAX_ABBREVIATION_LETTERS and sum(map(str.isupper, known)) * 2 > sum(map(str.isalpha, known))
