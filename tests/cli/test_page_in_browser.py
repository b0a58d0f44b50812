"""The page of a run in a real browser, a headless Chromium: what is drawn, clicks, keys, and text that wants to be
script. All tests share one browser."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from rljob_page.page import PageOptions, write_page
from rljob_page.page_data import Difference, OtherRun
from rljob_page.run_files import Json, read_files
from rljob_testing.browser import Browser, running_browser
from rljob_testing.cli.run_folders import RunRecord, conversation, sample, samples_of, timeline

Show = Callable[..., None]
SCRIPT_TEXTS = [
    "</script><script>window.attacked = 1</script>",
    "<!--<script>window.attacked = 2",
    '<img src=x onerror="window.attacked = 3">',
    "<svg onload='window.attacked = 4'><iframe srcdoc='<script>parent.attacked = 5</script>'></iframe>",
    "{{ 7 * 7 }} {% raw %} ${window.attacked = 6} `${window.attacked = 7}`",
    '" autofocus onfocus="window.attacked = 8" x="',
    "javascript:window.attacked=9",
    "\u001b[31mred\u001b]8;;https://example.com\u0007link\u0000 \u2028 \u2029",
    "\u202egnp.exe\u2066 \u05d0\u05d1 \ud800 \udfff end",
    "tag\U000e0041 soft\u00ad \U0001f600",
]


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """One browser for all tests. Chromium and chromedriver are needed; an error names what is missing."""
    with running_browser(tmp_path_factory.mktemp("browser")) as started:
        yield started


@pytest.fixture
def show(browser: Browser, tmp_path: Path) -> Iterator[Show]:
    """Writes the page of a run and opens it. Afterwards checks that nothing was reported on the console."""

    def opened(record: RunRecord, options: PageOptions | None = None, width: int = 1200, *, dark: bool = False) -> None:
        page = write_page(read_files(record.write(tmp_path / "run")), options)
        browser.emulate(width, dark=dark)
        browser.open(page.path)
        assert browser.run("return document.documentElement.dataset.ready !== undefined"), browser.console_errors()

    yield opened
    assert browser.console_errors() == []


def whole_run() -> RunRecord:
    """A run with everything that the page shows."""
    chat = conversation(["2 + 2", "="], ["4", "\n", "<b>", "!"], group="28-what is 9 + 1?")
    tokens: Json = {"version": 1, "step": 28, "conversations": [chat]}
    return RunRecord(
        samples=samples_of(40, 30),
        tokens={"training": tokens, "evaluation": tokens},
        timelines={"step-000003": timeline(), "newest": timeline()},
    )


@pytest.mark.parametrize(("width", "dark"), [(400, True), (1600, False)])
def test_all_parts_are_drawn_at_every_width_in_light_and_dark(
    width: int, dark: bool, browser: Browser, show: Show
) -> None:
    show(whole_run(), width=width, dark=dark)
    assert browser.texts("h1") == ["Complete at step 30 of 30: held-out score 0.2 → 0.9"]
    assert {
        "Training reward mean score",
        "Held-out score, heldout mean score",
        "Seconds by phase seconds (stacked)",
    } <= {*browser.texts(".chart h3")}
    assert browser.texts("section > h2") == [
        "Curves",
        "Rewards and responses",
        "Conversations, token by token",
        "Timeline of a step",
        "Memory",
        "Job",
    ]
    assert browser.run("return document.documentElement.scrollWidth") == width
    assert browser.run("return [...document.querySelectorAll('.chart canvas')].every((each) => each.width > 150)")
    back = browser.run("return getComputedStyle(document.body).backgroundColor")
    assert back == ("rgb(17, 22, 29)" if dark else "rgb(246, 247, 249)")


def test_the_cursor_shows_the_values_of_a_step(browser: Browser, show: Show) -> None:
    show(whole_run())
    assert browser.texts(".chart:nth-child(2) .u-series") == ["step30", "greedy0.9", "mean@10.8"]
    browser.press(".chart", "\ue011")  # Home
    browser.press(".chart", "\ue014")  # the right arrow
    assert browser.texts(".chart:nth-child(1) .u-series")[:2] == ["step2", "reward0.1988"]
    assert browser.texts(".chart:nth-child(4) .u-series") == ["step2", "entropy0.9667"]


def test_a_click_on_a_bar_shows_the_responses_of_a_group_side_by_side(browser: Browser, show: Show) -> None:
    failed = sample(30, "what is 5 + 1?", "no idea", None, statuses={"accuracy": "TIMEOUT"})
    show(RunRecord(samples=[*samples_of(8, 1), *(entry | {"step": 30} for entry in samples_of(8, 1)), failed]))
    assert browser.texts(".bars button") == ["2", "2", "2", "2", "1"]
    browser.click(".bars button:last-child")
    assert browser.texts(".groups .prompt") == ["what is 5 + 1?"]
    assert browser.texts(".response strong") == ["▸ no score"]
    assert "TIMEOUT" in browser.texts(".response")[0]
    browser.press(".bars button", "\ue007")  # Enter
    assert browser.texts(".bars button[aria-pressed=true]") == ["2"]
    assert browser.texts(".groups .prompt") == ["what is 0 + 1?", "what is 1 + 1?"]
    browser.click(".groups button:nth-child(2)")
    assert browser.texts(".response strong") == ["▸ score 0", "score 0.333", "score 0.667", "score 1"]
    tops = browser.run("return [...document.querySelectorAll('.response')].map((each) => each.offsetTop)")
    assert isinstance(tops, list)
    assert len(set(tops)) == 1
    assert "the answer is 5" in browser.texts(".response")[1]


def test_tokens_are_colored_and_explained(browser: Browser, show: Show) -> None:
    show(whole_run())
    classes = "return [...document.querySelectorAll('.token-text span')].map((each) => each.className)"
    assert browser.run(classes) == ["", "", *["mask-trained"] * 3, "mask-sampled"]
    assert browser.run("return document.querySelector('.token-text').textContent") == "2 + 2=4⏎\n<b>!"
    browser.press(".token-text", "\ue014\ue014\ue014")
    [detail] = browser.texts(".detail")
    assert detail == (
        'token 3 of 6: "4" · trained on · log-probability in the rollout engine -0.5 · in the trainer -0.9 · '
        "log-probability difference -0.4 · age (steps) 0 · advantage 0.8"
    )
    assert browser.texts("#conversations .hint")[-1] == "Scores of its group: 0 0.333 0.667 1"
    browser.click("#conversations .controls > span:last-child button:nth-child(2)")
    colors = browser.run(
        "return [...document.querySelectorAll('.token-text span')].map((each) => each.style.backgroundColor)"
    )
    assert isinstance(colors, list)
    assert [bool(color) for color in colors] == [False, False, True, False, True, True]
    assert colors[2] != colors[4]
    browser.click("#conversations .controls > span:last-child button:nth-child(3)")
    assert browser.texts("#conversations .legend span")[1:] == [
        "1 step older",
        "2 steps older",
        "4 steps older or more",
    ]


def test_the_timeline_names_idle_time_and_can_be_enlarged(browser: Browser, show: Show) -> None:
    show(whole_run())
    assert browser.texts("#timelines tbody tr") == ["main, rank 0\tscores\t30 ms\t30.0 %"]
    times = "#timelines .process:first-child text.dim"
    assert [browser.texts(times)[0], browser.texts(times)[-1]] == ["0 ms", "100 ms"]
    browser.click("#timelines button[aria-label='zoom in']")
    assert [browser.texts(times)[0], browser.texts(times)[-1]] == ["30 ms", "70 ms"]
    browser.press("#timelines button[aria-label='later']", "\ue007")
    assert browser.texts(times)[-1] == "90 ms"
    browser.run("for (let i = 0; i < 60; i++) document.querySelector(\"#timelines [aria-label='zoom in']\").click()")
    assert len(browser.texts(times)) in range(1, 20)
    assert "kv cache" in browser.texts("#memories .legend")[0]
    assert "peak since the boundary before" in browser.texts("#memories .legend")[0]


def test_text_of_a_model_or_user_never_runs_as_script(browser: Browser, show: Show, tmp_path: Path) -> None:
    samples = [
        sample(
            30,
            text,
            text,
            0.5,
            group="one",
            answer=text,
            outcome=text,
            found={text: text},
            rewards={text: 1.0, "b": None},
            statuses={text: text},
            messages=[{"role": text, "content": text, "tool_calls": [text]}] if index % 2 else [],
        )
        for index, text in enumerate(SCRIPT_TEXTS)
    ]
    # A run state must be valid Unicode.
    every = "".join(SCRIPT_TEXTS[:-2])
    chat = conversation(SCRIPT_TEXTS, SCRIPT_TEXTS)
    events = timeline()["traceEvents"]
    assert isinstance(events, list)
    hostile_timeline: Json = {
        "traceEvents": [event | {"name": every} if event["ph"] == "X" else event for event in events]
    }
    alarm = {"reason": "EqualScores", "message": every[:500], "sinceStep": 1, "step": 2}
    error = {"kind": "ValueError", "message": every}
    record = RunRecord(
        name=every,
        phase="Failed",
        exit_code=1,
        alarms=[alarm],
        error=error,
        samples=samples,
        tokens={"training": {"step": every, "conversations": [chat]}},
        timelines={"step-000003": hostile_timeline},
    )
    other = OtherRun(read_files(record.write(tmp_path / "other")), (Difference(every, every, every),))
    show(record, PageOptions(advice=[every], other=other))
    for selector in (".bars button", ".groups button", "#conversations select", ".notices summary"):
        browser.run("document.querySelector(arguments[0])?.click()", selector)
    assert browser.run("return window.attacked === undefined")
    assert browser.run("return document.scripts.length") == 2
    assert browser.run("return document.querySelectorAll('img, iframe, [onload], [onerror], [onfocus]').length") == 0
    assert browser.run("return [...document.links].every((link) => /^(file|#)/.test(link.getAttribute('href')))")
    shown = "\n".join(browser.texts(".response"))
    assert "</script><script>window.attacked = 1</script>" in shown
    assert "␛[31mred" in shown
    assert "⟨202E⟩gnp.exe⟨2066⟩ א" in shown
    assert "� � end" in shown
    assert "tag⟨E0041⟩ soft⟨00AD⟩ 😀" in shown


def test_a_long_name_of_a_metric_does_not_widen_the_page(browser: Browser, tmp_path: Path) -> None:
    folder = RunRecord().write(tmp_path / "run")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(f'{{"step": 30, "eval/{"m" * 150}/greedy": 1.0}}\n')
    browser.emulate(400)
    browser.open(write_page(read_files(folder)).path)
    assert "m" * 150 in browser.texts(".facts")[0]
    assert browser.run("return document.documentElement.scrollWidth") == 400


def test_two_runs_share_the_axes(browser: Browser, show: Show, tmp_path: Path) -> None:
    other = read_files(RunRecord(num_steps=60, total_steps=60).write(tmp_path / "other"))
    difference = Difference("spec.training.steps", "30", "60")
    show(whole_run(), PageOptions(other=OtherRun(other, (difference,))))
    assert "other run: greedy0.9" in browser.texts(".chart:nth-child(2) .u-series")
    browser.press(".chart", "\ue010")  # End
    assert browser.texts(".chart:nth-child(2) .u-series")[:2] == ["step60", "greedy–"]
    assert "spec.training.steps\t30\t60" in browser.texts("#against tbody tr")
    assert "Step\t30 of 30\t60 of 60" in browser.texts("#against tbody tr")


def test_a_page_that_is_watched_reloads_itself_and_keeps_what_was_chosen(
    browser: Browser, show: Show, tmp_path: Path
) -> None:
    running = {"phase": "Running", "exit_code": None, "written_at": datetime.now(UTC), "samples": samples_of(40, 10)}
    show(RunRecord(num_steps=10, **running), PageOptions(reload_seconds=1))
    choose = "const list = document.querySelector('#samples select'); list.value = '3'"
    browser.run(f"{choose}; list.dispatchEvent(new Event('change'))")
    options = PageOptions(reload_seconds=1)
    write_page(read_files(RunRecord(num_steps=11, **running).write(tmp_path / "run")), options)
    deadline = time.monotonic() + 60
    while not browser.texts("h1") or "step 11 of 30" not in browser.texts("h1")[0]:
        assert time.monotonic() < deadline, browser.texts("h1")
    assert browser.run("return document.querySelector('#samples select')?.value") == "3"
