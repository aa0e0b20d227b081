"""Check which parts of the installation (driver, torch, compilers) work, and find commands that fix the other parts.

No file here needs torch, so `rooftop doctor` runs even if torch is broken.
"""

from rooftop.doctor.diagnosis import diagnose
from rooftop.doctor.findings import Finding

__all__ = ["Finding", "diagnose"]
