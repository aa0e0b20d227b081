"""Random numbers by counter, and dropout made of them."""
