"""AdamW in few launches, and the wide weights that it steps."""
