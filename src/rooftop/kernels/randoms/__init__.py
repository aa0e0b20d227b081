"""Counter-based random numbers, and dropout by them."""
