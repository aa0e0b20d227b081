"""`python -m rooftop` is the `rooftop` command."""

from rooftop.cli.main import run

run()
