"""Allowed values of options, listed here so that help loads no other module. A test compares the values with their
sources.
"""

from __future__ import annotations

FLOATS = ("bf16", "fp16", "fp32", "fp64", "bfloat16", "float16", "float32", "float64")
"""Values of --dtype."""
CLASSIFIERS = (
    *("resnet18", "resnet34", "resnet50", "resnet101", "resnet152"),
    *("resnext50_32x4d", "resnext101_32x8d", "resnext101_64x4d", "wide_resnet50_2", "wide_resnet101_2"),
    *("swin_t", "swin_s", "swin_b", "swin_v2_t", "swin_v2_s", "swin_v2_b"),
    *("hybrid_t", "hybrid_s"),
)
DETECTORS = ("detr_resnet50", "detr_resnet101", "detr_small")
GPTS = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl", "llama-1b", "llama-7b", "llama-70b", "codegeex-13b")
"""Presets of language models."""
OPERATIONS = ("add", "matmul", "linear", "layer_norm")
"""Operations of `rooftop crossover`."""
LADDERS = {
    "vector": ("z = x + y", "elements"),
    "indexing": ("matrices added with 1-D, 2-D and 3-D grids", "rows and columns"),
    "reduction": ("the sum of a vector", "elements"),
    "matmul": ("the product of two square matrices", "rows and columns"),
    "layer": ("y = sigmoid(x W^T + b), CPU against GPU", "rows and features"),
}
"""For each ladder of kernels: (its work, the unit of --size)."""
OTHER_LADDERS = {
    "python": ("one function, from plain Python to the roof", "points"),
    "memory": ("rate and latency of each level of the memory, and Little's law", ""),
}
"""Ladders that can also be measured on a CPU. The ladder `memory` has no size."""
SURFACES = (
    *("depth", "normal", "instance", "cluster", "triangle", "level", "uv", "velocity", "material", "coverage"),
    *("material_depth", "color", "base_color", "vertex_color", "overdraw", "shadow"),
)
"""Values of --show."""
ITEM_KINDS = ("image", "clip", "cloud", "text", "row", "path")
"""Values of --as."""
TOKENS = ("uint8", "uint16", "uint32", "int32", "int64")
WEIGHT = r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?$|[-+]?(nan|inf|infinity)$"
"""Matches a word that is the weight of a path in a mixture."""
BYTE_TOKENS = 256
"""Vocabulary size of text."""
DECAYS = ("constant", "linear", "cosine")
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zbv")
"""Pipeline schedules."""
TRANSPORTS = ("p2p", "all_gather", "a2a", "a2a+p2p")
GRANULARITIES = ("full", "selective")
"""Values of --recompute-granularity."""
TRAINED_DTYPES = ("float64", "float32", "bfloat16")

TASKS = {
    "resnet": "Train a ResNet to classify images.",
    "swin": "Train a Swin transformer to classify images.",
    "hybrid": "Train a hybrid of convolutions (fine maps) and attention (coarse maps) to classify images.",
    "detr": "Train a DETR to detect objects.",
    "conv_lstm": "Train a ConvLSTM to predict the next frames of a video.",
    "sparse_unet": "Train a sparse U-Net to label the points of scans.",
}
"""Built-in tasks of `rooftop train`, each with its line in the help."""
RECIPES = ("resnet50-v2", "swin-t")
"""Published recipes."""
SWITCHES = {
    "run": "epochs steps batch accumulate seed precision channels_last compile replay sync_norms sum_in_backward "
    "deterministic",
    "model": "name weights num_classes frozen dropout stochastic_depth options",
    "optimizer": "name lr momentum nesterov betas eps weight_decay norm_weight_decay bias_weight_decay layer_decay "
    "clip",
    "schedule": "name warmup decay least",
    "mix": "label_smoothing mixup cutmix",
    "augment": "crop flip shift jitter hue rand_augment magnitude rand_augment_on erase repeats decode gpu_share "
    "detail size test_size",
    "ema": "decay every",
    "evaluation": "every patience batch",
    "faults": "not_finite most_skipped damaged",
    "loading": "how workers ahead",
}
"""For each section of a recipe: its switches."""
