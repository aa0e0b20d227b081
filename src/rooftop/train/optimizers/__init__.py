"""AdamW in few kernel launches, and the float32 weights that it updates."""
