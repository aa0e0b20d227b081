"""Weights in files: fetched, read, put under a model's keys, and what of them went where."""

from rooftop.models.weights.files import load_weights, read_weights
from rooftop.models.weights.load_reports import LoadReport

__all__ = ["LoadReport", "load_weights", "read_weights"]
