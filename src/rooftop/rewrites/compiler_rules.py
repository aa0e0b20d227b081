"""Rules for `torch.compile`: compile the whole model, or its repeated blocks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from types import FunctionType
from typing import Any

import torch
import torch.compiler.config as compiler_config
from torch import Tensor, nn

from rooftop.rewrites.candidates import Call, Candidate, Compiled, Rule, Times, counted_kinds, only_on_gpu
from rooftop.rewrites.format_rules import gain_channels_last
from rooftop.rewrites.structures import CONSTANTS, mapped

LEAST_BLOCKS = 3
"""Blocks of a class count as repeated if one container has at least this many. Equal blocks are compiled only once."""
BLOCKS_SHARE = 0.95
"""Gain of compiling a model's blocks, as a fraction of the gain of compiling the whole model."""
CPU_CALL_MS = 0.004
"""Time in ms of calling a small operator on a CPU. Fusion saves this time for each call that it removes."""
START_MS, LAUNCHES_A_KERNEL = 0.1, 4.0
"""Host time in ms to check a compiled call on a GPU. Host time for each kernel of compiled code, as a multiple of the
host time to launch a small operator in eager PyTorch. Measured with four models on an H200
(`benchmarks/results/h200/compiled.json`): 26 to 36 us for each kernel of compiled code, 7 us for a launch."""
PLAIN = (type(None), bool, int, float, str)
PLACES = ("layer_idx", "layer_id")
"""Attributes with the index of a block in its model, which the block's forward usually does not read."""
MOST_VERSIONS = 64
"""Largest number of compiled versions of a block, for different shapes and settings. PyTorch's default is 8."""
START_S, SECONDS_A_CALL = 5.0, {"cpu": 0.12, "cuda": 0.04}
"""Compile time: a constant, and a time for each call of an operator. The time for CPUs was measured on two cores of a
server, with 60 to 600 calls. The time for GPUs was measured on the hosts of an H100 and an H200, where models took 11
to 44 s.
"""
SECONDS_A_CALL_OF_BLOCKS = {"cpu": 0.12, "cuda": 0.08}
"""Compile time for each call of an operator in repeated blocks. One kind of block has few kernels, so fewer processes
compile at a time than for a whole model. On eight cores of an H200's host, two to twelve kinds of blocks took 11 to
more than 40 s.
"""


class Compile(Rule):
    """Compile the whole model with `torch.compile`, for the shapes of its calls."""

    trains = True
    kind = "compile"

    def __init__(self, mode: str = "default") -> None:
        self.mode = mode
        self.name = "compile" if mode == "default" else f"compile-{mode}"

    def refusal(self, candidate: Candidate) -> str | None:
        return only_on_gpu(candidate) if self.mode == "reduce-overhead" else None

    def predicted_ms(self, times: Times) -> float:
        return gain_compiled(times, replayed=self.mode == "reduce-overhead")

    def seconds(self, times: Times) -> float:
        return START_S + sum(call.count * SECONDS_A_CALL[call.device.type] for call in times.calls)

    def apply(self, candidate: Candidate) -> str:
        options: dict[str, Any] = {"dynamic": False, "mode": None if self.mode == "default" else self.mode}
        if candidate.runs_model:  # compiled without its wrappers, which would break the graph
            compile_in_place([candidate.model], **options)
            compiled = candidate.call
        else:
            compiled = partial(torch.compile(_with_own_code(_run), **options), candidate.call)
        if self.mode != "reduce-overhead":
            candidate.call = InOneForm(compiled, candidate.attention)
            return "the whole model"

        def call(*args: Any, **kwargs: Any) -> Any:
            torch.compiler.cudagraph_mark_step_begin()
            return torch.utils._pytree.tree_map_only(torch.Tensor, torch.clone, compiled(*args, **kwargs))

        candidate.call = InOneForm(call, candidate.attention)
        return "the whole model, its kernels in CUDA graphs"


class CompileBlocks(Rule):
    """Compile the repeated blocks of a model with `torch.compile`: one compilation serves all equal blocks."""

    name = "compile-blocks"
    trains = True
    kind = "compile"

    def predicted_ms(self, times: Times) -> float:
        return gain_compiled(times, whole=False)

    def absent(self, times: Times) -> str | None:
        return "no block occurs repeatedly" if times.blocks is not None and not times.blocks[0] else None

    def seconds(self, times: Times) -> float:
        every = sum(call.count for call in times.calls)
        if times.blocks is not None and times.blocks[0]:
            share = times.blocks[1] / times.blocks[0]  # equal blocks are compiled once
        else:
            share = len(times.calls) / max(1, every)
        return START_S + share * sum(call.count * SECONDS_A_CALL_OF_BLOCKS[call.device.type] for call in times.calls)

    def apply(self, candidate: Candidate) -> str:
        blocks = repeated_blocks(candidate.model)
        compile_in_place(blocks, dynamic=False)
        if blocks:
            candidate.call = InOneForm(candidate.call, candidate.attention)
        return counted_kinds(type(block).__name__ for block in blocks)


