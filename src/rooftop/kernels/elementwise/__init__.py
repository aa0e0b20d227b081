"""Elementwise expressions, each compiled into one kernel."""
