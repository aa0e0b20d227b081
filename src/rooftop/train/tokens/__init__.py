"""Read token files of many formats, mix them, and cut them into batches."""
