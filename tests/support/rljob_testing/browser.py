"""A headless Chromium, controlled through chromedriver by the WebDriver protocol (https://www.w3.org/TR/webdriver2/).

A dozen requests do not need the package `selenium`, which would be a dependency with a browser manager of its own.
"""

from __future__ import annotations

import base64
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

_FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
)
_ELEMENT = "element-6066-11e4-a52e-4f735466cecf"
"""The key of an element's id in answers (W3C WebDriver, section 12.1)."""


class BrowserError(Exception):
    """The browser cannot be started, or rejected a request."""


class Browser:
    """One session of a browser."""

    def __init__(self, client: httpx.Client, session: str) -> None:
        self._client = client
        self._session = session

    def open(self, page: Path) -> None:
        """Opens a file and waits until its scripts have run."""
        self._post("url", {"url": page.as_uri()})

    def run(self, script: str, *arguments: object) -> object:
        """Runs the body of a JavaScript function in the page, and returns its result as JSON."""
        return self._post("execute/sync", {"script": script, "args": list(arguments)})

    def texts(self, selector: str) -> list[str]:
        """The visible text of each element that matches a CSS selector."""
        text = "each.innerText ?? each.textContent"  # elements of SVG have no innerText
        found = self.run(f"return [...document.querySelectorAll(arguments[0])].map((each) => {text})", selector)
        assert isinstance(found, list)
        return [str(text) for text in found]

    def click(self, selector: str) -> None:
        """Scrolls to the first element that matches a CSS selector, and clicks on its middle."""
        found = self._post("element", {"using": "css selector", "value": selector})
        assert isinstance(found, dict)
        self._post(f"element/{found[_ELEMENT]}/click", {})

    def press(self, selector: str, keys: str) -> None:
        """Gives an element the focus, and types keys."""
        self.run("document.querySelector(arguments[0]).focus()", selector)
        actions = [{"type": kind, "value": key} for key in keys for kind in ("keyDown", "keyUp")]
        self._post("actions", {"actions": [{"type": "key", "id": "keyboard", "actions": actions}]})

    def devtools(self, command: str, **parameters: object) -> object:
        """Sends a command of the Chrome DevTools protocol."""
        return self._post("goog/cdp/execute", {"cmd": command, "params": parameters})

    def emulate(self, width: int, *, dark: bool = False, height: int = 900) -> None:
        """Sets the width of the window in CSS pixels, and the preferred color scheme."""
        self.devtools(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.devtools("Emulation.setEmulatedMedia", features=[scheme])

    def console_errors(self) -> list[str]:
        """The errors on the console since the last call, also those of the Content-Security-Policy."""
        entries = self._post("se/log", {"type": "browser"})
        assert isinstance(entries, list)
        return [entry["message"] for entry in entries if entry["level"] == "SEVERE"]

    def screenshot(self, file: Path, *, whole_page: bool = True) -> None:
        """Writes a PNG."""
        answer = self.devtools("Page.captureScreenshot", captureBeyondViewport=whole_page)
        assert isinstance(answer, dict)
        file.write_bytes(base64.b64decode(str(answer["data"])))

    def _post(self, path: str, body: dict[str, object]) -> object:
        answer = self._client.post(f"/session/{self._session}/{path}", json=body).json()["value"]
        if isinstance(answer, dict) and "error" in answer:
            raise BrowserError(f"{path}: {answer['message']}")
        return answer


@contextmanager
def running_browser(folder: Path) -> Iterator[Browser]:
    """Starts a browser with an empty profile in `folder`, and ends it. Raises BrowserError if a program is missing."""
    programs = {name: shutil.which(name) for name in ("chromedriver", "chromium")}
    if missing := [name for name, path in programs.items() if path is None]:
        raise BrowserError(
            f"not on PATH: {', '.join(missing)}; install the packages chromium and chromium-driver (Debian)"
        )
    command = [str(programs["chromedriver"]), "--port=0", f"--log-path={folder / 'chromedriver.log'}"]
    driver = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{_port(driver)}", timeout=60, trust_env=False) as client:
            options = {
                "binary": programs["chromium"],
                "args": [*_FLAGS, f"--user-data-dir={folder / 'profile'}"],
            }
            capabilities = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "SEVERE"}}
            answer = client.post("/session", json={"capabilities": {"alwaysMatch": capabilities}}).json()["value"]
            if "sessionId" not in answer:
                raise BrowserError(f"chromium does not start: {answer.get('message')}")
            try:
                yield Browser(client, answer["sessionId"])
            finally:
                client.delete(f"/session/{answer['sessionId']}")
    finally:
        driver.terminate()
        driver.wait()


def _port(driver: subprocess.Popen[str]) -> int:
    """The port that chromedriver prints when it is ready."""
    assert driver.stdout is not None
    deadline = time.monotonic() + 60
    for line in driver.stdout:
        if found := re.search(r"started successfully on port (\d+)", line):
            return int(found[1])
        if time.monotonic() > deadline:
            break
    raise BrowserError("chromedriver did not start; see its log")
