"""Attention by the fastest back end, over pages of keys and values, and in windows; rotary embeddings."""
