"""Several processes that run one step together: measure them together, and show them in one report."""
