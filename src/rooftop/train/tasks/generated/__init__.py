"""Small data that are made up: a detector, a video network and a point cloud network can learn from them."""
