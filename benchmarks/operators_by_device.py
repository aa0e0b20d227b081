"""Find functions of PyTorch's test suite that run other operators on a GPU than `rooftop.predict` counts.

    python benchmarks/operators_by_device.py [--out FILE.json]

Every sample of `torch.testing` (about 600 functions, 100 modules) runs twice: on fake CPU tensors as in a prediction
(`rooftop.analysis.as_on_gpu`), and on the GPU. Both runs must call the same operators, except those that neither move
nor compute anything. Without a GPU, the second run uses fake GPU tensors and only runs forward. In that case, functions
that need cuDNN or choose a kernel at run time differ, and are listed. The script needs `expecttest`, which
`torch.testing` imports.
"""

from __future__ import annotations

import argparse
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.modules.lazy import LazyModuleMixin
from torch.utils._pytree import tree_map_only

from rooftop.analysis.as_on_gpu import as_on_gpu
from rooftop.cost import CountingMode, counted_for
from rooftop.cost.accounting import tensors_in
from rooftop.whole_files import write_json

ON_GPU = torch.cuda.is_available()
SAMPLES = 30  # maximum number of samples for each function and dtype
SAME_COST = {
    "cudnn_batch_norm": "native_batch_norm",
    "cudnn_batch_norm_backward": "native_batch_norm_backward",
    "cudnn_grid_sampler": "grid_sampler_2d",
    "cudnn_grid_sampler_backward": "grid_sampler_2d_backward",
}
TRANSFERS = {"_to_copy", "lift_fresh"}  # they move constants that the program creates on the host


def names_of(records: list[Any]) -> Counter[str]:
    working = [r for r in records if r.cost is None or r.cost.bytes or r.cost.total_flops]
    names = [r.name.removeprefix("aten::") for r in working]
    return Counter(SAME_COST.get(name, name) for name in names if name not in TRANSFERS)


def counted(run: Callable[[], Any], as_gpu: bool) -> Counter[str] | str:
    """Count the operators that a call runs, or return the error if it fails. On a machine with a GPU, backward runs,
    too."""
    try:
        chosen = as_on_gpu() if as_gpu else nullcontext()
        with counted_for("cuda"), CountingMode() as mode, chosen, torch.set_grad_enabled(ON_GPU):
            roots = [t for t in tensors_in(run()) if t.requires_grad]
            if roots:
                torch.autograd.backward(roots, [torch.ones_like(t) for t in roots])
    except Exception as error:
        return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:120]}"
    return names_of(mode.records)


class NoStandIn(Exception):
    """Raised for arguments that no fake tensor can represent. The script skips such calls and counts them."""


def faked(mode: FakeTensorMode, device: str) -> Callable[[Tensor], Tensor]:
    def fake(tensor: Tensor) -> Tensor:
        if tensor.layout != torch.strided or tensor.is_nested or tensor.is_quantized:
            raise NoStandIn(f"no fake tensor can represent a {tensor.layout} tensor on another device")
        meta = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        return FakeTensor(mode, meta, torch.device(device)).requires_grad_(tensor.requires_grad and ON_GPU)

    return fake


def on_gpu(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cuda").requires_grad_(tensor.requires_grad)


def difference(call: Callable[[Any], Any], values: Any) -> tuple[Any, Any] | None:
    """The operators that differ, (as predicted, on the GPU); None if none differ or the call cannot run."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    predicted_values = tree_map_only(Tensor, faked(mode, "cpu"), values)
    with mode:
        predicted = counted(lambda: call(predicted_values), as_gpu=True)
    if ON_GPU:
        gpu_values = tree_map_only(Tensor, on_gpu, values)
        actual = counted(lambda: call(gpu_values), as_gpu=False)
    else:
        gpu_values = tree_map_only(Tensor, faked(mode, "cuda:0"), values)
        with mode:
            actual = counted(lambda: call(gpu_values), as_gpu=False)
    if predicted == actual or (isinstance(predicted, str) and isinstance(actual, str)):
        return None
    return predicted, actual


def functions(dtype: torch.dtype) -> Iterator[tuple[str, Callable[[Any], Any], Any]]:
    from torch.testing._internal.common_methods_invocations import op_db

    for info in op_db:
        if dtype not in info.dtypes:
            continue
        try:
            samples = list(info.sample_inputs("cpu", dtype, requires_grad=ON_GPU and info.supports_autograd))[:SAMPLES]
        except Exception:
            continue
        for sample in samples:
            values = (sample.input, sample.args, {k: v for k, v in sample.kwargs.items() if k != "device"})
            yield info.name, lambda given, info=info: info.op(given[0], *given[1], **given[2]), values


def modules(dtype: torch.dtype) -> Iterator[tuple[str, Callable[[Any], Any], Any]]:
    from torch.testing._internal.common_modules import module_db

    for info in module_db:
        if issubclass(info.module_cls, LazyModuleMixin):  # a lazy module becomes an ordinary one in its first call
            continue
        for training in (False, True):
            try:
                inputs = info.module_inputs_func(info, "cpu", dtype, ON_GPU, training)
                for sample in inputs[:SAMPLES]:
                    built = sample.constructor_input
                    module = info.module_cls(*built.args, **built.kwargs).to(dtype).train(training)
                    given = sample.forward_input
                    state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
                    yield info.name, _called(module), (given.args, given.kwargs, state)
            except Exception as error:
                print(f"left out: {info.name} ({type(error).__name__})")


def _called(module: nn.Module) -> Callable[[Any], Any]:
    def call(values: Any) -> Any:
        args, kwargs, state = values
        return torch.func.functional_call(module, state, args, kwargs)

    return call


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    found: dict[str, dict[str, Any]] = {}
    calls = left_out = 0
    for dtype in (torch.float32, torch.bfloat16):
        for source in (functions, modules):
            for name, call, values in source(dtype):
                calls += 1
                try:
                    differing = difference(call, values)
                except NoStandIn:
                    left_out += 1
                    continue
                key = f"{name} {str(dtype).removeprefix('torch.')}"
                if differing is not None and key not in found:
                    predicted, actual = (dict(d) if isinstance(d, Counter) else d for d in differing)
                    found[key] = {"predicted": predicted, "gpu": actual}
                    print(f"{key}\n    predicted {predicted}\n    on a GPU  {actual}", flush=True)
    print(
        f"{calls} calls, {left_out} left out because no fake tensor represents their arguments, {len(found)} "
        f"functions and modules differ"
    )
    if options.out is not None:
        where = torch.cuda.get_device_name() if ON_GPU else "fake tensors of a GPU, forward only"
        result = {"torch": torch.__version__, "device": where, "calls": calls, "differ": found}
        write_json(options.out, result)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
