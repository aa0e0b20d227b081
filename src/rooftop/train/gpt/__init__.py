"""A GPT trained by the same numbers in every layout of ranks: what is trained, the trainer, the loop."""
