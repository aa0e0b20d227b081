"""Cross entropy of logits, and of a linear layer without its logits."""
