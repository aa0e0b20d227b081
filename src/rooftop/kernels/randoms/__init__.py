"""Counter-based random numbers, and dropout with them."""
