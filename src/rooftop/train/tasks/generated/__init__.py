"""Small generated data sets to train a detector, a video network and a point cloud network."""
