"""Token files of every kind, mixed and cut into batches."""
