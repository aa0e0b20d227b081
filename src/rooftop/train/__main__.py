"""`python -m rooftop.train` is the verb `rooftop train`, as `torchrun -m` can start it."""

import sys

from rooftop.cli.main import main

sys.exit(main(["train", *sys.argv[1:]]))
