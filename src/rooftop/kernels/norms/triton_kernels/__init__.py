"""The Triton kernels of norms: `norms.py` for rows that fit a program's registers, `long_norms.py` for longer rows."""
