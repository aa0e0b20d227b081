"""Several processes that run one step: measured together, shown in one report."""
