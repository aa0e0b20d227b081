"""Cross entropy of logits, and of a linear layer without storing its logits."""
