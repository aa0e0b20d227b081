"""The loop that trains a task by a recipe, in one process or data parallel, and the files that it writes."""

from rooftop.train.fitting.exports import exported_metadata
from rooftop.train.fitting.loop import fit
from rooftop.train.fitting.metric_lines import read_metrics
from rooftop.train.fitting.records import EvaluationRecord, Facts, Fitted, Observer, StepRecord

__all__ = ["EvaluationRecord", "Facts", "Fitted", "Observer", "StepRecord", "exported_metadata", "fit", "read_metrics"]
