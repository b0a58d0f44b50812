"""`rljob view` writes one HTML file from a run's folder; what the browser makes of it is in test_page_in_browser.py."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from html import unescape
from pathlib import Path

import pytest
from rich.console import Console

from rljob_api.conditions import Reason
from rljob_api.explanations import EXPLANATIONS
from rljob_cli.errors import CliError
from rljob_cli.local.view import ViewOptions, advice_for, page_after_run, view, write_view
from rljob_page.page import PageOptions, write_page
from rljob_page.page_data import OtherRun, page_content
from rljob_page.run_files import read_files
from rljob_page.timelines import read_timeline
from rljob_testing.cli.run_folders import (
    WRITTEN_AT,
    RunRecord,
    document_of,
    samples_of,
    timeline,
)
from rljob_testing.settings import inherited_environment

Rljob = Callable[..., tuple[int, str, str]]
RUNNING = {"phase": "Running", "exit_code": None, "num_steps": 12}
CUT_OFF = {
    "reason": "ResponsesCutOff",
    "value": 0.9,
    "message": "90 % of the responses were truncated at the token limit (usual: below 50 %); increase the limit",
    "sinceStep": 3,
    "step": 12,
}


def test_an_alarm_comes_first_and_advice_is_for_healthy_runs(tmp_path: Path) -> None:
    healthy, sick = RunRecord().write(tmp_path / "healthy"), RunRecord(alarms=[CUT_OFF]).write(tmp_path / "sick")
    for folder, has_advice in ((healthy, True), (sick, False)):
        write_page(read_files(folder), PageOptions(advice=["set maxNumSequences: 512"]))
        text = (folder / "view.html").read_text()
        assert ("set maxNumSequences: 512" in text) == has_advice
    assert text.index("increase the limit") < text.index('id="curves"')
    assert "docs/troubleshooting.md#responsescutoff" in text


def test_the_command_writes_page_and_json_and_prints_the_path(tmp_path: Path, rljob: Rljob) -> None:
    folder = RunRecord(samples=samples_of(8, 30), timelines={"step-000003": timeline()}).write(tmp_path / "run")
    code, output, _ = rljob("view", str(folder), "--json", str(tmp_path / "run.json"))
    assert code == 0
    assert output.splitlines()[-1].startswith(f"page: {folder}/view.html (")
    data = json.loads((tmp_path / "run.json").read_text())
    assert data == document_of(folder / "view.html")
    curve = data["curves"]["critic/rewards/mean"]
    assert curve["index"] == list(range(1, 31))
    assert len(curve["data"]) == 30
    assert [entry["score"] for entry in data["samples"][:4]] == [0, 1 / 3, 2 / 3, 1]
    assert data["timelines"]["step-000003"]["processes"][1]["idle"] == {"scores": 30}


def test_a_page_needs_nothing_but_itself(tmp_path: Path) -> None:
    write_page(read_files(RunRecord().write(tmp_path / "run")))
    text = unescape((tmp_path / "run" / "view.html").read_text())
    assert "default-src 'none'" in text
    assert not re.search(r"""(src|href)=["']?(https?:|//)""", text)
    assert not re.search(r"<[^>]+\son\w+=", re.sub(r"<script>.*?</script>", "", text, flags=re.DOTALL))


def test_the_chart_library_is_the_released_one() -> None:
    assets = Path(page_content.__code__.co_filename).parent / "assets"
    digests = {
        name: hashlib.sha256((assets / name).read_bytes()).hexdigest()
        for name in ("uPlot.iife.min.js", "uPlot.min.css")
    }
    assert digests == {
        "uPlot.iife.min.js": "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
        "uPlot.min.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
    }
    assert "Copyright (c) 2022 Leon Sorokin" in (assets / "uPlot.LICENSE").read_text()


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("metrics.jsonl", '{"step": 1}\n{"st\n{"step": 2}\n', ["metrics.jsonl", "line 2", "not valid JSON", "remove"]),
        ("metrics.jsonl", '[1]\n{"step": 2}\n', ["metrics.jsonl", "line 1", "not a JSON object", "remove"]),
        ("rljob-run-state.json", '{"contractVersion": 9}', ["rljob-run-state.json", "seen: 9", "version"]),
        ("rljob-run-state.json", '{"contractVe', ["rljob-run-state.json", "must be JSON", "complete"]),
        ("job.yaml", "apiVersion: rljob.dev/v2\nkind: RLJob\n", ["job.yaml", "use the version that made the run"]),
    ],
)
def test_a_damaged_or_newer_file_is_one_clear_error(
    file: str, content: str, words: list[str], tmp_path: Path, rljob: Rljob
) -> None:
    folder = RunRecord().write(tmp_path / "run")
    (folder / file).write_text(content)
    code, _, errors = rljob("view", str(folder))
    assert code == 2
    assert len(errors.strip().splitlines()) == 1
    assert all(word in errors for word in words), errors


