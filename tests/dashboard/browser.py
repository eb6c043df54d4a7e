"""A real browser for tests: Chromium without a window, driven over its DevTools protocol."""

import asyncio
import base64
import contextlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp

from tests.e2e.server_process import LASTING

__all__ = ["LOOK_SECONDS", "PATIENCE_SECONDS", "Page", "chromium_path", "open_page", "running_browser"]

PATIENCE_SECONDS = 30.0
"""How long anything may take; nothing waits that long unless it is broken."""
LOOK_SECONDS = 0.03
"""Between two looks at a page."""
_LARGEST_MESSAGE = 64 * 1024 * 1024
_OPTIONS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-lcd-text",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-breakpad",
    "--disable-component-update",
    "--disable-extensions",
    "--disable-sync",
    "--no-first-run",
    "--no-proxy-server",
    "--remote-debugging-port=0",
)


def chromium_path() -> str | None:
    """Where the browser is; None if it is not installed."""
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@contextlib.contextmanager
def running_browser(folder: Path) -> Iterator[str]:
    """The address of a browser's DevTools, for as long as the block lasts."""
    program = chromium_path()
    assert program is not None
    process = subprocess.Popen(
        [program, *_OPTIONS, f"--user-data-dir={folder}", "about:blank"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    LASTING.add(process.pid)
    try:
        yield _devtools_address(process, folder / "DevToolsActivePort")
    finally:
        LASTING.discard(process.pid)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(PATIENCE_SECONDS)


def _devtools_address(process: "subprocess.Popen[bytes]", announced: Path) -> str:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(FileNotFoundError, ValueError):
            port, path = announced.read_text().split()
            return f"ws://127.0.0.1:{port}{path}"
        time.sleep(LOOK_SECONDS)
    raise AssertionError(f"The browser did not come up; its exit code is {process.poll()}.")


class Page:
    """One page of a browser, with cookies and storage of its own."""

    def __init__(self, socket: "aiohttp.ClientWebSocketResponse[bool]") -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._session: str | None = None
        self.problems: list[str] = []
        """What the page complained about: errors that nobody caught, and breaches of its security policy."""

    async def listen(self) -> None:
        """Take what the browser says, until the connection ends."""
        async for message in self._socket:
            told = json.loads(message.data)
            if (answer := self._answers.pop(told.get("id"), None)) is not None and not answer.done():
                answer.set_result(told)
            elif told.get("method") == "Runtime.exceptionThrown":
                self.problems.append(json.dumps(told["params"]["exceptionDetails"]))
            elif told.get("method") == "Log.entryAdded" and told["params"]["entry"]["source"] == "security":
                self.problems.append(told["params"]["entry"]["text"])

    async def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command and its result."""
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        message: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        await self._socket.send_json(message if self._session is None else {**message, "sessionId": self._session})
        told = await asyncio.wait_for(answer, PATIENCE_SECONDS)
        assert "error" not in told, f"{method}: {told['error']}"
        result: dict[str, Any] = told["result"]
        return result

    async def attach(self) -> str:
        """Open the page in a context of its own, whose id is returned."""
        context: str = (await self.send("Target.createBrowserContext"))["browserContextId"]
        target = await self.send("Target.createTarget", url="about:blank", browserContextId=context)
        attached = await self.send("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            await self.send(f"{domain}.enable")
        return context

    async def leave(self, context: str) -> None:
        """Close the page and forget what it stored."""
        self._session = None
        await self.send("Target.disposeBrowserContext", browserContextId=context)

    # ------------------------------------------------------------------ what a reader does

    async def goto(self, url: str) -> None:
        await self.send("Page.navigate", url=url)

    async def ask(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page."""
        told = await self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in told, f"{expression}: {told['exceptionDetails']}"
        return told["result"].get("value")

    async def until(self, expression: str) -> None:
        """Wait until an expression is true."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < deadline:
            with contextlib.suppress(AssertionError):  # the page is being loaded
                if await self.ask(f"Boolean({expression})"):
                    return
            await asyncio.sleep(LOOK_SECONDS)
        text = await self.ask("document.body.innerText")
        raise AssertionError(f"It never came true: {expression}; the page says:\n{text}\n{self.problems}")

    async def until_text(self, text: str, place: str = "main") -> None:
        """Wait until a place of the page shows a text."""
        where, what = json.dumps(place), json.dumps(text)
        await self.until(f"document.querySelector({where})?.innerText.includes({what})")

    async def click(self, selector: str) -> None:
        """Wait for an element, and click on it."""
        found = f"document.querySelector({json.dumps(selector)})"
        await self.until(f"{found} && !{found}.disabled")
        await self.ask(f"{found}.click()")

    async def fill(self, selector: str, text: str) -> None:
        """Type a text into a field, in the place of what it holds."""
        found = f"document.querySelector({json.dumps(selector)})"
        await self.until(found + " !== null")
        await self.ask(f"{found}.focus(), {found}.select?.()")
        await self.send("Input.insertText", text=text)

    async def choose(self, selector: str, value: str) -> None:
        """Choose an option of a list."""
        found = f"document.querySelector({json.dumps(selector)})"
        await self.until(found + " !== null")
        await self.ask(f"{found}.value = {json.dumps(value)}, {found}.dispatchEvent(new Event('change'))")

    async def press(self, key: str) -> None:
        """Press a key and let it go."""
        code = {"Enter": 13, "Tab": 9, "ArrowLeft": 37}[key]
        text = {"text": "\r"} if key == "Enter" else {}
        for kind in ("keyDown", "keyUp"):
            await self.send("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, **text)
            text = {}

    async def hide(self) -> None:
        """Minimise the window, so that nobody sees the page."""
        await self._set_window("minimized")
        await self.until("document.hidden")

    async def show(self) -> None:
        """Bring a hidden window back."""
        await self._set_window("normal")
        await self.until("!document.hidden")

    async def _set_window(self, state: str) -> None:
        window = (await self.send("Browser.getWindowForTarget"))["windowId"]
        await self.send("Browser.setWindowBounds", windowId=window, bounds={"windowState": state})

    async def picture(self, file: Path, **options: Any) -> None:
        """Save what the page looks like."""
        shot = await self.send("Page.captureScreenshot", captureBeyondViewport=True, **options)
        await asyncio.to_thread(file.write_bytes, base64.b64decode(shot["data"]))


@contextlib.asynccontextmanager
async def open_page(devtools: str) -> AsyncIterator[Page]:
    """A page that is closed in the end."""
    async with (
        aiohttp.ClientSession() as session,
        session.ws_connect(devtools, max_msg_size=_LARGEST_MESSAGE) as socket,
    ):
        page = Page(socket)
        listening = asyncio.create_task(page.listen(), name="devtools")
        try:
            context = await page.attach()
            try:
                yield page
            finally:
                await page.leave(context)
        finally:
            listening.cancel()
            await asyncio.gather(listening, return_exceptions=True)
