"""Names that options take, beside help that needs nothing loaded. A test holds them to what they are the names of."""

from __future__ import annotations

FLOATS = ("bf16", "fp16", "fp32", "fp64", "bfloat16", "float16", "float32", "float64")
"""Of --dtype."""
CLASSIFIERS = (
    *("resnet18", "resnet34", "resnet50", "resnet101", "resnet152"),
    *("resnext50_32x4d", "resnext101_32x8d", "resnext101_64x4d", "wide_resnet50_2", "wide_resnet101_2"),
    *("swin_t", "swin_s", "swin_b", "swin_v2_t", "swin_v2_s", "swin_v2_b"),
)
DETECTORS = ("detr_resnet50", "detr_resnet101")
GPTS = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl", "llama-1b", "llama-7b", "llama-70b", "codegeex-13b")
"""Presets of a language model."""
OPERATIONS = ("add", "matmul", "linear", "layer_norm")
"""Of `rooftop crossover`."""
LADDERS = {
    "vector": ("z = x + y", "elements"),
    "indexing": ("matrices added with 1-D, 2-D and 3-D grids", "rows and columns"),
    "reduction": ("the sum of a vector", "elements"),
    "matmul": ("the product of two square matrices", "rows and columns"),
    "layer": ("y = sigmoid(x W^T + b), CPU against GPU", "rows and features"),
}
"""What each ladder of kernels climbs, and what --size counts."""
OTHER_LADDERS = {
    "python": ("one function, from plain Python to the roof", "points"),
    "memory": ("rate and latency of each level of the memory, and Little's law", ""),
}
"""Those that are measured on a CPU, too. The last has no size."""
SURFACES = (
    *("depth", "normal", "instance", "cluster", "triangle", "level", "uv", "velocity", "material", "coverage"),
    *("material_depth", "color", "base_color", "vertex_color", "overdraw", "shadow"),
)
"""Of --show."""
ITEM_KINDS = ("image", "clip", "cloud", "text", "row", "path")
"""Of --as."""
TOKENS = ("uint8", "uint16", "uint32", "int32", "int64")
WEIGHT = r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?$|[-+]?(nan|inf|infinity)$"
"""Of a path, in a mixture of several."""
BYTE_TOKENS = 256
"""Tokens that text has."""
DECAYS = ("constant", "linear", "cosine")
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zbv")
"""Of a pipeline."""
TRANSPORTS = ("p2p", "all_gather", "a2a", "a2a+p2p")
GRANULARITIES = ("full", "selective")
"""Of recomputation."""
TRAINED_DTYPES = ("float64", "float32", "bfloat16")
