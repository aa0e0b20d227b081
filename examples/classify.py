"""Index photographs: list each class with the photographs that an image model assigns to it.

    python examples/classify.py FOLDER... [--model resnet50] [--weights NAME|FILE.pth] [--at-least 0.3]

Published weights are downloaded once (docs/weights.md); a file of your own needs no network.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from pathlib import Path

from rooftop.errors import RooftopError
from rooftop.models import classify, load_classifier


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("photographs", nargs="+", type=Path)
    parser.add_argument("--model", default="resnet50")
    parser.add_argument("--weights", default="DEFAULT")
    parser.add_argument("--at-least", type=float, default=0.3, help="list classes with at least this probability")
    options = parser.parse_args()
    try:
        model, preprocessing = load_classifier(options.model, options.weights)
        photographs = classify(model, options.photographs, preprocessing=preprocessing)
    except RooftopError as error:
        raise SystemExit(f"error: {error}") from error

    index: dict[str, list[Path]] = defaultdict(list)
    for photo in photographs:
        sure = [guess for guess in photo.guesses if guess.probability >= options.at_least]
        for guess in sure:
            index[guess.name or f"class {guess.index}"].append(photo.path)
        if not sure:
            index["(not sure)"].append(photo.path)
    for name, paths in sorted(index.items()):
        print(f"{name}: {', '.join(map(str, paths))}")


if __name__ == "__main__":
    main()
