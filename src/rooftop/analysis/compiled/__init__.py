"""Compiled programs: their graphs, and the operators that the compiler fused into each kernel."""
