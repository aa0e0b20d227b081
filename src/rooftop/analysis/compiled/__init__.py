"""Compiled programs: their graphs, and the operator of each kernel that the compiler made."""
