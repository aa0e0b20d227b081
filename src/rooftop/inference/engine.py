"""Make a trained model fast without rewriting it.

The engine does seven things to a copy of the model, and reports each of them:

1. batch norms are folded into the convolutions before them (`folding.py`);
2. on a GPU, 2-D convolutions are computed together with the operations after them (`fusing.py`);
3. on a GPU, norms, softmaxes, embeddings (`rooftop.nn.replace`) and max pools (`pooling.py`) run on Rooftop's kernels;
4. on a GPU, weights and activations are bfloat16, and results are float32;
5. on a GPU, weights and inputs of 2-D convolutions are channels last, the layout that tensor cores read;
6. results of methods marked with `@constant` are computed once for each set of arguments (`rooftop.nn.constants`);
7. on a GPU, calls replay CUDA graphs (`graphs.py`): the host launches once instead of hundreds of times.
"""

from __future__ import annotations

import copy
import warnings
from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from rooftop.nn import KINDS, Replacement
from rooftop.nn import replace as replace_modules
from rooftop.nn.constants import keep_constants, kept_bytes
from rooftop.rewrites.folding import Folding, fold_norms
from rooftop.rewrites.fusing import Fusing, fuse_convolutions, lay_out_depthwise, settled
from rooftop.rewrites.graphs import Graph, GraphReport, Graphs, Refusal, UncapturedError
from rooftop.rewrites.pooling import replace_pools
from rooftop.rewrites.structures import mapped, signature
from rooftop.words import counted

CONVOLUTIONS_2D = (nn.Conv2d, nn.ConvTranspose2d)
IN_A_CAPTURE = (
    "Engine: called while a CUDA graph is being captured, which cannot contain the engine's own graphs: call an engine "
    "with graphs=False there"
)
"""Message of the error if a caller captures an engine that has graphs."""


@dataclass(frozen=True)
class EngineReport:
    """The changes that an engine made to its copy of the model, and the memory that the engine holds.

    Attributes:
        device, dtype, channels_last: where and how the model runs.
        folded: for each removed norm, the convolution it was folded into.
        left: for each remaining batch norm, why it is not folded.
        fused: for each fused convolution, the operations that it is computed with.
        replaced: the kind of each norm, softmax, embedding and max pool that Rooftop's kernels compute.
        constants: methods of modules whose results are computed once, if the model calls these methods.
        constants_bytes: size of the results of these methods.
        weights_bytes: size of parameters and buffers.
        graphs: the graphs held, the most recently used one last; None if the engine uses none.
        refused: calls that run without a graph: their inputs and the reason.
        eager_calls: number of calls that ran without a graph, including calls with empty inputs.
    """

    device: torch.device
    dtype: torch.dtype
    channels_last: bool
    folded: dict[str, str]
    left: dict[str, str]
    fused: dict[str, str]
    replaced: dict[str, str]
    constants: tuple[str, ...]
    constants_bytes: int
    weights_bytes: int
    graphs: tuple[GraphReport, ...] | None
    refused: dict[str, str]
    eager_calls: int

    @property
    def graphs_bytes(self) -> int:
        """Bytes of GPU memory that all CUDA graphs hold: their inputs, and the memory in which they run."""
        return sum(graph.bytes for graph in self.graphs or ())

    def __str__(self) -> str:
        layout = ", channels last" if self.channels_last else ""
        weights = f"{self.weights_bytes / 2**20:.1f} MiB of weights"
        calls = f"{counted(self.eager_calls, 'call')} without a graph"
        lines = [f"{self.device}, {_short(self.dtype)}{layout}, {weights}, {calls}"]
        lines.append(f"{len(self.folded)} norms folded, {len(self.left)} left")
        lines += [f"  {norm}: left, {why}" for norm, why in self.left.items()]
        if self.fused:
            lines.append(f"{len(self.fused)} convolutions fused with the operators after them")
        if self.replaced:
            kinds = Counter(self.replaced.values()).most_common()
            lines.append(f"by Rooftop's kernels: {', '.join(f'{count} {kind}' for kind, count in kinds)}")
        if self.constants:
            kept = f"{self.constants_bytes / 2**20:.1f} MiB"
            lines.append(f"{len(self.constants)} methods of modules computed once, {kept} of results")
        for graph in self.graphs or ():
            lines.append(f"graph of {graph.inputs}: {graph.bytes / 2**20:.1f} MiB, {graph.replays} replays")
        lines += [f"no graph for {inputs}: {why}" for inputs, why in self.refused.items()]
        return "\n".join(lines)


