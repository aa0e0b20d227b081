"""Elementwise expressions: a program becomes one kernel."""
