"""What works on this machine, and the command that mends what does not.

No file here needs torch: `rooftop doctor` runs where torch is broken.
"""

from rooftop.doctor.diagnosis import diagnose
from rooftop.doctor.findings import Finding

__all__ = ["Finding", "diagnose"]
