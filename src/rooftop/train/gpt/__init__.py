"""Training of a GPT with the same numbers in every layout of ranks: the description, the trainer, the loop."""
