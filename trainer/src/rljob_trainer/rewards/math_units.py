"""Units and magnitude words after a number."""

from __future__ import annotations

import re
from fractions import Fraction

from rljob_trainer.rewards.math_text import TEXT_COMMANDS

MAGNITUDES = {
    "hundred": 10**2,
    "thousand": 10**3,
    "million": 10**6,
    "billion": 10**9,
    "bn": 10**9,
    "trillion": 10**12,
    "lakh": 10**5,
    "crore": 10**7,
    "dozen": 12,
    "万": 10**4,
    "萬": 10**4,
    "亿": 10**8,
    "億": 10**8,
}
CURRENCIES = ("US$", "$", "€", "£", "¥", "₹", "₩", "USD", "EUR", "GBP", "JPY", "CNY", "INR", "Rs.", "Rs")

_SAME_UNIT = {
    "$": ("dollar", "usd", "us$", "buck"),
    "€": ("euro", "eur"),
    "£": ("gbp", "pound sterling"),
    "¥": ("yen", "jpy", "yuan", "cny", "rmb", "元"),
    "₹": ("rupee", "inr", "rs"),
    "cent": ("¢",),
    "%": ("percent", "per cent", "percentage", "pct"),
    "degree": (r"^\circ", r"^{\circ}", r"\circ", "deg", r"\degree"),
    "degree c": (r"^\circ c", r"^{\circ} c", r"^{\circ}c", r"^\circc", "celsius", "degree celsius"),
    "degree f": (r"^\circ f", r"^{\circ} f", r"^{\circ}f", r"^\circf", "fahrenheit", "degree fahrenheit"),
    "mm": ("millimeter", "millimetre"),
    "cm": ("centimeter", "centimetre"),
    "m": ("meter", "metre"),
    "km": ("kilometer", "kilometre"),
    "in": ("inch", "inche"),
    "ft": ("foot", "feet"),
    "yd": ("yard",),
    "mi": ("mile",),
    "mg": ("milligram",),
    "g": ("gram",),
    "kg": ("kilogram", "kilo"),
    "lb": ("pound", "lbs"),
    "oz": ("ounce",),
    "ml": ("milliliter", "millilitre"),
    "L": ("liter", "litre", "l"),
    "ms": ("millisecond",),
    "s": ("second", "sec"),
    "min": ("minute",),
    "h": ("hour", "hr"),
    "day": ("天",),
    "week": (),
    "month": (),
    "year": ("yr", "年"),
    "mph": ("mile per hour", "mi/h"),
    "km/h": ("kilometer per hour", "kmh", "kph", "kmph"),
    "m/s": ("meter per second",),
    "N": ("newton",),
    "J": ("joule",),
    "W": ("watt",),
    "V": ("volt",),
    "A": ("ampere", "amp"),
    "K": ("kelvin",),
    "Hz": ("hertz", "hz"),
    "Pa": ("pascal", "pa"),
    "mol": ("mole",),
    "rad": ("radian",),
}
_SIZES_BY_DIMENSION = {
    "length": {"mm": "0.001", "cm": "0.01", "m": "1", "km": "1000", "in": "0.0254", "ft": "0.3048", "yd": "0.9144"}
    | {"mi": "1609.344"},
    "time": {"ms": "0.001", "s": "1", "min": "60", "h": "3600", "day": "86400", "week": "604800"},
    "mass": {"mg": "0.001", "g": "1", "kg": "1000", "lb": "453.59237", "oz": "28.349523125"},
    "volume": {"ml": "0.001", "L": "1"},
    "money": {"cent": "0.01", "$": "1"},
    "angle": {"degree": "1", "rad": "57.29577951308232"},
    "speed": {"m/s": "1", "km/h": "0.2777777777777778", "mph": "0.44704"},
}
"""The sizes of units, by dimension; one unit of each dimension has the size 1."""
_SIZE_OF_UNIT = {
    unit: (dimension, Fraction(size))
    for dimension, sizes in _SIZES_BY_DIMENSION.items()
    for unit, size in sizes.items()
}
CONVERSION_TOLERANCE = Fraction(1, 50)
"""The relative tolerance for a conversion, because people round: `5 km = 3.1 mi`."""
_CANONICAL = {spelling: unit for unit, spellings in _SAME_UNIT.items() for spelling in (*spellings, unit)}
# Units for which both mega and milli are in use, so that case matters; for others, such as `MPa` and `mhz`, it does
# not.
_MEGA = re.compile(r"M[gmWJ]")
_POWER_WORDS = {"square": "^2", "squared": "^2", "sq": "^2", "cubic": "^3", "cubed": "^3"}
_TEXT = re.compile(rf"\\(?:{TEXT_COMMANDS})\s*\{{([^{{}}]*)\}}")
_WORDS = re.compile(r"[A-Za-z\u00b5\u03a9\u4e00-\u9fff%$€£¥₹¢][^\d=<>+*()\[\]{}\\,;:!?\"]*")
_DEGREES = re.compile(r"\^\s*(?:\\circ|\{\s*\\circ\s*\})\s*([CF]?)\s*$")
MAX_UNIT_WORDS = 4
BASE = "base"
"""A number with a base has this word with the base as its unit: the unit of `101_2` is `base2`."""
_NO_UNITS = frozenset(
    (
        *(
            "a",
            "not",
            "is",
            "are",
            "or",
            "and",
            "more",
            "less",
            "than",
            "times",
            "plus",
            "minus",
            "over",
            "mod",
            "modulo",
        ),
        *(
            "squared",
            "cubed",
            "factorial",
            "wrong",
            "incorrect",
            "unknown",
            "no",
            "if",
            "when",
            "to",
            "out",
            "remainder",
            "fewer",
            "below",
            "negative",
        ),
        *("pi", "theta", "alpha", "beta", "gamma", "delta", "lambda", "mu", "phi", "omega", "sin", "cos", "tan", "cot"),
        *("sec", "csc", "log", "ln", "exp", "sqrt"),
    )
)
"""Words after a number that are not units, because they change the number or describe it."""


