"""Read token files of every kind, mix them, and cut them into batches."""
