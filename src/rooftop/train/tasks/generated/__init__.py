"""Small generated data, for training a detector, a video network and a point cloud network."""