def test_other_folders_and_unwritable_pages_are_one_clear_error(tmp_path: Path, rljob: Rljob) -> None:
    folder = RunRecord().write(tmp_path / "run")
    (tmp_path / "empty").mkdir()
    link, other = tmp_path / "link.html", RunRecord().write(tmp_path / "other")
    link.symlink_to(folder / "metrics.jsonl")
    for arguments, words in (
        ([str(tmp_path / "none")], "is not a folder"),
        ([str(tmp_path / "empty")], "is not the folder of a run"),
        ([str(folder), "--against", str(tmp_path / "empty")], "empty: is not the folder of a run"),
        ([str(tmp_path / ("x" * 300))], "cannot be read (File name too long)"),
        (["x" * 300, "--kubeconfig", str(tmp_path / "none")], "no such folder"),
        ([str(folder), "--against", "x" * 300], "cannot be read (File name too long)"),
        ([str(folder), "--output", str(tmp_path / "none" / "view.html")], "cannot be written (No such file"),
        ([str(folder), "--json", str(tmp_path / "empty")], "cannot be written (Is a directory)"),
        ([str(folder), "--json", str(folder / "metrics.jsonl")], "is a file of the run; name another file"),
        ([str(folder), "--output", str(link)], "is a file of the run; name another file"),
        ([str(folder), "--json", str(folder / "tokens" / "training.json")], "is a file of the run; name another"),
        ([str(other), "--against", str(folder), "--output", str(link)], "is a file of the run; name another file"),
        ([str(folder), "--output", "."], "cannot be written (Is a directory)"),
        ([str(folder), "--json", "/"], "cannot be written (Is a directory)"),
    ):
        code, _, errors = rljob("view", *arguments)
        assert code == 2
        assert words in errors
    assert [file.name for file in folder.glob(".*.tmp")] == []


def test_what_somebody_put_in_the_place_of_the_page_is_replaced(tmp_path: Path, rljob: Rljob) -> None:
    folder, other_file = RunRecord().write(tmp_path / "run"), tmp_path / "other.txt"
    other_file.write_text("of the viewer")
    page = folder / "view.html"
    for put in (lambda: page.symlink_to(other_file), lambda: os.mkfifo(page)):
        page.unlink(missing_ok=True)
        put()
        assert rljob("view", str(folder))[0] == 0
        assert page.is_file()
        assert not page.is_symlink()
    assert other_file.read_text() == "of the viewer"


def test_dev_stdout_does_not_replace_the_file_that_it_is(tmp_path: Path) -> None:
    folder, output = RunRecord().write(tmp_path / "run"), tmp_path / "all.txt"
    output.write_text("earlier\n")
    with output.open("ab") as file:
        command = [sys.executable, "-m", "rljob_cli", "view", str(folder), "--json", "/dev/stdout"]
        subprocess.run(command, stdout=file, env=inherited_environment(), check=True)
    begin, *_, end = output.read_text().splitlines()
    assert begin == "earlier"
    assert end.startswith("page: ")
    assert '"verdict"' in output.read_text()


def test_a_pipe_is_written_to_and_a_link_stays(tmp_path: Path, rljob: Rljob) -> None:
    folder = RunRecord().write(tmp_path / "run")
    pipe, link, other_link = (tmp_path / name for name in ("pipe", "link.json", "link.html"))
    os.mkfifo(pipe)
    link.symlink_to(tmp_path / "run.json")
    other_link.symlink_to(pipe)
    for page in (pipe, other_link):
        received: list[bytes] = []
        # A daemon, because the thread waits for ever if nobody opens the pipe.
        reader = threading.Thread(target=lambda found: found.append(pipe.read_bytes()), args=(received,), daemon=True)
        reader.start()
        code, output, _ = rljob("view", str(folder), "--output", str(page), "--json", str(link))
        assert code == 0
        assert f"page: {page} (" in output
        assert pipe.is_fifo()
        assert other_link.is_symlink()
        reader.join(60)
        assert received[0].endswith(b"</html>")
        assert link.is_symlink()
        assert json.loads((tmp_path / "run.json").read_text())["version"] == 1


def test_idle_time_is_named_by_what_a_worker_waits_for() -> None:
    found = read_timeline(timeline())
    assert found is not None
    controller, worker = found.processes
    assert (controller.idle, worker.idle) == ({}, {"scores": 30.0})
    assert "idle: scores" not in [name for name, *_ in worker.spans]
    assert worker.memory[0] == {
        "after": "generate",
        "at": 50,
        "owners": {"parameters": 10, "kv_cache": 100},
        "peak": 120,
        "process": 500,
    }