def compile_in_place(modules: Sequence[nn.Module], **options: Any) -> None:
    """Let `torch.compile` compile the calls of modules. Modules of the same kind (see `counted_blocks`) share compiled
    code.

    PyTorch stores compiled versions at a code object, and limits their number. If the versions were stored at the code
    object of a class's `forward`, a search could reach the limit, and PyTorch would then silently run other modules of
    the class uncompiled. So each call of this function creates a code object for each kind. After a graph break inside
    `forward`, PyTorch still stores the compiled remainder at the code object of the class's `forward`.
    """
    compiled: dict[str, Callable[..., Any]] = {}
    for module in modules:
        kind = _kind(module)
        if kind not in compiled:
            compiled[kind] = torch.compile(_with_own_code(_run_module), **options)
        module._compiled_call_impl = partial(compiled[kind], module)


def _run_module(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    return module._call_impl(*args, **kwargs)


def _run(call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    return call(*args, **kwargs)


def _with_own_code(function: Any) -> Any:
    """A copy of a function with a separate code object, because torch.compile stores and counts its compilations by
    code object.
    """
    return FunctionType(function.__code__.replace(), function.__globals__, function.__name__)


class InOneForm:
    """Call compiled code with arguments of one form, so that it is compiled only once.

    The compiler makes a version for each set of input strides, and for inference mode. So inputs that are neither
    contiguous nor channels last are made contiguous, and inference mode becomes `torch.no_grad`.

    The back end of attention is chosen when code is compiled, but PyTorch's caches of compiled code do not distinguish
    back ends. So the first call of each form adds the back end to the caches' keys. During that call, PyTorch may
    compile up to `MOST_VERSIONS` versions of a block.

    Args:
        run: the compiled function.
        attention: the back end of attention that `run` prefers, as in `Candidate`.
    """

    def __init__(self, run: Callable[..., Any], attention: str = "") -> None:
        self.run, self._attention = run, attention
        self._forms: set[tuple[Any, ...]] = set()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        form = _form_of(args, kwargs)
        if form in self._forms:
            return self._run(args, kwargs)
        config: Any = compiler_config
        tag = f"{config.cache_key_tag} attention {self._attention} {_allowed_attention()}"
        with torch._dynamo.config.patch(recompile_limit=MOST_VERSIONS), config.patch(cache_key_tag=tag):
            result = self._run(args, kwargs)
        if form is not None:
            self._forms.add(form)
        return result

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not torch.is_inference_mode_enabled():
            if all(map(_is_in_form, args)) and all(map(_is_in_form, kwargs.values())):
                return self.run(*args, **kwargs)
            args, kwargs = mapped((args, kwargs), _without_gaps)
            return self.run(*args, **kwargs)
        with torch.inference_mode(False), torch.no_grad():
            args, kwargs = mapped((args, kwargs), _without_gaps)
            return self.run(*args, **kwargs)


def _form_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
    """The properties of a call for which torch.compile may make another version: gradient modes, and shapes, dtypes and
    values of the arguments. None if an argument is neither a tensor nor a constant, because such arguments take longer
    to compare.
    """
    form: list[Any] = [torch.is_grad_enabled(), torch.is_inference_mode_enabled(), *kwargs]
    for value in (*args, *kwargs.values()):
        if type(value) is Tensor:
            form.append((value.shape, value.dtype, value.requires_grad))
        elif type(value) in CONSTANTS:
            form.append((type(value), value))
        else:
            return None
    return tuple(form)


def _allowed_attention() -> str:
    """The back ends of attention that PyTorch may choose, as a string with a 0 or 1 for each back end."""
    cuda = torch.backends.cuda
    allowed = (cuda.cudnn_sdp_enabled, cuda.flash_sdp_enabled, cuda.mem_efficient_sdp_enabled, cuda.math_sdp_enabled)
    return "".join(str(int(each())) for each in allowed)


def _is_in_form(value: Any) -> bool:
    """Whether `_without_gaps` certainly returns this argument as it is. False for structures: `mapped` calls
    `_without_gaps` for each of their tensors.
    """
    if type(value) is Tensor:
        return value.layout == torch.strided and value.is_contiguous() and not value.is_inference()
    return type(value) in CONSTANTS


def _without_gaps(tensor: Tensor) -> Tensor:
    if tensor.is_inference():
        return tensor.clone()
    if tensor.layout != torch.strided or tensor.is_contiguous():
        return tensor
    dense = tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)
    return tensor if dense else tensor.contiguous()


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """The blocks of a model: modules with submodules, if a `ModuleList` or `Sequential` has at least `LEAST_BLOCKS` of
    their class. No block is inside another.
    """
    parts = list(model.children())
    kinds: Counter[type[nn.Module]] = Counter()
    if isinstance(model, nn.ModuleList | nn.Sequential):
        kinds = Counter(type(part) for part in parts if any(True for _ in part.children()))
    found: list[nn.Module] = []
    for part in parts:
        found += [part] if kinds[type(part)] >= LEAST_BLOCKS else repeated_blocks(part)
    return found


def counted_blocks(model: nn.Module) -> tuple[int, int]:
    """Return (number of repeated blocks of a model, number of different kinds among them). torch.compile makes one
    version for each kind: blocks of a kind have the same submodules, sizes and settings.
    """
    blocks = repeated_blocks(model)
    return len(blocks), len({_kind(block) for block in blocks})


def _kind(block: nn.Module) -> str:
    parts = []
    for name, module in block.named_modules():
        settings = {
            key: value
            for key, value in vars(module).items()
            if type(key) is str and not key.startswith("_") and key not in PLACES and _is_setting(value)
        }
        shapes = [(key, tuple(p.shape)) for key, p in module._parameters.items() if p is not None]
        parts.append((name, type(module).__qualname__, sorted(settings.items()), shapes))
    return repr(parts)


def _is_setting(value: Any) -> bool:
    """Whether an attribute is a plain value, or a list or tuple of plain values."""
    if type(value) in (list, tuple):
        return all(type(each) in PLAIN for each in value)
    return type(value) in PLAIN


def gain_compiled(times: Times, replayed: bool = False, whole: bool = True) -> float:
    """The predicted gain in ms of compiling a step.

    The compiler fuses operators into fewer kernels, and lays out convolutions channels last. The compiler does not
    change matrix products, convolutions and attention. On a GPU the host launches each remaining kernel. If compiled
    code of this step was measured before, the prediction uses that measurement.

    Args:
        replayed: whether kernels are replayed from CUDA graphs, so that the host launches nothing.
        whole: whether the whole model is compiled, or only its repeated blocks.
    """
    if times.compiled is not None:
        return _gain_as_measured(times, times.compiled, replayed, whole)
    found = times.fusable
    if found is None:
        return 0.0
    share = 1.0 if whole else BLOCKS_SHARE
    saved_ms = found.now_ms - found.after_ms + times.idle_ms * (found.operators - found.kernels)
    if found.channels_last:
        saved_ms += max(0.0, gain_channels_last([call for call in times.calls if _is_channels_first(call)]))
    if times.device_ms is None or times.host_ms is None:
        return share * (saved_ms + CPU_CALL_MS * (found.operators - found.kernels))
    kernels = found.launches - found.operators + found.kernels
    launches = not replayed and times.host_ms > 0  # host_ms is 0 if the measured step replays graphs
    host_ms = START_MS + LAUNCHES_A_KERNEL * times.launch_ms * kernels if launches else 0.0
    now_ms = max(times.device_ms, times.host_ms)
    gain_ms = share * times.wall_ms * (1 - max(times.device_ms - saved_ms, host_ms) / now_ms)
    return gain_ms - times.copies_ms if replayed else gain_ms


def _gain_as_measured(times: Times, compiled: Compiled, replayed: bool, whole: bool) -> float:
    """The predicted gain in ms of a candidate that compiles, if compiling saves as much time as in the measurement
    `compiled`. The estimate differs if one compiles the whole model and the other only its blocks, which saves less.
    """
    share = BLOCKS_SHARE ** (compiled.whole - whole)
    if times.device_ms is None or compiled.device_ms is None or compiled.host_ms is None:
        return share * (times.wall_ms - compiled.wall_ms)
    device_ms = times.device_ms - share * (times.device_ms - compiled.device_ms)
    after_ms = device_ms + times.copies_ms if replayed else max(device_ms, compiled.host_ms)
    return times.wall_ms * (1 - after_ms / max(times.device_ms, times.host_ms or 0.0))


def _is_channels_first(call: Call) -> bool:
    if "convolution" not in call.operator.name():
        return False
    images = [each for each in call.arguments[:2] if isinstance(each, Tensor) and each.dim() == 4]
    return bool(images) and not any(each.is_contiguous(memory_format=torch.channels_last) for each in images)
