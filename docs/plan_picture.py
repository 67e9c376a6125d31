"""Take the README's picture of a plan's page with Chromium.

python docs/plan_picture.py

The picture keeps a hash of the page's data, by which a test knows that its numbers are those of today.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image
from PIL.PngImagePlugin import PngInfo

ROOT = Path(__file__).resolve().parents[1]
PICTURE = ROOT / "docs" / "plan.png"
COMMAND = ("plan", "examples/layers/gemma_3_27b.json", "--memory", "80GB")
"""The README's command of ``kvframe``, run in the clone's folder."""

WIDTH, HEIGHT = 900, 848
COLOURS = 64


def make_page(path: Path) -> str:
    """Write the page; return the hash of its data."""
    command = [sys.executable, "-m", "kvframe", *COMMAND, "--html", str(path)]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    (data,) = re.findall(r'<script id="data"[^>]*>(.*?)</script>', path.read_text(encoding="utf-8"), re.DOTALL)
    return hashlib.sha256(data.encode()).hexdigest()


def hash_of_picture() -> str:
    """Return the hash of the data that the picture was made of."""
    with Image.open(PICTURE) as picture:
        return str(picture.info["data"])


def main() -> None:
    """Make the page, and the picture of its upper part."""
    with tempfile.TemporaryDirectory() as folder:
        page, screen = Path(folder, "plan.html"), Path(folder, "plan.png")
        info = PngInfo()
        info.add_text("data", make_page(page))
        options = ("--headless", "--no-sandbox", "--hide-scrollbars", f"--window-size={WIDTH},{HEIGHT}")
        subprocess.run(["chromium", *options, f"--screenshot={screen}", page.as_uri()], check=True)
        with Image.open(screen) as picture:
            few = picture.convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE)
        few.save(PICTURE, optimize=True, pnginfo=info)


if __name__ == "__main__":
    main()
