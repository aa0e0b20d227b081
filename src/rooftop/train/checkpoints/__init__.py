"""Checkpoints of GPT trainings: plan, stage and write them in the background, read them in any layout, convert them."""
