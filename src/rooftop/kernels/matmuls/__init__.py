"""Matrix products, and linear layers with their activation."""
