"""Attention by the fastest back end, paged attention, window attention and rotary embeddings."""
