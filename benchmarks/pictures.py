"""Draw the pictures of docs/analyze.md, from reports that are stored as JSON next to the other results.

    python benchmarks/pictures.py              redraw docs/images/*.png (needs chromium)
    python benchmarks/pictures.py --measure    first recreate the reports that need no GPU

The reports of several ranks and of a compiled model come from small programs on a CPU (`late_rank`, `interrupted`),
slowed down on purpose. They show how to read a report; their times mean nothing.
"""

from __future__ import annotations

import argparse
import io
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

from rooftop import Report

HERE = Path(__file__).resolve().parent
RESULTS, IMAGES = HERE / "results", HERE.parent / "docs" / "images"
TRAINING = "h200/report-resnet50-training.json"
PREDICTED = "h200/report-resnet50-training-predicted.json"
RANKS = "cpu/report-two-ranks.json"
COMPILED = "cpu/report-compiled.json"
MOST_BYTES = 150_000


@dataclass(frozen=True)
class Picture:
    """A section of a report's page. "" is the top of the page: the header and the first two sections."""

    name: str
    report: str
    heading: str
    width: int = 1100


PICTURES = (
    Picture("report", TRAINING, ""),
    Picture("summary", TRAINING, "Summary"),
    Picture("opportunities", TRAINING, "Opportunities"),
    Picture("roofline", TRAINING, "Roofline"),
    Picture("modules", TRAINING, "Modules"),
    Picture("operators", TRAINING, "Operators", width=1280),
    Picture("memory", TRAINING, "Memory"),
    Picture("compilation", COMPILED, "Compilation"),
    Picture("ranks", RANKS, "Ranks"),
    Picture("predicted", PREDICTED, "Summary"),
)


class Late(nn.Module):
    """A few layers. One rank of a distributed step sleeps before it runs them."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(512, 512) for _ in range(6)))
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:  # (B, 512) -> (B, 512)
        time.sleep(self.seconds)
        output: Tensor = self.layers(x)
        return output


def late_rank() -> tuple[nn.Module, Tensor]:
    """A model that is 20 ms late on rank 1."""
    return Late(0.02 if os.environ.get("RANK") == "1" else 0.0), torch.randn(64, 512)


class Interrupted(nn.Module):
    """A model that breaks the graph by reading a value, and forces recompilation by counting its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.calls = nn.Linear(512, 512), nn.Linear(512, 512), 0

    def forward(self, x: Tensor) -> Tensor:  # (B, 512) -> (B, 512)
        hidden = self.first(x).relu()
        scale = hidden.abs().max().item()
        self.calls = min(self.calls + 1, 2)
        output: Tensor = self.second(hidden / (scale + self.calls))
        return output


def interrupted() -> tuple[nn.Module, Tensor]:
    return Interrupted(), torch.randn(256, 512)


def measure() -> None:
    """Create the reports that need no GPU, without the name of their folder."""
    analyze = [*("-m", "rooftop", "analyze", "--no-html")]
    ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    resnet = ["resnet50", "--train", "--input", "256x3x224x224", "--dtype", "bf16", "--predict", "h200"]
    for name, words in (
        (RANKS, [*ranks, *analyze, "pictures:late_rank", "--train", "--device", "cpu"]),
        (COMPILED, [*analyze, "pictures:interrupted", "--device", "cpu", "--compile"]),
        (PREDICTED, [*analyze, *resnet]),
    ):
        path = RESULTS / name
        path.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run([sys.executable, *words, "--json", str(path)], cwd=HERE, check=True)
        path.write_text(path.read_text().replace(f"{HERE.parent}{os.sep}", ""))


def draw() -> None:
    """Draw all pictures.

    Raises:
        RuntimeError: a picture is larger than `MOST_BYTES`.
    """
    from playwright.sync_api import sync_playwright

    IMAGES.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright, tempfile.TemporaryDirectory() as folder:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium") or shutil.which("google-chrome"), args=["--no-sandbox"]
        )
        for picture in PICTURES:
            html = Path(folder) / "report.html"
            Report.from_json(RESULTS / picture.report).to_html(html)
            page = browser.new_page(viewport={"width": picture.width, "height": 900}, color_scheme="light")
            page.goto(html.as_uri())
            page.wait_for_function("document.querySelector('#modules .slice') !== null")
            path = IMAGES / f"{picture.name}.png"
            path.write_bytes(smaller(taken(page, picture.heading)))
            page.close()
            if path.stat().st_size > MOST_BYTES:
                raise RuntimeError(f"{path.name} has {path.stat().st_size:,} bytes, expected at most {MOST_BYTES:,}")
            print(f"{path.name:20} {path.stat().st_size:>8,} bytes")


def taken(page: Any, heading: str) -> Any:
    """A picture (PNG) of a section, or of the top of the page."""
    if not heading:
        second = page.locator("section").nth(1).bounding_box()
        height = second["y"] + second["height"] + 16
        return page.screenshot(full_page=True, clip={"x": 0, "y": 0, "width": 1100, "height": height})
    page.add_style_tag(content=".scroll { max-height: 360px !important }")  # show only the first rows
    if heading == "Summary":
        return page.locator("section[aria-label=Summary]").screenshot()
    return page.locator("section", has=page.get_by_role("heading", name=heading, exact=True, level=2)).screenshot()


def smaller(png: bytes, most: int = 128) -> bytes:
    """Reduce the picture to this many colours, which halves the file without a visible difference."""
    packed = io.BytesIO()
    colours = Image.open(io.BytesIO(png)).convert("RGB").quantize(most, dither=Image.Dither.NONE)
    colours.save(packed, "PNG", optimize=True)
    return packed.getvalue()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", action="store_true", help="first recreate the reports that need no GPU")
    if parser.parse_args().measure:
        measure()
    draw()
    return 0


if __name__ == "__main__":
    sys.exit(main())
