"""Networks for photographs and videos: ResNets and Swin transformers, and classification with them."""
