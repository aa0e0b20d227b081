"""Compare the measured time of a program's step with its roofs: lower bounds of the time of each operator, each module
and the whole step.
"""

from rooftop.analysis.analyzing import analyze
from rooftop.analysis.predicting import fake_tensors, predict
from rooftop.analysis.recordings import Recording, recording
from rooftop.analysis.report import Report
from rooftop.analysis.report_contents import Advice, Gaps, ModuleNode, OperatorRow, Summary

__all__ = [
    "Advice",
    "Gaps",
    "ModuleNode",
    "OperatorRow",
    "Recording",
    "Report",
    "Summary",
    "analyze",
    "fake_tensors",
    "predict",
    "recording",
]
