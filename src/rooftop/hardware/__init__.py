"""What this machine is (`devices`), what it can do (`measure_ceilings`), and how time is measured (`timing`)."""

from rooftop.hardware.ceilings import Ceilings, MemoryLevel, MemoryPoint
from rooftop.hardware.device import Cpu, Device, Gpu, devices
from rooftop.hardware.measuring import measure_ceilings
from rooftop.hardware.timing import Timing, compare, measure
from rooftop.hardware.topology import NvLink, Peer

__all__ = [
    "Ceilings",
    "Cpu",
    "Device",
    "Gpu",
    "MemoryLevel",
    "MemoryPoint",
    "NvLink",
    "Peer",
    "Timing",
    "compare",
    "devices",
    "measure",
    "measure_ceilings",
]
