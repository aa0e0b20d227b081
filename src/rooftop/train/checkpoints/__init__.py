"""Trainings on disk: plan and stage a checkpoint, write it in the background, read it in any layout, convert it."""
