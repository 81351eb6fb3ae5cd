"""Take the picture of a page that README.md shows, docs/screens/page.webp: the page of `reshard plan --html` in real Chromium.

    .venv-pictures/bin/python docs/page_picture.py

Needs Chromium, its driver, and selenium, which tests/pictures/check.py installs into .venv-pictures. The window is 1280 points wide, light.
Fonts differ between machines, so the same page gives other bytes elsewhere. Therefore docs/screens/page.txt has the text of the page, which
tests/docs/test_screens.py compares with the page as it is today: take the picture again when it differs.
"""

from __future__ import annotations

import base64
import os
import shutil
import subprocess
import sys
import tempfile
from html.parser import HTMLParser
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PICTURE = ROOT / "docs" / "screens" / "page.webp"
TEXT = PICTURE.with_suffix(".txt")
FILES = {"step-1000": "dcp/fsdp2/checkpoint", "tiny-llama": "dcp/fsdp2/model"}
COMMAND = ("plan", "step-1000", "--to", "vllm", "--tp", "2", "--model", "tiny-llama", "--html", "page.html")
WIDTH, HEIGHT = 1280, 925
# The heading of the first part that is below the picture.
BELOW = "Who reads from whom"


def page(reshard: Path, folder: Path) -> str:
    """The page, made in a folder by reshard's command."""
    for name, fixture in FILES.items():
        shutil.copytree(ROOT / "fixtures" / fixture, folder / name)
    (folder / "tiny-llama" / "tokenizer.json").write_text("{}")
    subprocess.run([reshard, *COMMAND], cwd=folder, env={**os.environ, "SOURCE_DATE_EPOCH": "0"}, stdout=subprocess.DEVNULL, check=True)
    return (folder / "page.html").read_text()


class _Words(HTMLParser):
    """The text of a page, without styles and what is folded or told to screen readers alone."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self._within = [], list[str]()  # type: ignore[var-annotated]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "link", "br"):
            self._within.append(tag)

    def handle_endtag(self, tag: str) -> None:
        while self._within and self._within.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        if not {"style", "script", "title", "details"} & set(self._within) and data.strip():
            self.words.append(" ".join(data.split()))


def text(html: str) -> str:
    """The text that the picture shows, a line for each piece."""
    parser = _Words()
    parser.feed(html)
    last = max(i for i, word in enumerate(parser.words) if word == BELOW)  # the first one is in the navigation
    return "\n".join(parser.words[:last]) + "\n"


def taken(path: Path) -> bytes:
    """The page as Chromium shows it, as WebP."""
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    for word in ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"):
        options.add_argument(word)
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService("/usr/bin/chromedriver"))
    try:
        size = {"width": WIDTH, "height": HEIGHT, "deviceScaleFactor": 1, "mobile": False}
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        driver.get(path.as_uri())
        found = driver.execute_cdp_cmd("Page.captureScreenshot", {"format": "webp", "quality": 80})
        return base64.b64decode(found["data"])
    finally:
        driver.quit()


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="reshard-page-") as folder:
        html = page(ROOT / ".venv" / "bin" / "reshard", Path(folder))
        PICTURE.write_bytes(taken(Path(folder) / "page.html"))
    TEXT.write_text(text(html))
    print(f"{PICTURE.relative_to(ROOT)}: {len(PICTURE.read_bytes()):,} bytes")


if __name__ == "__main__":
    sys.exit(main())
