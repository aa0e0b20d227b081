"""AdamW in few launches, and the float32 weights that it steps."""
