"""A Chromium without a window, spoken to over two pipes in its DevTools protocol; no package is needed."""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
OPTIONS = ["--headless", "--no-sandbox", "--disable-dev-shm-usage", "--remote-debugging-pipe"]
OPTIONS += [
    "--use-angle=swiftshader",
    "--enable-unsafe-swiftshader",
    "--no-first-run",
    "--disable-extensions",
]


class Tab:
    """One tab. Waits end after ``deadline`` seconds in all."""

    def __init__(self, to: int, back: int, size: int, deadline: float) -> None:
        self._to, self._back, self._until = to, back, time.monotonic() + deadline
        self._read, self._calls, self._session = b"", 0, {}
        (target,) = [t for t in self.call("Target.getTargets")["targetInfos"] if t["type"] == "page"]
        attached = self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = {"sessionId": attached["sessionId"]}
        self.requests: list[str] = []
        self.call("Network.enable")
        screen = {"width": size, "height": size, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **screen)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Return what the browser answers."""
        self._calls += 1
        message = {"id": self._calls, "method": method, "params": parameters} | self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while (answer := self._message()).get("id") != self._calls:
            if answer.get("method") == "Network.requestWillBeSent":
                self.requests.append(answer["params"]["request"]["url"])
        assert "error" not in answer, answer["error"]
        return answer["result"]

    def _message(self) -> dict[str, Any]:
        while b"\0" not in self._read:
            left = self._until - time.monotonic()
            assert left > 0 and select.select([self._back], [], [], left)[0], (
                "Chromium has not answered in time"
            )
            piece = os.read(self._back, 1 << 20)
            assert piece, "Chromium has ended"
            self._read += piece
        message, _, self._read = self._read.partition(b"\0")
        return json.loads(message)

    def value(self, script: str) -> Any:
        """Return the value of an expression, or of the promise that it is."""
        given = {"expression": script, "awaitPromise": True, "returnByValue": True}
        answer = self.call("Runtime.evaluate", **given)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def open(self, path: Path) -> None:
        """Show a file, and wait until its scripts have run."""
        self.call("Page.navigate", url=path.as_uri())
        while self.value("document.readyState + location.protocol") != "completefile:":
            time.sleep(0.02)


@contextmanager
def tab(folder: Path, size: int, deadline: float = 60.0) -> Iterator[Tab]:
    """Yield a tab of ``size`` pixels both ways; skip the test where there is no Chromium."""
    program = next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        pytest.skip("no Chromium")
    (child_in, to), (back, child_out) = os.pipe(), os.pipe()
    options = [
        *OPTIONS,
        f"--user-data-dir={folder / 'profile'}",
        f"--window-size={size},{size}",
        "about:blank",
    ]
    # The protocol wants descriptors 3 and 4.
    command = ["bash", "-c", f'exec "$@" 3<&{child_in} 4>&{child_out}', "bash", program, *options]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "start_new_session": True}
    process = subprocess.Popen(command, pass_fds=(child_in, child_out), **quiet)
    os.close(child_in)
    os.close(child_out)
    try:
        yield Tab(to, back, size, deadline)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(10)
        os.close(to)
        os.close(back)
