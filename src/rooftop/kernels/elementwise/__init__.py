"""Compile elementwise expressions, each into one kernel."""
