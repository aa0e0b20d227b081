"""Describe this machine and measure its limits. The package also has tools for memory, streams and GPUs.

    devices, measure_ceilings, ceilings_of    a machine's description and limits: measured here, or read from a file
    measure, compare                          time one callable, or several, interleaved
    memory_summary, track, release            memory in use, memory that a block of code needs, release of unused memory
    explained_memory, explain_memory          which tensors fill a GPU, and how to reduce the memory
    side_stream, on_stream, join              work on a second stream; check_streams finds missing waits
    select_devices, on_each, Ensemble         choose GPUs, and use several at a time
    occupancy                                 how many warps of a kernel fit on a multiprocessor, and what limits them
    measure_crossover                         the size above which the GPU beats the CPU
    diagnose                                  check which features work on this machine

Names are loaded on first use, so this package can be imported even if torch is broken. Some of the names above are
defined in `rooftop.doctor`, which can be imported without this package, and in `rooftop.debugging`, which imports this
package.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rooftop.first_use import on_first_use

if TYPE_CHECKING:
    from rooftop.debugging.out_of_memory import MemoryExplanation, MemoryRecording, explain_memory, explained_memory
    from rooftop.debugging.stream_races import StreamCheck, StreamRace, StreamRaceError, check_streams
    from rooftop.doctor.diagnosis import diagnose
    from rooftop.doctor.findings import Finding
    from rooftop.hardware.ceilings import Ceilings, MemoryLevel, MemoryPoint, ceilings_of, known_machines
    from rooftop.hardware.crossovers import BreakEven, Crossover, CrossoverPoint, measure_crossover
    from rooftop.hardware.device import Cpu, Device, Gpu, devices
    from rooftop.hardware.measuring import measure_ceilings
    from rooftop.hardware.memory import DeviceMemory, Released, TrackedMemory, memory_summary, release, track
    from rooftop.hardware.occupancies import Change, Occupancy, occupancy
    from rooftop.hardware.select import DeviceSelectionError, Ensemble, on_each, select_devices
    from rooftop.hardware.streams import join, on_stream, side_stream
    from rooftop.hardware.timing import Timing, compare, measure
    from rooftop.hardware.topology import NvLink, Peer

__all__ = [
    "BreakEven",
    "Ceilings",
    "Change",
    "Cpu",
    "Crossover",
    "CrossoverPoint",
    "Device",
    "DeviceMemory",
    "DeviceSelectionError",
    "Ensemble",
    "Finding",
    "Gpu",
    "MemoryExplanation",
    "MemoryLevel",
    "MemoryPoint",
    "MemoryRecording",
    "NvLink",
    "Occupancy",
    "Peer",
    "Released",
    "StreamCheck",
    "StreamRace",
    "StreamRaceError",
    "Timing",
    "TrackedMemory",
    "ceilings_of",
    "check_streams",
    "compare",
    "devices",
    "diagnose",
    "explain_memory",
    "explained_memory",
    "join",
    "known_machines",
    "measure",
    "measure_ceilings",
    "measure_crossover",
    "memory_summary",
    "occupancy",
    "on_each",
    "on_stream",
    "release",
    "select_devices",
    "side_stream",
    "track",
]

__getattr__, __dir__ = on_first_use(
    __name__,
    {
        ".ceilings": "Ceilings MemoryLevel MemoryPoint ceilings_of known_machines",
        ".crossovers": "BreakEven Crossover CrossoverPoint measure_crossover",
        ".device": "Cpu Device Gpu devices",
        "rooftop.doctor.diagnosis": "diagnose",
        "rooftop.doctor.findings": "Finding",
        ".measuring": "measure_ceilings",
        ".memory": "DeviceMemory Released TrackedMemory memory_summary release track",
        ".occupancies": "Change Occupancy occupancy",
        "rooftop.debugging.out_of_memory": "MemoryExplanation MemoryRecording explain_memory explained_memory",
        ".select": "DeviceSelectionError Ensemble on_each select_devices",
        "rooftop.debugging.stream_races": "StreamCheck StreamRace StreamRaceError check_streams",
        ".streams": "join on_stream side_stream",
        ".timing": "Timing compare measure",
        ".topology": "NvLink Peer",
    },
)
