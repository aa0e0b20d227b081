"""Attention by the fastest back end, attention over pages of keys and values, attention in windows, and rotary
embeddings.
"""
