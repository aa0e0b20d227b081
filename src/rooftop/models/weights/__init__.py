"""Weights files: download and read them, convert them to a model's keys, and report which keys were loaded."""

from rooftop.models.weights.files import load_weights, read_weights
from rooftop.models.weights.load_reports import LoadReport

__all__ = ["LoadReport", "load_weights", "read_weights"]
