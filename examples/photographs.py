"""Write real photographs (those that come with scikit-image) as PNG files, as input for analyses.

    python examples/photographs.py FOLDER [--count 8]

Nothing is downloaded. If more photographs are requested than exist, further ones are other crops of the same
photographs.
"""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path

from PIL import Image

NAMES = ("astronaut.png", "chelsea.png", "coffee.png", "motorcycle_left.png", "hubble_deep_field.jpg", "rocket.jpg")
SIDE = 256


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--count", type=int, default=8)
    options = parser.parse_args()
    try:
        import skimage
    except ModuleNotFoundError:
        raise SystemExit("the photographs come with scikit-image: pip install scikit-image") from None
    shipped = [Path(skimage.__file__).parent / "data" / name for name in NAMES]
    photographs = [path for path in shipped if path.exists()]
    if not photographs:
        raise SystemExit(f"this scikit-image ships none of {', '.join(NAMES)}")
    options.folder.mkdir(parents=True, exist_ok=True)
    for number, path in zip(range(options.count), itertools.cycle(photographs), strict=False):
        image = Image.open(path).convert("RGB")
        shift = number // len(photographs)  # the n-th round crops at the n-th corner
        left = (image.width - SIDE) * (shift % 2)
        top = (image.height - SIDE) * (shift // 2 % 2)
        image.crop((left, top, left + SIDE, top + SIDE)).save(options.folder / f"{number:02}-{path.stem}.png")
    print(f"{options.count} photographs in {options.folder}")


if __name__ == "__main__":
    main()