def test_two_runs_are_compared_by_fields_and_curves(tmp_path: Path, rljob: Rljob) -> None:
    job = RunRecord().job
    this = RunRecord().write(tmp_path / "this")
    env = "  env: [{name: PROXY, value: secret-1}]\n"
    other_job = job.replace("groupSize: 2", "groupSize: 4") + env
    other = RunRecord(job=other_job, num_steps=10, phase="Stopped").write(tmp_path / "other")
    assert rljob("view", str(this), "--against", str(other))[0] == 0
    against = document_of(this / "view.html")["against"]
    assert isinstance(against, dict)
    fields = {each["field"]: (each["this"], each["other"]) for each in against["differences"]}
    assert fields["spec.training.rollout.groupSize"] == ("2", "4")
    assert set(fields) - {"spec.env"} == {"spec.training.rollout.groupSize"}
    assert against["curves"]["critic/rewards/mean"]["index"][-1] == 10
    assert rljob("view", str(other))[0] == 0
    assert "secret-1" not in (this / "view.html").read_text() + (other / "view.html").read_text()


def test_a_watched_page_is_written_after_each_change_until_the_run_ends(tmp_path: Path) -> None:
    folder = RunRecord(**RUNNING, written_at=datetime.now(UTC)).write(tmp_path / "run")
    state = json.loads((folder / "rljob-run-state.json").read_text())
    pages = []

    def next_step(_: float) -> None:
        pages.append((folder / "view.html").read_text())
        state["progress"]["step"] += 1
        state["phase"] = "Complete" if len(pages) == 3 else "Running"
        (folder / "rljob-run-state.json").write_text(json.dumps(state))

    console = Console(record=True, width=200)
    assert view(ViewOptions(folder, watch=True), console, next_step) == 0
    assert [step for page in pages for step in re.findall(r"<h1.*?at step (\d+) of", page, re.DOTALL)] == [
        "12",
        "13",
        "14",
    ]
    assert all('data-reload-seconds="5"' in page for page in pages)
    last = (folder / "view.html").read_text()
    assert "Complete at step 15" in last
    assert 'data-reload-seconds="5"' not in last
    assert "The run has ended" in console.export_text()


def test_ctrl_c_ends_a_watch(tmp_path: Path) -> None:
    folder = RunRecord(**RUNNING, written_at=datetime.now(UTC)).write(tmp_path / "run")

    def interrupted(_: float) -> None:
        raise KeyboardInterrupt

    assert view(ViewOptions(folder, watch=True), Console(quiet=True), interrupted) == 130


def test_no_error_of_the_page_reaches_the_end_of_a_run(tmp_path: Path) -> None:
    folder = RunRecord().write(tmp_path / "run")
    assert page_after_run(folder) == f"page: {folder}/view.html"
    (folder / "metrics.jsonl").write_text("damaged\n\n")
    assert page_after_run(folder).startswith("note: no page was written: ")
    with pytest.raises(CliError):
        write_view(ViewOptions(folder))


def test_a_page_for_elsewhere_explains_alarms_and_has_no_paths_of_this_machine(tmp_path: Path) -> None:
    files = read_files(RunRecord(alarms=[CUT_OFF]).write(tmp_path / "run"))
    other = OtherRun(read_files(RunRecord().write(tmp_path / "other")), ())
    write_page(files, PageOptions(output=tmp_path / "elsewhere.html", other=other))
    text = (tmp_path / "elsewhere.html").read_text()
    assert str(tmp_path) not in text
    assert "file://" not in text
    assert EXPLANATIONS[Reason.RESPONSES_CUT_OFF].advice in unescape(text)
    write_page(files)
    assert f"<code>{tmp_path}/run</code>" in (tmp_path / "run" / "view.html").read_text()


def test_a_run_without_a_step_is_not_said_to_have_an_old_trainer(tmp_path: Path) -> None:
    words = "may be too old to do so"
    for num_steps in (0, 12):
        record = RunRecord(phase="Running", exit_code=None, num_steps=num_steps, alarms=None)
        write_page(read_files(record.write(tmp_path / "run")), now=WRITTEN_AT)
        assert (words in (tmp_path / "run" / "view.html").read_text()) == (num_steps > 0)


def test_without_a_job_the_comparison_does_not_say_that_the_specs_are_equal(tmp_path: Path) -> None:
    this, other = RunRecord().write(tmp_path / "this"), RunRecord().write(tmp_path / "other")
    (other / "job.yaml").unlink()
    write_view(ViewOptions(this, against=other))
    text = (this / "view.html").read_text()
    assert "both runs have the same spec" not in text
    assert document_of(this / "view.html")["against"]["differences"] is None  # type: ignore[call-overload, index]


def test_there_is_no_advice_without_a_finished_step(tmp_path: Path) -> None:
    assert advice_for(read_files(RunRecord(num_steps=0).write(tmp_path / "run"))) == []


def test_the_caller_can_say_that_a_stopped_job_is_active(tmp_path: Path) -> None:
    folder = RunRecord(phase="Stopped", exit_code=130, num_steps=12).write(tmp_path / "run")
    page = write_view(ViewOptions(folder, watch=True, is_active=True))
    assert page.is_active
    assert 'data-reload-seconds="5"' in page.path.read_text()