class Engine:
    """A model for inference: `engine(x)` returns what `model(x)` returns in evaluation mode and without gradients.

    The engine holds a copy of the model on the model's device. The engine never changes the model, and later changes of
    the model do not affect the engine. Calls from several threads wait for each other; on a GPU, calls may come from
    any stream. While an engine is built, other threads must not run models, because torch.fx traces this model, and
    meanwhile intercepts calls of all modules.

    Args:
        model: any module on one device that `copy.deepcopy` can copy.
        dtype: dtype of floating-point weights and inputs. None: bfloat16 on a GPU, float32 on a CPU. Batch norms that
            cannot be folded are at least float32.
        channels_last: whether weights of 2-D convolutions, and floating-point inputs with four dimensions, are channels
            last. None: only on a GPU, if the model has 2-D convolutions.
        graphs: whether calls replay CUDA graphs, one for each signature of the inputs: structure, shapes, dtypes,
            numbers, strings. None: only on a GPU. Pass False for a model that keeps state between calls outside its
            buffers.
        most_shapes: largest number of signatures that are kept, with their graphs or as refused. Above this number, the
            least recently used signature is dropped.
        output_dtype: dtype to which floating-point results are cast; None: no cast.
        copy_outputs: whether results of graphs are copied. Results that are not copied are inference tensors, which the
            next call of the engine, with any inputs, overwrites.
        fold: whether batch norms are folded.
        fuse: whether 2-D convolutions are computed together with bias, sum and activation. None: only on a GPU.
        replace: whether Rooftop's kernels compute norms, softmaxes, embeddings and max pools. None: only on a GPU.
        constants: whether results of methods marked with `@constant` (`rooftop.nn.constants`) are computed once for
            each set of arguments. These results depend only on parameters, buffers and arguments such as sizes.

    Attributes:
        model: the copy that runs.

    Raises:
        TypeError: `model` is not a module or cannot be copied, `dtype` or `output_dtype` is not a floating-point dtype,
            or `dtype` has 8 bits.
        ValueError: the model is on several devices, graphs=True without a GPU, or most_shapes is below 1.

    A call raises the errors of the model, and `ValueError` for an input on another device. With graphs, a call also
    raises:
        TypeError: inputs or results other than tensors, numbers, strings, None, dtypes, devices, and tuples, lists,
            dicts and dataclasses of these.
        RuntimeError: the caller is capturing a graph.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        dtype: torch.dtype | None = None,
        channels_last: bool | None = None,
        graphs: bool | None = None,
        most_shapes: int = 8,
        output_dtype: torch.dtype | None = torch.float32,
        copy_outputs: bool = True,
        fold: bool = True,
        fuse: bool | None = None,
        replace: bool | None = None,
        constants: bool = True,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"Engine: model must be a torch.nn.Module, got {type(model).__name__}")
        for name, given in (("dtype", dtype), ("output_dtype", output_dtype)):
            if given is not None and not (isinstance(given, torch.dtype) and given.is_floating_point):
                raise TypeError(f"Engine: {name} must be a floating-point torch.dtype or None, got {given!r}")
        if dtype is not None and dtype.itemsize == 1:
            raise TypeError(f"Engine: dtype must have at least 16 bits, got {dtype}: layers do not compute in it")
        if type(most_shapes) is not int or most_shapes < 1:
            raise ValueError(f"Engine: most_shapes must be an integer of at least 1, got {most_shapes!r}")
        self.device = _device_of(model)
        on_gpu = self.device.type == "cuda"
        if graphs and not on_gpu:
            raise ValueError(f"Engine: graphs=True needs a model on a CUDA device, this one is on {self.device}")
        self.dtype = dtype or (torch.bfloat16 if on_gpu else torch.float32)
        self.output_dtype, self.copy_outputs = output_dtype, copy_outputs
        self.model = _copied(model)
        self.folding = fold_norms(self.model) if fold else Folding()
        self.fusing = fuse_convolutions(self.model) if (on_gpu if fuse is None else fuse) else Fusing()
        # Modules are replaced last, since the steps above trace the model with torch.fx, which cannot trace into
        # replaced modules.
        replaces = on_gpu if replace is None else replace
        self.replacement = replace_modules(self.model, only=KINDS) if replaces else Replacement()
        self.replacement.swapped |= replace_pools(self.model) if replaces else {}
        self.constants = keep_constants(self.model) if constants else ()
        if channels_last is None:
            channels_last = on_gpu and any(isinstance(module, CONVOLUTIONS_2D) for module in self.model.modules())
        self.channels_last = channels_last
        _convert(self.model, self.dtype, channels_last)
        if channels_last and on_gpu:
            lay_out_depthwise(self.model)
        use_graphs = on_gpu if graphs is None else graphs
        self._graphs = Graphs(self.device, most_shapes, self._state) if use_graphs else None
        if on_gpu:
            torch.cuda.synchronize(self.device)  # later calls may run on other streams, which do not wait for this one
        self._inputs: dict[Hashable, str] = {}  # graph's key -> its inputs' shapes and dtypes as text
        self._lock = Lock()
        self._eager_calls = 0
        self._warned = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's results for these arguments; see the class."""
        with self._lock:
            if self._graphs is None:
                return self._eager(args, kwargs)
            with self._graphs.in_order(IN_A_CAPTURE):
                return self._by_graph(self._graphs, args, kwargs)

    def __getstate__(self) -> object:
        raise TypeError(
            "Engine: an engine cannot be copied or pickled, because of its graphs and its lock: copy or save the "
            "model it was built from, and build another engine"
        )

    @property
    def report(self) -> EngineReport:
        """The changes that the engine made to its copy of the model, and the memory that the engine holds now."""
        with self._lock:
            tensors = {id(t): t for t in (*self.model.parameters(), *self.model.buffers())}.values()
            entries = self._graphs.entries if self._graphs is not None else {}
            graphs = tuple(
                GraphReport(self._inputs[key], entry.bytes, entry.replays)
                for key, entry in entries.items()
                if isinstance(entry, Graph)
            )
            return EngineReport(
                device=self.device,
                dtype=self.dtype,
                channels_last=self.channels_last,
                folded=dict(self.folding.folded),
                left=dict(self.folding.left),
                fused=dict(self.fusing.fused),
                replaced=dict(self.replacement.swapped),
                constants=self.constants,
                constants_bytes=kept_bytes(self.model),
                weights_bytes=sum(t.numel() * t.element_size() for t in tensors),
                graphs=None if self._graphs is None else graphs,
                refused={self._inputs[key]: e.why for key, e in entries.items() if isinstance(e, Refusal)},
                eager_calls=self._eager_calls,
            )

    # ---- without a graph -------------------------------------------------------------------------------------------

    def _eager(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._eager_calls += 1
        args, kwargs = mapped((args, kwargs), self._as_input)
        with torch.no_grad():
            return mapped(self._run(args, kwargs), self._as_output)

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with torch.autocast(self.device.type, enabled=False):
            results = self.model(*args, **kwargs)
            return settled(results) if self.fusing.fused else results

    def _as_input(self, tensor: Tensor) -> Tensor:
        self._check_device(tensor)
        return tensor.to(self._dtype_of(tensor), memory_format=self._format_of(tensor))

    def _as_output(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.output_dtype) if self.output_dtype and tensor.is_floating_point() else tensor

    def _dtype_of(self, tensor: Tensor) -> torch.dtype:
        return self.dtype if tensor.is_floating_point() else tensor.dtype

    def _format_of(self, tensor: Tensor) -> torch.memory_format:
        images = self.channels_last and tensor.dim() == 4 and tensor.is_floating_point()
        return torch.channels_last if images else torch.preserve_format

    def _check_device(self, tensor: Tensor) -> None:
        if tensor.device != self.device:
            raise ValueError(f"Engine: an input is on {tensor.device}, the model on {self.device}: move it there first")

    # ---- with graphs -----------------------------------------------------------------------------------------------

    def _by_graph(self, graphs: Graphs, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        key, given = signature((args, kwargs), lambda t: (tuple(t.shape), self._dtype_of(t)))
        for tensor in given:
            self._check_device(tensor)
        entry = graphs.find(key)
        if isinstance(entry, Refusal) or any(tensor.numel() == 0 for tensor in given):  # nothing to capture
            return self._eager(args, kwargs)
        if entry is None:
            try:
                entry = self._new_graph(graphs, key, given, args, kwargs)
            except UncapturedError as error:
                self._tell(key, str(error))
                self._eager_calls += 1
                return mapped(error.outputs, self._copied_output)
        return mapped(entry(given), self._copied_output if self.copy_outputs else lambda tensor: tensor)

    def _new_graph(
        self, graphs: Graphs, key: Hashable, given: list[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Graph:
        with torch.no_grad():
            places = [self._place(tensor) for tensor in given]
        by_tensor = {id(tensor): place for tensor, place in zip(given, places, strict=True)}
        own_args, own_kwargs = mapped((args, kwargs), lambda tensor: by_tensor[id(tensor)])

        def call() -> Any:
            # If results are not copied after a replay, the graph itself converts them to the output dtype.
            convert = (lambda tensor: tensor) if self.copy_outputs else self._as_output
            return mapped(self._run(own_args, own_kwargs), convert, strict=True)

        text = ", ".join(f"{'x'.join(map(str, p.shape)) or 'scalar'} {_short(p.dtype)}" for p in places)
        self._inputs = {k: v for k, v in self._inputs.items() if k in graphs.entries} | {key: text or "nothing"}
        return graphs.add(key, places, call)

    def _place(self, tensor: Tensor) -> Tensor:
        """Copy an input into a tensor that a graph will read. The copy is contiguous or channels last."""
        memory_format = self._format_of(tensor)
        if memory_format is torch.preserve_format:
            memory_format = torch.contiguous_format
        place = torch.empty(tensor.shape, dtype=self._dtype_of(tensor), device=self.device, memory_format=memory_format)
        return place.copy_(tensor)

    def _copied_output(self, tensor: Tensor) -> Tensor:
        to_other = self.output_dtype is not None and tensor.is_floating_point()
        return tensor.to(self.output_dtype if to_other else tensor.dtype, copy=True)

    def _state(self) -> Hashable:
        """The current version of each buffer of the model: its name, its identity, and its in-place version counter."""
        buffers = [(name, b) for m in self.model.modules() for name, b in m._buffers.items()]
        return tuple((name, id(b), None if b is None or b.is_inference() else b._version) for name, b in buffers)

    def _tell(self, key: Hashable, why: str) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"Engine: {self._inputs[key]} runs without a CUDA graph, since the model cannot be captured ({why}). "
                "Build the engine with graphs=False, or remove from the model whatever waits for the GPU",
                RuntimeWarning,
                stacklevel=4,
            )


def _device_of(model: nn.Module) -> torch.device:
    devices = {tensor.device for tensor in (*model.parameters(), *model.buffers())} or {torch.device("cpu")}
    if len(devices) > 1:
        names = ", ".join(sorted(map(str, devices)))
        raise ValueError(f"Engine: a model must be on one device, but this one is on {names}: use model.to(...)")
    return devices.pop()


@torch.no_grad()
def _copied(model: nn.Module) -> nn.Module:
    try:
        own = copy.deepcopy(model)
    except Exception as error:
        raise TypeError(
            f"Engine: a {type(model).__name__} cannot be copied ({type(error).__name__}: {error})"
        ) from error
    for parameter in own.parameters():
        parameter.requires_grad_(False)
    return own.eval()


@torch.no_grad()
def _convert(model: nn.Module, dtype: torch.dtype, channels_last: bool) -> None:
    """Convert floating-point tensors to `dtype`, tensors of batch norms to at least float32, and weights of 2-D
    convolutions to channels last.
    """
    for module in model.modules():
        own = torch.promote_types(dtype, torch.float32) if isinstance(module, _BatchNorm) else dtype
        for parameter in module._parameters.values():
            if parameter is not None and parameter.is_floating_point():
                parameter.data = parameter.data.to(own)
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_floating_point():
                module._buffers[name] = buffer.to(own)
        if channels_last and isinstance(module, CONVOLUTIONS_2D) and module.weight is not None:
            module.weight.data = module.weight.data.contiguous(memory_format=torch.channels_last)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
