"""Networks of photographs and videos: ResNets and Swin transformers, and what they say is on them."""
