"""Train with two CUDA graphs: one for a model's forward, and one for its backward.

A call replays the forward inside an autograd function, whose backward replays the other graph. So the loss, hooks of
parameters and the optimizer remain under the user's control. Both graphs share memory: the backward reads values that
the forward has stored. Until the backward of a call has run, or the call's results have been freed, other calls run
without graphs. Results and gradients are copies, because autograd may keep a gradient and add the next one to it.
"""

from __future__ import annotations

import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn

from rooftop.hardware.graphs import captured_into
from rooftop.rewrites.graphs import UncapturedError, capturing, recorded
from rooftop.rewrites.structures import mapped, signature

MOST_PAIRS = 4
Gradients = list[Tensor | None]
Forward = Callable[[], list[Tensor]]
Backward = Callable[[list[Tensor]], Gradients]
Recorder = Callable[[Forward, Backward], "Recorded"]


@dataclass(frozen=True)
class Recorded:
    """Two graphs, and the memory that they read and write.

    Attributes:
        outputs: tensors that the forward writes.
        gradients: tensors that the backward writes; None for unused inputs.
        forward, backward: functions that replay the graphs.
        bytes: growth of the memory pool.
    """

    outputs: list[Tensor]
    gradients: Gradients
    forward: Callable[[], None]
    backward: Callable[[], None]
    bytes: int = 0


@dataclass(frozen=True)
class _Pair:
    """The graphs for one signature.

    Attributes:
        inputs: tensors into which calls copy their inputs.
        slopes: tensors into which backward copies the gradients of outputs; None for outputs without a gradient.
        result: the structure of the result, with the outputs in it.
        sources: for each gradient, the indices of the outputs that depend on the differentiated tensor.
    """

    inputs: list[Tensor]
    slopes: Gradients
    result: Any
    recorded: Recorded
    sources: list[set[int]]


class _Turn:
    """One replay of a forward graph, numbered. The graphs' memory is in use until its backward sets `done`."""

    def __init__(self, number: int) -> None:
        self.number, self.done = number, False


