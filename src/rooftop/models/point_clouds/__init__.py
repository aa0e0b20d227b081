"""Networks of point clouds, by sparse convolutions."""
