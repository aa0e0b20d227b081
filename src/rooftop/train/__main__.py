"""`python -m rooftop.train` is the verb `rooftop train`, in a form that `torchrun -m` can start."""

import sys

from rooftop.cli.main import main

sys.exit(main(["train", *sys.argv[1:]]))
