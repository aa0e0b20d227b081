"""Arrays with the semantics of cv::Mat, on the CPU and on GPUs.

    from rooftop.mat import CV_32F, Mat

    image = Mat(cv2.imread("walk.png"))                    # no copy: the array and the Mat share their memory
    face = image[40:168, 200:328]                          # a region, no copy
    face.convertTo(CV_32F, 1 / 255).cuda().tensor("chw")   # (3, 128, 128) float32 on the GPU

Names are OpenCV's, if OpenCV has them. Nothing here needs OpenCV.
"""

from rooftop.mat import type_codes
from rooftop.mat.allocation import (
    MatAllocator,
    MatData,
    MatDataFlag,
    getDefaultAllocator,
    getStdAllocator,
    setDefaultAllocator,
    using_allocator,
)
from rooftop.mat.channels import extractChannel, insertChannel, merge, mixChannels, split
from rooftop.mat.expressions import MatExpr, absdiff, absolute, maximum, minimum
from rooftop.mat.linear import determinant, solve
from rooftop.mat.matrix import Mat, evaluate
from rooftop.mat.scalars import Scalar
from rooftop.mat.type_codes import *  # noqa: F403
from rooftop.mat.views import MatSize

# OpenCV's names: mat.min(a, b). `import *` does not import these, because Python has the same names.
min, max, abs, eval = minimum, maximum, absolute, evaluate

__all__ = [
    "Mat",
    "MatAllocator",
    "MatData",
    "MatDataFlag",
    "MatExpr",
    "MatSize",
    "Scalar",
    "absdiff",
    "absolute",
    "determinant",
    "evaluate",
    "extractChannel",
    "getDefaultAllocator",
    "getStdAllocator",
    "insertChannel",
    "maximum",
    "merge",
    "minimum",
    "mixChannels",
    "setDefaultAllocator",
    "solve",
    "split",
    "using_allocator",
]
__all__ += type_codes.__all__
