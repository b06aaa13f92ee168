"""A headless Chromium, driven over the two pipes of `--remote-debugging-pipe` (no WebSocket library needed)."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import AsyncIterator
from typing import Any

EXECUTABLE = shutil.which("chromium") or shutil.which("google-chrome")


class Page:
    """One tab. `errors` are the texts of exceptions that its scripts did not catch."""

    def __init__(self, reader: asyncio.StreamReader, to_browser: int) -> None:
        self.errors: list[str] = []
        self._reader = reader
        self._to_browser = to_browser
        self._num_calls = 0
        self._session: str | None = None

    async def open(self, url: str) -> None:
        target = await self._call("Target.createTarget", url="about:blank")
        attached = await self._call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = attached["sessionId"]
        await self._call("Runtime.enable")
        await self._call("Page.enable")
        await self._call("Page.navigate", url=url)

    async def evaluate(self, script: str) -> Any:
        """The value of an expression; a promise is awaited."""
        found = await self._call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    async def reload(self) -> None:
        """Reloads the page, and waits until the old one is gone."""
        await self.evaluate("window.isOld = true")
        await self._call("Page.reload")
        is_old = True
        while is_old:
            with contextlib.suppress(AssertionError):  # the page may go away during the call
                is_old = await self.evaluate("window.isOld === true || document.readyState !== 'complete'")

    async def show(self, *, width: int, height: int, scheme: str = "light") -> None:
        """Emulates a screen size in CSS pixels, and a preference for a light or a dark page."""
        await self._call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=True
        )
        preferred = [{"name": "prefers-color-scheme", "value": scheme}]
        await self._call("Emulation.setEmulatedMedia", features=preferred)

    async def press(self, key: str) -> None:
        """Presses a key, as on a keyboard: Tab moves the focus, a character is written."""
        code = {"Tab": 9, "Enter": 13, "Escape": 27}.get(key)
        text = {"text": key} if len(key) == 1 else {"text": "\r"} if key == "Enter" else {}
        event = {"key": key, **text, **({} if code is None else {"windowsVirtualKeyCode": code})}
        await self._call("Input.dispatchKeyEvent", type="keyDown", **event)
        await self._call("Input.dispatchKeyEvent", type="keyUp", key=key)

    async def picture(self) -> bytes:
        """A screenshot of the whole page, as PNG."""
        found = await self._call("Page.captureScreenshot", captureBeyondViewport=True)
        return base64.b64decode(found["data"])

    async def until(self, condition: str) -> None:
        """Waits until a JavaScript expression is true."""
        script = "new Promise((done) => { const look = () => (CONDITION) ? done() : setTimeout(look, 50); look(); })"
        await self.evaluate(script.replace("CONDITION", condition))

    async def _call(self, method: str, **params: Any) -> dict[str, Any]:
        self._num_calls += 1
        number = self._num_calls
        session = {} if self._session is None else {"sessionId": self._session}
        message = {"id": number, "method": method, "params": params, **session}
        os.write(self._to_browser, json.dumps(message).encode() + b"\0")
        while True:
            answer = json.loads((await self._reader.readuntil(b"\0"))[:-1])
            if answer.get("method") == "Runtime.exceptionThrown":
                self.errors.append(json.dumps(answer["params"]["exceptionDetails"]))
            if answer.get("id") == number:
                assert "error" not in answer, answer["error"]
                result = answer["result"]
                assert isinstance(result, dict)
                return result


@contextlib.asynccontextmanager
async def browser(url: str) -> AsyncIterator[Page]:
    """A page in a new browser that opens `url`; the browser ends with the block."""
    assert EXECUTABLE is not None
    its_input, to_browser = os.pipe()
    from_browser, its_output = os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        options = [
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            f"--user-data-dir={profile}",
        ]
        # The browser expects its ends as descriptors 3 and 4.
        command = f'exec "$0" "$@" 3<&{its_input} 4>&{its_output}'
        process = await asyncio.create_subprocess_exec(
            *("bash", "-c", command, EXECUTABLE, "--remote-debugging-pipe", *options),
            pass_fds=(its_input, its_output),
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )
        os.close(its_input)
        os.close(its_output)
        loop, reader = asyncio.get_running_loop(), asyncio.StreamReader(limit=2**24)
        protocol = asyncio.StreamReaderProtocol(reader)
        transport, _ = await loop.connect_read_pipe(lambda: protocol, os.fdopen(from_browser, "rb"))
        page = Page(reader, to_browser)
        try:
            await page.open(url)
            yield page
        finally:
            process.kill()
            await process.wait()
            transport.close()
            os.close(to_browser)