class TrainingReplays:
    """Run a model in training by replaying CUDA graphs.

    Args:
        run: runs the model.
        model: the module whose parameters get gradients; the parameters' addresses must not change.
        device: a GPU.
        record: captures both graphs; tests pass another function.

    A call raises the errors of `run`. The first call raises `UncapturedError` if `run` cannot be captured. Later calls
    that cannot be captured, for example because all parameters are frozen, run the model without graphs.
    """

    def __init__(
        self,
        run: Callable[..., Any],
        model: nn.Module,
        device: torch.device,
        record: Recorder | None = None,
    ) -> None:
        self.run, self.model, self.device = run, model, device
        self.turns = 0
        self._record = record or _Capture(device)
        self._pairs: OrderedDict[Hashable, _Pair] = OrderedDict()
        self._uncaptured: set[Hashable] = set()
        self._last: weakref.ref[_Turn] | None = None
        self._lock = Lock()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._lock:
            key, given = signature((args, kwargs), lambda t: (tuple(t.shape), t.stride(), t.dtype, t.requires_grad))
            key = key, tuple(parameter.requires_grad for parameter in self.model.parameters()), _autocast(self.device)
            last = self._last() if self._last is not None else None
            if (last is not None and not last.done) or key in self._uncaptured:
                return self.run(*args, **kwargs)
            pair = self._pairs.get(key)
            if pair is None:
                try:
                    pair = self._pairs[key] = self._recorded(given, args, kwargs)
                except UncapturedError:
                    if not self._pairs:
                        raise
                    self._uncaptured.add(key)
                    return self.run(*args, **kwargs)
                while len(self._pairs) > MOST_PAIRS:
                    if self.device.type == "cuda":
                        torch.cuda.synchronize(self.device)  # a graph's memory must not be reused while the graph runs
                    self._pairs.popitem(last=False)
            self._pairs.move_to_end(key)
            self.turns += 1
            turn = _Turn(self.turns)
            self._last = weakref.ref(turn)
            results = _Replay.apply(self, pair, turn, *given, *self._parameters())
            result_of = dict(zip(map(id, pair.recorded.outputs), results, strict=True))
            return mapped(pair.result, lambda output: result_of[id(output)])

    def bytes(self) -> int:
        """Bytes of memory of all graphs."""
        return sum(pair.recorded.bytes for pair in self._pairs.values())

    def _parameters(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    def _recorded(self, given: Sequence[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Pair:
        places = [tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in given]
        place_of = {id(tensor): place for tensor, place in zip(given, places, strict=True)}
        own_args, own_kwargs = mapped((args, kwargs), lambda tensor: place_of[id(tensor)])
        parameters = self._parameters()
        inputs = [place for place in places if place.requires_grad]
        found: list[Any] = []
        slopes: Gradients = []
        sources: list[set[int]] = []

        def forward() -> list[Tensor]:
            outputs: list[Tensor] = []

            def note(output: Tensor) -> Tensor:
                outputs.append(output)
                return output

            torch.clear_autocast_cache()  # a graph must contain the casts of weights, not read those of another run
            found[:] = [mapped(self.run(*own_args, **own_kwargs), note, strict=True)]
            if not slopes:  # the first run
                slopes.extend(torch.zeros_like(t) if t.requires_grad else None for t in outputs)
            return outputs

        def backward(outputs: list[Tensor]) -> Gradients:
            pairs = [(t, slope) for t, slope in zip(outputs, slopes, strict=True) if slope is not None]
            if not pairs or not (inputs or parameters):
                raise UncapturedError("no result has a gradient", found[0])
            wanted = {id(each): each for each in (*inputs, *aliases, *parameters)}
            if not sources:  # the first run
                reached = [_leaves(t) if slope is not None else set() for t, slope in zip(outputs, slopes, strict=True)]
                leaves = [{id(each)} for each in inputs]
                leaves += [{id(a), id(p)} for a, p in zip(aliases, parameters, strict=True)]
                sources.extend({i for i, ids in enumerate(reached) if ids & each} for each in leaves)
            lost, starts = zip(*pairs, strict=True)
            gradients = torch.autograd.grad(lost, list(wanted.values()), starts, allow_unused=True)
            of = dict(zip(wanted, gradients, strict=True))
            of_parameters = (_sum_of({id(a), id(p)}, of) for a, p in zip(aliases, parameters, strict=True))
            return [*(of[id(each)] for each in inputs), *of_parameters]

        with torch.enable_grad(), _unchanged(self.model, self.device), _aliased(self.model, parameters) as aliases:
            recorded = self._record(forward, backward)
        # in the order of the inputs of `_Replay`
        gradients = iter(recorded.gradients)
        every = [next(gradients) if each.requires_grad else None for each in (*places, *parameters)]
        following = iter(sources)
        of_every = [next(following) if each.requires_grad else set() for each in (*places, *parameters)]
        outputs = [output.detach() for output in recorded.outputs]
        detached = dict(zip(map(id, recorded.outputs), outputs, strict=True))
        result = mapped(found[0], lambda output: detached[id(output)])
        recorded = Recorded(outputs, every, recorded.forward, recorded.backward, recorded.bytes)
        return _Pair(places, slopes, result, recorded, of_every)


class _Replay(torch.autograd.Function):
    """The autograd function whose forward and backward replay the two CUDA graphs of a training call."""

    @staticmethod
    def forward(ctx: Any, owner: TrainingReplays, pair: _Pair, turn: _Turn, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.owner, ctx.pair, ctx.turn = owner, pair, turn
        ctx.set_materialize_grads(False)  # an output without a gradient must not cause gradients of 0
        for place, tensor in zip(pair.inputs, tensors, strict=False):  # the parameters come after the inputs
            place.detach().copy_(tensor, non_blocking=True)
        pair.recorded.forward()
        outputs = tuple(output.clone() for output in pair.recorded.outputs)
        ctx.mark_non_differentiable(
            *(output for output, slope in zip(outputs, pair.slopes, strict=True) if slope is None)
        )
        return outputs

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "rooftop.optimize: CUDA graphs have no second derivatives (create_graph=True): leave the rule "
                "cuda-graphs out"
            )
        pair: _Pair = ctx.pair
        if ctx.turn.done or ctx.turn.number != ctx.owner.turns:
            raise RuntimeError(
                "rooftop.optimize: with CUDA graphs, each call in training allows one backward, before the next call: "
                "to run more, leave the rule cuda-graphs out"
            )
        for place, slope in zip(pair.slopes, slopes, strict=True):
            if place is not None:
                place.zero_() if slope is None else place.copy_(slope)
        pair.recorded.backward()
        ctx.turn.done = True
        used = {number for number, slope in enumerate(slopes) if slope is not None}
        every = pair.recorded.gradients
        gradients = [each if used & of else None for each, of in zip(every, pair.sources, strict=True)]
        found = [gradient for gradient in gradients if gradient is not None]
        copies = [torch.empty_like(gradient) for gradient in found]
        if found:
            torch._foreach_copy_(copies, found)  # copies all in few launches
        following = iter(copies)
        return None, None, None, *(None if gradient is None else next(following) for gradient in gradients)


def _autocast(device: torch.device) -> Hashable:
    """The state of autocast, which changes what a call computes."""
    enabled = torch.is_autocast_enabled(device.type)
    return enabled, torch.get_autocast_dtype(device.type) if enabled else None


def _leaves(output: Tensor) -> set[int]:
    """The ids of the leaves of autograd's graph on which an output depends."""
    if output.grad_fn is None:
        return {id(output)}
    found: set[int] = set()
    nodes: set[Any] = {output.grad_fn}
    waiting = [output.grad_fn]
    while waiting:
        node: Any = waiting.pop()
        if hasattr(node, "variable"):
            found.add(id(node.variable))
        news = {following for following, _ in node.next_functions if following is not None} - nodes
        nodes |= news
        waiting += news
    return found


def _sum_of(keys: set[int], gradients: Mapping[int, Tensor | None]) -> Tensor | None:
    """The sum of the gradients under these keys, except those that are None; None if all are None."""
    found = [gradient for key in keys if (gradient := gradients[key]) is not None]
    return sum(found[1:], found[0]) if found else None


@contextmanager
def _aliased(model: nn.Module, parameters: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Within the block, a model's modules have aliases: other parameters with the same memory. Yields the aliases in
    the order of `parameters`.

    Autograd sums a parameter's gradient on the stream on which the parameter was first used. Autograd keeps this stream
    as long as any autograd graph with the parameter is alive, such as the graph of the user's last loss. A capture on
    another stream then fails. An alias is new, so it is first used in the capture. A module that reads a parameter from
    elsewhere still reads the original.
    """
    alias_of = {id(p): _alias(p) for p in parameters}
    places = [
        (module, name, parameter)
        for module in model.modules()
        for name, parameter in module._parameters.items()
        if parameter is not None and alias_of.get(id(parameter), parameter) is not parameter
    ]
    try:
        for module, name, parameter in places:
            _set(module, name, alias_of[id(parameter)])
        yield [alias_of[id(parameter)] for parameter in parameters]
    finally:
        for module, name, parameter in places:
            _set(module, name, parameter)


def _alias(parameter: nn.Parameter) -> nn.Parameter:
    if type(parameter) is not nn.Parameter:
        return parameter
    alias = nn.Parameter(parameter.detach())
    vars(alias).update(vars(parameter))  # attributes that a model has attached to the parameter
    return alias


def _set(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    if isinstance(module, nn.RNNBase):  # an RNN also has a list of its weights
        setattr(module, name, parameter)
    else:  # a module's own `__setattr__` may refuse the alias
        module._parameters[name] = parameter


@contextmanager
def _quiet_about_streams() -> Iterator[None]:
    """Suppress PyTorch's warning that accumulating a parameter's gradient would wait, because the parameter was used
    on another stream. Here, gradients are returned and not accumulated.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The AccumulateGrad node's stream does not match", UserWarning)
        yield


class _Capture:
    """Captures the forward and the backward of a call as two CUDA graphs, on one stream and in one memory pool."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, forward: Forward, backward: Backward) -> Recorded:
        """Run forward and backward at least twice, then capture them. The first run does lazy initialization. The
        function `recorded` makes the second run, to detect GPU synchronization.

        Raises:
            UncapturedError: the host synchronizes with the GPU, or the capture failed.
            Exception: any error of a run.
        """
        device, stream = self.device, self._stream
        current = torch.cuda.current_stream(device)
        stream.wait_stream(current)

        def record() -> Recorded:
            first, second = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
            reserved = torch.cuda.memory_reserved(device)
            with captured_into(first, stream, self._pool):
                captured = forward()
            with captured_into(second, stream, self._pool):
                gradients = backward(captured)
            grown = torch.cuda.memory_reserved(device) - reserved
            return Recorded(captured, gradients, first.replay, second.replay, grown)

        try:
            with capturing, torch.cuda.device(device), torch.cuda.stream(stream), _quiet_about_streams():
                outputs = forward()
                backward(outputs)
                return recorded(record, lambda: backward(forward()), outputs, stream, compared=True)
        finally:
            current.wait_stream(stream)


@contextmanager
def _unchanged(model: nn.Module, device: torch.device) -> Iterator[None]:
    """After the block, restore buffers and the random state of the process, because runs before a capture must leave no
    traces.
    """
    before = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    with torch.random.fork_rng([device.index or 0] if device.type == "cuda" else []):
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, values in before:
                    buffer.copy_(values)
