"""Networks for photographs and videos: ResNets, Swin Transformers and hybrids, and classification with these."""
