"""Standard output that accepts few characters, or is closed."""

from __future__ import annotations

import io
import subprocess
import sys

import pytest

from rljob_api.standard_streams import accept_all_characters, write_utf8
from rljob_testing.settings import inherited_environment


@pytest.mark.parametrize(
    ("encoding", "written"),
    [("ascii", rb"\u4e2d \xe9 \ud800"), ("latin-1", b"\\u4e2d \xe9 \\ud800"), ("utf-8", "中 é \\ud800".encode())],
)
def test_characters_that_cannot_be_encoded_are_escaped(
    monkeypatch: pytest.MonkeyPatch, encoding: str, written: bytes
) -> None:
    standard_output = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(standard_output, encoding=encoding))
    accept_all_characters()
    print("中 é \ud800", end="", flush=True)
    assert standard_output.getvalue() == written


def test_machine_readable_output_is_utf8_on_every_terminal() -> None:
    standard_output = io.BytesIO()
    stream = io.TextIOWrapper(standard_output, encoding="ascii")
    stream.write("before ")
    write_utf8(stream, "中 é \ud800")
    assert standard_output.getvalue() == b"before " + "中 é \\ud800".encode()
    text = io.StringIO()
    write_utf8(text, "中")
    assert text.getvalue() == "中"


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&-", "<&- >&- 2>&-"])
def test_a_closed_output_is_also_closed_for_child_processes_and_no_file_takes_its_number(closed: str) -> None:
    program = (
        "import subprocess, sys, tempfile\n"
        "from rljob_api.standard_streams import accept_all_characters\n"
        "accept_all_characters()\n"
        "print('中')\n"
        "print('中', file=sys.stderr)\n"
        "with tempfile.TemporaryFile() as file:\n"
        "    subprocess.run(['sh', '-c', 'cat; echo 1; echo 2 >&2'], check=True)\n"
        "    file.seek(0)\n"
        "    assert (file.fileno() > 2, file.read()) == (True, b'')\n"
    )
    done = subprocess.run(
        ["sh", "-c", f'exec "$0" -c "$1" {closed}', sys.executable, program],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        env=inherited_environment() | {"PYTHONIOENCODING": "utf-8"},
    )
    printed = "中\n1\n"
    assert (done.returncode, done.stdout) == (0, "" if ">&-" in closed.replace("2>&-", "") else printed)
    assert done.stderr == ("" if "2>&-" in closed else "中\n2\n")
