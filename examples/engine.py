"""Images per second of a model, and of the same model prepared for inference.

    python examples/engine.py [--model resnet50] [--batch 8] [--size 224] [--seconds 1]

On a GPU the engine runs in bfloat16, channels last, from CUDA graphs; on a CPU the engine only folds norms.
"""

from __future__ import annotations

import argparse

import torch

from rooftop.hardware import compare
from rooftop.inference import Engine
from rooftop.models import model_entry


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="resnet50")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--seconds", type=float, default=1.0)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = model_entry(options.model).build().eval().to(device)
    engine = Engine(model)
    x = torch.randn(options.batch, 3, options.size, options.size, device=device)
    apart = (engine(x) - model(x)).abs().max() / model(x).abs().max()
    print(f"{engine.report}\nresults differ by {apart:.1e} of the largest")
    calls = {"model": lambda: model(x), "engine": lambda: engine(x)}
    for name, timing in compare(calls, device=device, seconds=options.seconds).items():
        print(f"{name:8}{1e3 * options.batch / timing.median_ms:10,.1f} images/s")


if __name__ == "__main__":
    main()
