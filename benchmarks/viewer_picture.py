"""Draw the picture of `rooftop scene view` in docs/scene.md: the viewer's page with the mountains of
examples/terrain.py.

    python benchmarks/viewer_picture.py [--out docs/images/scene_view.png]

The script needs chromium. The picture shows the times of the machine that draws it. These times illustrate the page's
layout, and say nothing about speed.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import threading
from pathlib import Path

from pictures import IMAGES, MOST_BYTES, smaller

from rooftop import scene
from rooftop.scene.viewing.drawing import Drawing
from rooftop.scene.viewing.serving import Viewer

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

TRIANGLES = 400_000
WINDOW = {"width": 940, "height": 620}
VIEW = {"eye": [4700, -900, 1900], "target": [2300, 1700, 250], "up": [0, 0, 1], "fov_y_degrees": 50}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=IMAGES / "scene_view.png")
    out = parser.parse_args().out

    from playwright.sync_api import sync_playwright
    from terrain import mountains

    with tempfile.TemporaryDirectory() as folder:
        mountains(TRIANGLES, Path(folder) / "mountains.rtg", seed=4)
        world = scene.Scene()
        world.add_instance(world.add_mesh(Path(folder) / "mountains.rtg"))
        drawing = Drawing(world)
        with Viewer(drawing) as viewer, sync_playwright() as playwright:
            threading.Thread(target=viewer.serve_forever, daemon=True).start()
            browser = playwright.chromium.launch(
                executable_path=shutil.which("chromium") or shutil.which("google-chrome"), args=["--no-sandbox"]
            )
            page = browser.new_page(viewport=WINDOW, color_scheme="light")
            page.goto(viewer.url)
            page.wait_for_selector("#picture[data-state=sharp]", timeout=300_000)
            for _ in range(2):  # from the second picture on, a frame has a previous frame
                page.evaluate("found => { view = found; change(); }", VIEW)
                page.wait_for_selector("#picture[data-state=sharp]", timeout=300_000)
            png = smaller(page.screenshot(), 64)
            browser.close()
            viewer.shutdown()
        drawing.stop(60)
    if len(png) > MOST_BYTES:
        raise RuntimeError(f"{out.name} has {len(png):,} bytes, expected at most {MOST_BYTES:,}")
    out.write_bytes(png)
    print(f"{out}: {len(png):,} bytes")


if __name__ == "__main__":
    main()
