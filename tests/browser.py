"""A headless browser for tests: what a page says, shadow roots and frames of its own host included, and pictures."""

import asyncio
import base64
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

_TEXT = """
(function text(node) {
  if (node.nodeType === 3) return node.textContent;
  if (["STYLE", "SCRIPT", "TEMPLATE", "DOM-MODULE"].includes(node.tagName)) return "";
  const inner = node.tagName === "IFRAME" && node.contentDocument ? [node.contentDocument.body] : [];
  const root = node.shadowRoot ? [node.shadowRoot] : [];
  return [...root, ...node.childNodes, ...inner].filter(Boolean).map(text).join(" ");
})(document.body).replace(/\\s+/g, " ")
"""

_FIND = """
(function find(node, text, found) {
  for (const inner of [...(node.shadowRoot ? [node.shadowRoot] : []), ...node.childNodes]) {
    if (inner.nodeType === 3 && inner.textContent.trim() === text) {
      const range = document.createRange();
      range.selectNodeContents(inner);
      const box = range.getBoundingClientRect();
      if (box.width) found.push({left: box.left, right: box.right, top: box.top, bottom: box.bottom});
    }
    find(inner, text, found);
  }
  return found;
})(document.body, TEXT, [])
"""


class Page:
    """One page of a browser that runs for as long as the block."""

    def __init__(self, size: tuple[int, int] = (1400, 900)) -> None:
        self.size = size
        self._folder = Path(tempfile.mkdtemp())
        self._count = 0

    async def __aenter__(self) -> "Page":
        import aiohttp

        assert CHROMIUM is not None
        options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0", "--mute-audio"]
        options += ["--no-first-run", "--disable-background-networking", f"--user-data-dir={self._folder}"]
        command = [CHROMIUM, *options, f"--window-size={self.size[0]},{self.size[1]}", "about:blank"]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        port = await self._until(lambda: (self._folder / "DevToolsActivePort").read_text().split()[0], 60)
        self._session = aiohttp.ClientSession()
        async with self._session.get(f"http://127.0.0.1:{port}/json/list") as answer:
            target = next(t for t in await answer.json() if t["type"] == "page")
        self._socket = await self._session.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=0)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()
        self._process.terminate()
        self._process.wait(30)
        shutil.rmtree(self._folder, ignore_errors=True)

    async def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._count += 1
        await self._socket.send_json({"id": self._count, "method": method, "params": parameters})
        while True:
            answer = await self._socket.receive_json()
            if answer.get("id") == self._count:
                return dict(answer["result"])

    @staticmethod
    async def _until(ask: Callable[[], Any], seconds: float) -> Any:
        for _ in range(int(seconds / 0.1)):
            try:
                return ask()
            except (OSError, IndexError):
                await asyncio.sleep(0.1)
        raise TimeoutError("the browser did not start.")

    async def run(self, script: str) -> Any:
        answer = await self._call("Runtime.evaluate", expression=script, returnByValue=True)
        return answer["result"].get("value")

    async def open(self, address: str, *wanted: str, seconds: float = 60) -> str:
        """Go to an address and wait until the page says everything that is wanted; gives its text."""
        await self._call("Page.navigate", url="about:blank")
        await self._call("Page.navigate", url=address)
        text = ""
        for _ in range(int(seconds / 0.25)):
            await asyncio.sleep(0.25)
            text = str(await self.run(_TEXT) or "")
            if all(word in text for word in wanted):
                return text
        missing = [word for word in wanted if word not in text]
        raise AssertionError(f"{address} never showed {missing}, but: {text[:2000]}")

    async def find(self, text: str) -> list[dict[str, float]]:
        """Where on the page the letters of a text stand, in pixels from the window's corner, from left to right."""
        found: list[dict[str, float]] = await self.run(_FIND.replace("TEXT", repr(text)))
        return sorted(found, key=lambda box: box["left"])

    async def picture(self, file: Path) -> None:
        """The window as a PNG."""
        answer = await self._call("Page.captureScreenshot", format="png")
        file.write_bytes(base64.b64decode(answer["data"]))
