"""Take the pictures of the explorer in the documentation, from the stored results on CIFAR-10.

.venv/bin/python tools/screenshots.py     # docs/explorer.webp, explorer-phone.webp
.venv/bin/python tools/screenshots.py PAGE       # of a page that was made before

It needs Chromium, playwright and pillow (the dev extra).
"""

import io
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from PIL import Image
from playwright.sync_api import Browser, sync_playwright

ROOT = Path(__file__).parents[1]
RUN = ROOT / "results" / "paper-cifar10" / "pgdat-rr-seed0"
COLOURS = 64  # of a picture's palette


class Shot(NamedTuple):
    """One picture: its file, the window, and the first and last element on it."""

    name: str
    width: int
    scheme: str
    first: str
    last: str
    view: str = "#attack=pgd-10&score=R-Con&t=,"


SHOTS = (
    Shot("explorer.webp", 1080, "light", "#controls", ".plots"),
    Shot("explorer-phone.webp", 390, "light", ".panel", ".measures"),
)


def take(browser: Browser, page: Path, shot: Shot) -> bytes:
    """Return a picture as a PNG with a palette."""
    options = {"viewport": {"width": shot.width, "height": 1000}, "color_scheme": shot.scheme}
    tab = browser.new_page(**options)
    tab.goto(page.as_uri() + shot.view)
    tab.locator("#buttons [aria-label='thresholds of R-Con'] button").first.click()
    tab.mouse.move(0, 0)
    tab.wait_for_timeout(300)
    begin, end = (tab.locator(name).first.bounding_box() for name in (shot.first, shot.last))
    assert begin is not None
    assert end is not None
    scrolled = tab.evaluate("scrollY")  # boxes are relative to the window
    top, bottom = scrolled + begin["y"] - 8, scrolled + end["y"] + end["height"] + 8
    clip = {"x": 0, "y": top, "width": shot.width, "height": bottom - top}
    content = tab.screenshot(full_page=True, clip=clip)
    tab.close()
    packed = io.BytesIO()
    picture = Image.open(io.BytesIO(content)).convert("RGB")
    picture.quantize(COLOURS, dither=Image.Dither.NONE).convert("RGB").save(
        packed, "WEBP", lossless=True, quality=100, method=6
    )
    return packed.getvalue()


def main(page: Path | None = None) -> None:
    """Write the page of the stored results unless it is given, and take every picture of it."""
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as play:
        if page is None:
            page = Path(folder) / "report.html"
            words = [sys.executable, "-m", "demur", "report", str(RUN), "-o", str(page)]
            subprocess.run(words, check=True, cwd=ROOT)
        launched = play.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox", "--disable-gpu"]
        )
        for shot in SHOTS:
            (ROOT / "docs" / shot.name).write_bytes(take(launched, page, shot))
        launched.close()


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