def read_unit(text: str) -> str | None:
    """The unit in the text after a number, in its canonical spelling; None if the text is not a unit.

    Examples: ` dollars` gives `$`, `\\text{ km/h}` gives `km/h`, ` square meters` gives `m^2`, `x` gives None.
    Letters directly after the number are a product of variables (`3x`), unless they are a known unit with two or more
    letters (`5km`).
    """
    if match := _DEGREES.fullmatch(text.strip()):
        return f"degree {match[1].lower()}".strip()
    is_marked = _TEXT.search(text) is not None
    shown = _TEXT.sub(lambda match: f" {match[1] or ''} ", text)
    shown = re.sub(r"\^\s*\{?\s*([23])\s*\}?", r"^\1", shown)
    words = " ".join(shown.split()).rstrip(".")
    if not words:
        return None
    powerless = re.sub(r"\^[23]", "", words)
    if not _WORDS.fullmatch(powerless) or len(words.split()) > MAX_UNIT_WORDS:
        return None
    if not _NO_UNITS.isdisjoint(powerless.lower().split()):
        return None
    unit = _canonical(words)
    is_known = is_known_unit(unit)
    if is_marked or not powerless[0].isascii():
        return unit
    if not text[0].isspace():
        return unit if is_known and (len(words) > 1 or not words.isalpha()) else None
    if len(powerless) == 1 and not is_known:
        return None
    return unit


def same_unit(first: str, second: str) -> bool:
    """Whether two units may describe the same quantity. No unit (an empty string) matches every unit. If a unit is
    unknown, such as `red apples`, two units match if they have a word in common."""
    if first == second or "" in (first, second):
        return True
    if first in _SAME_UNIT and second in _SAME_UNIT:
        return False
    return not set(first.split()).isdisjoint(second.split())


def is_conversion(first: Fraction, first_unit: str, second: Fraction, second_unit: str) -> bool:
    """Whether two numbers with different known units are the same amount, within CONVERSION_TOLERANCE: `1 km` and
    `1000 m`."""
    if first_unit == second_unit or first_unit not in _SIZE_OF_UNIT or second_unit not in _SIZE_OF_UNIT:
        return False
    (dimension, size), (other_dimension, other_size) = _SIZE_OF_UNIT[first_unit], _SIZE_OF_UNIT[second_unit]
    amounts = first * size, second * other_size
    difference = abs(amounts[0] - amounts[1])
    return dimension == other_dimension and difference <= CONVERSION_TOLERANCE * max(map(abs, amounts))


def number_in_base(number: Fraction, unit: str) -> Fraction | None:
    """The value of a number whose unit is a base: `101` in `base2` is 5. None if a digit is invalid in the base."""
    try:
        return Fraction(int(str(number), int(unit.removeprefix(BASE))))
    except ValueError:
        return None


def _canonical(words: str) -> str:
    """The canonical spelling of a unit: `square meters` gives `m^2`."""
    # `Mg` is a million grams, `mg` a thousandth of a gram.
    lowered = words if len(words) == 1 or _MEGA.fullmatch(words) else words.lower()
    for spelling in (words, lowered, _singular(lowered)):
        if spelling in _CANONICAL:
            return _CANONICAL[spelling]
    plain = [_singular(word) for word in lowered.split()]
    if " ".join(plain) in _CANONICAL:
        return _CANONICAL[" ".join(plain)]
    powers = [word for word in plain if word in _POWER_WORDS]
    if powers and len(plain) == 2:
        [base] = [word for word in plain if word not in _POWER_WORDS] or [plain[0]]
        return _CANONICAL.get(base, base) + _POWER_WORDS[powers[0]]
    if lowered.endswith(("^2", "^3")):
        return _CANONICAL.get(_singular(lowered[:-2].strip()), lowered[:-2].strip()) + lowered[-2:]
    if "/" in lowered:
        return "/".join(_CANONICAL.get(_singular(part.strip()), part.strip()) for part in lowered.split("/"))
    return " ".join(_CANONICAL.get(word, word) for word in plain)


def _singular(word: str) -> str:
    return word[:-1] if len(word) > 3 and word.endswith("s") and not word.endswith("ss") else word


def is_known_unit(unit: str) -> bool:
    """Whether the unit, or the unit that it squares or cubes, is in the table."""
    return unit.removesuffix("^2").removesuffix("^3") in _SAME_UNIT
