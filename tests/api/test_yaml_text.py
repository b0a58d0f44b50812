"""Text that `rljob` reads as kubectl does. All expectations were taken from kubectl's own readers (apimachinery 0.34's
`YAMLReader` and sigs.k8s.io/yaml 1.6)."""

from __future__ import annotations

import pytest

from rljob_api.yaml_faults import YamlProblem
from rljob_api.yaml_text import read_yaml, to_yaml

JOB = """\
kind: RLJob
metadata: {name: example}
spec:
  pools:
  - name: main
    gpusPerNode: 2
  dataset:
    type: File
"""


@pytest.mark.parametrize(
    "text",
    [
        JOB + "---\n",
        "# one job\n---\n" + JOB + "---\n# that was all\n",
        "---\n---\n" + JOB + "...\n---\n",
        JOB.replace("gpusPerNode: 2", "gpusPerNode:\t2\t# tabs").replace("type: File", "type:\t \tFile\t"),
        JOB.replace("{name: example}", "{name:\texample,\t}").replace("dataset:", "dataset:\t"),
        "\ufeff" + JOB,
        (JOB + "---\n").replace("\n", "\r\n"),
    ],
    ids=["last separator", "comments only", "empty ones", "tabs", "tabs in flow", "byte order mark", "Windows lines"],
)
def test_files_are_read_as_kubectl_reads_them(text: str) -> None:
    assert read_yaml(text).value == read_yaml(JOB).value


def test_a_tab_within_a_value_is_part_of_it() -> None:
    assert read_yaml("image:\ta\tb \t\n").value == {"image": "a\tb"}
    assert read_yaml("image: a\t\n  b\tc\n").value == {"image": "a b\tc"}
    assert read_yaml("image: a\n  \tb\n\n \t \n  c\n").value == {"image": "a b\n\nc"}
    assert read_yaml("{image: a\n  \tb}\n").value == {"image": "a b"}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("|\t\n  x\n", "x\n"),
        (">-\t # why\n  x\n  y\n", "x y"),
        ("|\n  x\ty\n", "x\ty\n"),
        ("|2-\t\n   x\n", " x"),
        (">+1\n x\n\n", "x\n\n"),
    ],
)
def test_a_tab_may_follow_a_block_indicator(text: str, value: str) -> None:
    assert read_yaml(f"image: {text}").value == {"image": value}


def test_a_block_does_not_begin_with_a_tab() -> None:
    assert_problem("image: |\n  \tx\n", (2, 3), "found a tab", "use spaces")
    assert read_yaml("image: |1\n  \tx\n").value == {"image": " \tx\n"}


@pytest.mark.parametrize("character", ["\x85", "\u2028", "\u2029"])
@pytest.mark.parametrize("text", ["image: x{}y\n", 'image: "x{}y"\n', "image: xyz # a{}b\n"])
def test_a_line_break_only_for_some_readers_is_rejected(text: str, character: str) -> None:
    number = f"{ord(character):04x}"
    line = text.format(character)
    line_and_column = (2, line.index(character) + 1)
    assert_problem("# é\n" + line, line_and_column, f"U+{number.upper()}", f"write \\u{number} in double quotes")
    escaped = read_yaml(f'image: "x\\u{number}y"\n').value
    assert escaped == {"image": f"x{character}y"}
    assert read_yaml(to_yaml(escaped)).value == escaped


@pytest.mark.parametrize(
    ("text", "line_and_column"),
    [
        (JOB + "\timage: x\n", (9, 1)),
        (JOB.replace("{name: example}", "{name: example\n\t}"), (3, 1)),
        (JOB.replace("- name: main", "-\tname: main"), (5, 4)),
        (JOB + "  env:\n\t- {}\n", (10, 1)),
    ],
)
def test_a_tab_is_no_indentation(text: str, line_and_column: tuple[int, int]) -> None:
    assert_problem(text, line_and_column, "invalid YAML", "'\\t'", "indent with spaces")


@pytest.mark.parametrize(
    ("text", "line_and_column", "words"),
    [
        ("---\n# none\n---\n", (1, 1), ("file is empty", "rljob init")),
        ("# one\n---\n" + JOB + "---\n" + JOB, (11, 1), ("second document", "one job per file")),
        ("%YAML 1.1\n---\n" + JOB, (2, 1), ("directives such as %YAML", "remove")),
    ],
)
def test_a_file_with_several_documents_or_none_is_rejected(
    text: str, line_and_column: tuple[int, int], words: tuple[str, ...]
) -> None:
    assert_problem(text, line_and_column, *words)


@pytest.mark.parametrize(
    ("text", "line_and_column", "words"),
    [
        ("a: 1\nspec\n  pools:\n  - b\n", (2, 1), ("no ': '", "after the key")),
        ("a:\n  b: 1\n  seed\n", (3, 3), ("no ': '", "after the key")),
        ("a:\n  pools\n  - name: b\n", (2, 3), ("line 3", "write ': ' after the key")),
        ("a:\n  b: 1\n   c: 2\n", (3, 5), ("indentation of this line",)),
        ("a: 1\nb: 'x\nc: 2\n", (2, 4), ("quotes that open here", "not closed")),
        ("a: 'x\n---\nb: 1\n", (1, 4), ("quotes that open here", "not closed")),
        ('a: 1\nb: "x\nc: "y"\nd: 2\n', (2, 4), ("quotes that open here", "line 3", "close them earlier")),
        ('a: {b: "x\n  c, d: "y"}\n', (1, 8), ("quotes that open here", "line 2", "close them earlier")),
        ("a: 'x' y\n", (1, 8), ("expected <block end>",)),
        ("a: 1\nb: [c\n", (2, 4), ("bracket that opens here", "not closed")),
        ("a: [1, 2\nb: 3\n", (2, 2), ("close the bracket that opens in line 1", "comma")),
        ("a: ['1' 'b']\n", (1, 9), ("expected ',' or ']'", "close the bracket, or add the comma")),
    ],
)
def test_a_syntax_error_is_reported_where_the_user_must_look(
    text: str, line_and_column: tuple[int, int], words: tuple[str, ...]
) -> None:
    assert_problem(text, line_and_column, "invalid YAML", *words)


def assert_problem(text: str, line_and_column: tuple[int, int], *words: str) -> None:
    with pytest.raises(YamlProblem) as caught:
        read_yaml(text)
    found = caught.value.problem
    assert (found.line, found.column) == line_and_column
    assert [word for word in words if word not in found.message] == [], found.message
