"""ResNets, Swin Transformers and hybrids of both, and the classification of photographs and video frames with them."""
