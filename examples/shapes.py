"""Pictures of coloured shapes with their boxes in COCO's format, as a small data set for detectors.

    python examples/shapes.py FOLDER [--count 16] [--side 128] [--seed 0]

A picture shows one to four circles, squares and triangles on a noisy background. The script writes PNG files, and
instances.json in the same folder, which `rooftop.models.CocoDataset` reads. The same seed gives the same pictures.

`rooftop train detr --data FOLDER` and `python examples/train_detr.py` train on them.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from rooftop.train.tasks.generated.shapes import draw, write


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--count", type=int, default=16)
    parser.add_argument("--side", type=int, default=128, help="side of each picture in pixels")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    path = write(draw(options.count, options.side, options.seed), options.folder)
    print(f"{options.count} pictures in {options.folder}, their boxes in {path}")


if __name__ == "__main__":
    main()
