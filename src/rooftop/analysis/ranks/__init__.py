"""Measure several processes that run one step together, and show them in one report."""
