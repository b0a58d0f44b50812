"""Normalizes mathematical text: Unicode characters, LaTeX commands and decoration that do not change a value."""

from __future__ import annotations

import re
import unicodedata

_FULL_WIDTH = {code: code - 0xFEE0 for code in range(0xFF01, 0xFF5F)}
_REPLACED = {
    "\u3000": " ", "\u00a0": " ", "\u2002": " ", "\u2003": " ", "\u2007": " ", "\u2008": " ", "\u2009": " ",
    "\u200a": " ", "\u202f": " ", "\u205f": " ", "\u200b": "", "\u200c": "", "\u200d": "", "\u2060": "", "\ufeff": "",
    "\u2212": "-", "\ufe63": "-", "\u2010": "-", "\u2011": "-", "\u2014": "; ", "\u2026": "...", "\u22ef": "...",
    "。": ". ", "、": ", ", "「": '"', "」": '"', "『": '"', "』": '"', "【": "[", "】": "]", "〈": '"', "〉": '"',
    "《": '"', "》": '"', "“": '"', "”": '"', "„": '"', "‘": "'", "’": "'", "«": '"', "»": '"',
    "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "∙": r"\cdot ", "÷": "/", "∕": "/", "⁄": "/",
    "∞": r"\infty ", "π": r"\pi ", "≤": r"\le ", "⩽": r"\le ", "≥": r"\ge ", "⩾": r"\ge ", "≠": r"\ne ",
    "±": r"\pm ", "°": r"^\circ ", "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "∅": r"\emptyset ", "￥": "¥",
    "\u0130": "I", "\u0131": "i", "\u017f": "s", "\u212a": "K",
}  # fmt: skip
_CHARACTERS = str.maketrans({**{chr(old): chr(new) for old, new in _FULL_WIDTH.items()}, **_REPLACED})
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁽⁾ⁿ", "0123456789+-()n")
_SUPERSCRIPT = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁽⁾ⁿ]+")
_VULGAR_FRACTION = re.compile("(\\d?)([¼-¾⅐-⅞↉])")
_ROOT = re.compile(r"√\s*(?:\(([^()]*)\)|\{([^{}]*)\}|(\d+(?:\.\d+)?|[a-z]))")
# An en dash as a sign; between two values it is a range.
_MINUS = re.compile(r"(?<![\w.)\]}])\u2013\s*(?=[\d.\\$(])")

# LaTeX that changes only the appearance of a value: it is replaced by a space (_SPACES), removed (_NO_MEANING), or
# replaced by a simpler spelling (_SAME_MEANING).
TEXT_COMMANDS = "text|textbf|textit|textrm|textsf|mathrm|mathbf|mathit|mathsf|boldsymbol|bm|mbox|operatorname"
"""LaTeX commands that show their argument in another font."""
_SPACES = re.compile(r"(?<!\\)\\[,;: ]|\\quad\b|\\qquad\b|\\thinspace\b|~")
_NO_MEANING = re.compile(
    r"\\(?:left|right|[bB]igg?[lr]?|displaystyle|textstyle|limits|strut|mathstrut|!)(?![a-zA-Z])|\\!"
)
_SAME_MEANING = (
    (re.compile(r"\\(?:[dtc]|nice)frac(?![a-zA-Z])"), r"\\frac"),
    (re.compile(r"\\(?:text)?color\s*\{\w+\}|\\(?:[lL]arge|LARGE|[hH]uge|small|bf|rm)(?![a-zA-Z])"), ""),
    (re.compile(r"\\degree(?![a-zA-Z])"), r"^\\circ"),
    (re.compile(r"\\leqs?lant(?![a-zA-Z])|\\leq(?![a-zA-Z])"), r"\\le"),
    (re.compile(r"\\geqs?lant(?![a-zA-Z])|\\geq(?![a-zA-Z])"), r"\\ge"),
    (re.compile(r"\\neq(?![a-zA-Z])|\\not\s{0,3}="), r"\\ne "),
    (re.compile(r"\\lbrace(?![a-zA-Z])"), r"\\{"),
    (re.compile(r"\\rbrace(?![a-zA-Z])"), r"\\}"),
    (re.compile(r"\\(?:text|textrm|mathrm|mbox|operatorname)\s*\{\s*(and|or)\s*\}"), r" \1 "),
    (re.compile(r"\{,\}"), ","),
    (re.compile(r"\\([$%#&])"), r"\1"),
)
_WRAPPERS = (
    *(("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"), ("**", "**"), ("__", "__"), ("```", "```"), ("`", "`")),
    *(('"', '"'), ("'", "'"), ("*", "*"), ("_", "_"), ("<b>", "</b>"), ("<strong>", "</strong>")),
)
_FONT = re.compile(rf"\\(?:{TEXT_COMMANDS}|underline|boxed|fbox)\s*(?=\{{)")


