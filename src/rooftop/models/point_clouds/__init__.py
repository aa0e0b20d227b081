"""Networks for point clouds, with sparse convolutions."""
