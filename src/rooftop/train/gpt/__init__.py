"""Train a GPT with the same numbers in every layout of ranks: description, trainer and loop."""
