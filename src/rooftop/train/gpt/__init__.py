"""Train a GPT with the same results in every layout of ranks: description, trainer and loop."""