def plain_characters(text: str) -> str:
    """The text with full-width characters, Unicode operators, vulgar fractions and superscripts as ASCII and LaTeX.

    Examples: `２½` gives `2 1/2`, `x²` gives `x^{2}`, `\u22125` gives `-5`.
    """
    text = _MINUS.sub("-", text)
    text = _VULGAR_FRACTION.sub(_spelled_fraction, text)
    text = _SUPERSCRIPT.sub(lambda match: "^{" + match[0].translate(_SUPERSCRIPTS) + "}", text)
    text = _ROOT.sub(lambda match: r"\sqrt{" + (match[1] or match[2] or match[3]) + "}", text)
    text = text.translate(_CHARACTERS)
    # Digits of other scripts, such as Arabic and Devanagari.
    return "".join(_ascii_digit(character) if ord(character) > 127 else character for character in text)


def plain_latex(text: str) -> str:
    """The text without LaTeX that changes only its appearance: `\\dfrac` is `\\frac`, `1{,}000` is `1,000`."""
    text = _NO_MEANING.sub("", text)
    for pattern, replacement in _SAME_MEANING:
        text = pattern.sub(replacement, text)
    return _SPACES.sub(" ", text).strip()


def undecorated(text: str) -> str:
    """The text without decoration of a value: white space, final punctuation, quotes, Markdown, `$`, `\\text{}`."""
    while True:
        before = text
        text = text.strip().removeprefix("> ")
        if text.endswith((",", ";", ":")) or (text.endswith(".") and not text.endswith("..")):
            text = text[:-1].rstrip()
        if text.count("**") == 1:
            text = text.removeprefix("**").removesuffix("**")
        for start, end in _WRAPPERS:
            inner = text[len(start) : len(text) - len(end)]
            if len(text) > len(start) + len(end) and text.startswith(start) and text.endswith(end):
                if start not in inner and end not in inner:
                    text = inner
                break
        start_of_braces = match.end() if (match := _FONT.match(text)) else 0
        if text.startswith("{", start_of_braces) and (match or "," not in text):
            inside = braced(text, start_of_braces)
            if inside is not None and start_of_braces + len(inside) + 2 == len(text):
                text = inside
        if text == before:
            return text


def braced(text: str, start: int) -> str | None:
    """The text between the brace at `start` and its closing brace; None if it is not closed."""
    depth = 0
    index = start
    while index < len(text):
        if text[index] == "\\":
            index += 2
            continue
        depth += (text[index] == "{") - (text[index] == "}")
        if depth == 0:
            return text[start + 1 : index]
        index += 1
    return None


def split_outside_brackets(text: str, separators: re.Pattern[str]) -> list[str]:
    """Splits the text at separators that are outside all brackets."""
    parts, begin, depth, index = [], 0, 0, 0
    while index < len(text):
        character = text[index]
        if character in "([{":
            depth += 1
        elif character in ")]}":
            depth -= 1
        elif depth == 0 and (match := separators.match(text, index)):
            parts.append(text[begin:index])
            begin = index = match.end()
            continue
        index += 1
    return [*parts, text[begin:]]


def _spelled_fraction(match: re.Match[str]) -> str:
    spelled = unicodedata.normalize("NFKC", match[2]).replace("\u2044", "/")
    return f"{match[1]} {spelled}" if match[1] else spelled


def _ascii_digit(character: str) -> str:
    digit = unicodedata.decimal(character, None)
    return character if digit is None else str(digit)
