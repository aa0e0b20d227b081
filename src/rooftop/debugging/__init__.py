"""Find faults in a program on a GPU: streams that do not wait for each other, and tensors that fill the memory."""

from rooftop.debugging.out_of_memory import (
    MemoryExplanation,
    MemoryRecording,
    explain_memory,
    explained_memory,
    memory_error_as,
    memory_error_in_words,
)
from rooftop.debugging.stream_races import StreamCheck, StreamRace, StreamRaceError, check_streams

__all__ = [
    "MemoryExplanation",
    "MemoryRecording",
    "StreamCheck",
    "StreamRace",
    "StreamRaceError",
    "check_streams",
    "explain_memory",
    "explained_memory",
    "memory_error_as",
    "memory_error_in_words",
]
