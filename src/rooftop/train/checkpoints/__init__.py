"""Trainings on disk: planned, staged, written in the background, read in any layout, converted."""
