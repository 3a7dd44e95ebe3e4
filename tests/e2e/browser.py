"""A headless Chromium, driven over its DevTools protocol: what a person sees and clicks.

with Browser(folder) as browser:
    browser.open("http://127.0.0.1:4200")
    browser.click("button", "Run")
    browser.screenshot(folder / "run.png")
"""

from __future__ import annotations

import base64
import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import websockets.sync.client

from infra.processes import GuardedProcess, process_token

PROGRAM = shutil.which("chromium") or shutil.which("google-chrome") or shutil.which("chromium-browser")
START_SECONDS = 120.0
PATIENCE_SECONDS = 120.0
WIDTH, HEIGHT = 1280, 900


class Browser:
    """One page of one browser, in a profile of its own.

    Args:
        folder: of the profile and the log; made if absent.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._number = 0

    def __enter__(self) -> Browser:
        assert PROGRAM is not None
        folder = self._folder
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "profile" / "DevToolsActivePort").unlink(missing_ok=True)  # of an earlier browser
        argv = [PROGRAM, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        argv += ["--disable-background-networking", "--no-first-run", "--hide-scrollbars", "--mute-audio"]
        argv += [f"--user-data-dir={folder / 'profile'}", "--remote-debugging-port=0"]
        argv += [f"--window-size={WIDTH},{HEIGHT}", "about:blank"]
        token = process_token("browser", str(folder))
        self._process = GuardedProcess.start(argv, token=token, log_path=folder / "chromium.log")
        try:
            self._socket = websockets.sync.client.connect(self._endpoint(), max_size=None, open_timeout=60)
            target = self._ask("Target.createTarget", url="about:blank")["targetId"]
            self._session = self._ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
            self.ask("Page.enable")
            self.ask(
                "Emulation.setDeviceMetricsOverride", width=WIDTH, height=HEIGHT, deviceScaleFactor=1, mobile=False
            )
        except BaseException:
            self._process.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.close()
        self._process.stop()

    def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send one command of the protocol to the page and return its result."""
        return self._ask(method, session=self._session, **parameters)

    def open(self, url: str) -> None:
        self.ask("Page.navigate", url=url)
        self.wait_for(lambda: self.run("document.readyState") == "complete", f"{url} to be loaded")

    def run(self, script: str) -> Any:
        """Value of a JavaScript expression in the page."""
        answer = self.ask("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    @property
    def text(self) -> str:
        """What can be read on the page."""
        return str(self.run("document.body.innerText"))

    def wait_for(self, reached: Callable[[], Any], what: str, timeout_seconds: float = PATIENCE_SECONDS) -> Any:
        deadline = time.monotonic() + timeout_seconds
        while not (found := reached()):
            assert time.monotonic() < deadline, f"waited in vain for {what}; the page says:\n{self.text[:3000]}"
            time.sleep(0.3)
        return found

    def wait_for_text(self, text: str, timeout_seconds: float = PATIENCE_SECONDS) -> None:
        self.wait_for(lambda: text in self.text, f"{text!r}", timeout_seconds)

    def click(self, selector: str, text: str = "") -> None:
        """Click the first visible element that a selector finds and whose text contains `text`, as a mouse does."""
        found = f"""[...document.querySelectorAll({json.dumps(selector)})].filter(one =>
            one.innerText.includes({json.dumps(text)}) && one.getClientRects().length)[0]"""
        self.wait_for(lambda: self.run(f"!!({found})"), f"{selector} with {text!r}")
        self.run(f"({found}).scrollIntoView({{block: 'center'}})")
        time.sleep(0.3)
        x, y = self.run(
            f"(() => {{const box = ({found}).getBoundingClientRect();"
            "return [box.x + box.width / 2, box.y + box.height / 2]})()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.ask("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def type(self, text: str) -> None:
        """Type into what has the focus."""
        self.ask("Input.insertText", text=text)

    def screenshot(self, path: Path, *, whole: bool = False) -> None:
        """What is in the window, or the whole page, as a WebP or PNG by the path's ending."""
        kind = {".webp": {"format": "webp", "quality": 70}, ".png": {"format": "png"}}[path.suffix]
        picture = self.ask("Page.captureScreenshot", captureBeyondViewport=whole, **kind)
        path.write_bytes(base64.b64decode(picture["data"]))

    def _endpoint(self) -> str:
        port_file = self._folder / "profile" / "DevToolsActivePort"
        deadline = time.monotonic() + START_SECONDS
        while True:
            lines = port_file.read_text().splitlines() if port_file.exists() else []
            if len(lines) >= 2:
                return f"ws://127.0.0.1:{lines[0]}{lines[1]}"
            assert self._process.poll() is None, (self._folder / "chromium.log").read_text()[-2000:]
            assert time.monotonic() < deadline, "the browser did not start"
            time.sleep(0.1)

    def _ask(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if session:
            message["sessionId"] = session
        self._socket.send(json.dumps(message))
        while True:
            answer = json.loads(self._socket.recv(timeout=PATIENCE_SECONDS))
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                result: dict[str, Any] = answer["result"]
                return result
