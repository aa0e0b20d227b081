"""Compiled programs: their graphs, and the operators behind each kernel that the compiler made."""
