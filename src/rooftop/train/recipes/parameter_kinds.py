"""Sort parameters into three kinds, each with its own weight decay: weights, parameters of norms, and biases.

Networks train better if only weights decay (He et al. 2019, "Bag of Tricks for Image Classification with Convolutional
Neural Networks", section 3.1, arXiv:1812.01187). Outside norms, every parameter of one dimension counts as a bias. As
in the recipes of Swin and DeiT, position tables, class tokens and learned scales also count as biases.
"""

from __future__ import annotations

import re

from torch import nn

NORMS = (
    nn.modules.batchnorm._NormBase,
    nn.LayerNorm,
    nn.GroupNorm,
    nn.RMSNorm,
    nn.LocalResponseNorm,
    nn.CrossMapLRN2d,
)
NORM_NAME = re.compile(r"Norm(\d[dD])?$")
"""Class names of norms in other libraries, e.g. LlamaRMSNorm, FrozenBatchNorm2d."""

BIAS_NAME = re.compile(
    r"(^|_)bias(_|$)"  # in_proj_bias, bias_hh_l0, relative_position_bias_table
    r"|^(cls|class|dist|mask|reg)_tokens?$"
    r"|^(abs_|absolute_)?pos(ition)?_embed(ding)?s?$"
    r"|^(logit|layer)_scale$"
)


def is_norm(module: nn.Module) -> bool:
    """Whether a module is a norm layer of PyTorch or of another library."""
    return isinstance(module, NORMS) or NORM_NAME.search(type(module).__name__) is not None


def kinds_of(model: nn.Module) -> dict[str, str]:
    """Map each parameter's name to "weight", "norm" or "bias"; a shared parameter has the kind of its first name."""
    kinds = {}
    modules = dict(model.named_modules())
    for name, parameter in model.named_parameters():
        path, _, own = name.rpartition(".")
        if is_norm(modules[path]):
            kinds[name] = "norm"
        else:
            kinds[name] = "bias" if parameter.dim() < 2 or BIAS_NAME.search(own) else "weight"
    return kinds
