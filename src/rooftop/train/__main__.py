"""`python -m rooftop.train` runs `rooftop train`, so that `torchrun -m rooftop.train` can start a training."""

import sys

from rooftop.cli.main import main

sys.exit(main(["train", *sys.argv[1:]]))
