"""The `rooftop` command: one file per verb. Each file is a thin layer over the library."""
