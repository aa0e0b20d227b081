"""Cross entropy of logits, and cross entropy of a linear layer whose logits are never stored."""
