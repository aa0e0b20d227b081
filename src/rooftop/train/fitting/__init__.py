"""Train a task by a recipe, in one process or data parallel, and write checkpoints, metrics and weights."""

from rooftop.train.fitting.exports import exported_metadata
from rooftop.train.fitting.loop import fit
from rooftop.train.fitting.metric_lines import read_metrics
from rooftop.train.fitting.records import EvaluationRecord, Facts, Fitted, Observer, StepRecord

__all__ = ["EvaluationRecord", "Facts", "Fitted", "Observer", "StepRecord", "exported_metadata", "fit", "read_metrics"]
