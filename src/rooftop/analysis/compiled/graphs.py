"""Compiled programs: the graphs and kernels of `torch.compile`, and the work of each kernel.

While `CompiledGraphs` is active, Rooftop keeps each graph that inductor compiles, with the list of the kernels that
inductor generated from its nodes. The profiler marks each run of a graph with the graph's key. So each kernel can be
traced to its graph and its nodes (see `kernel_work`). For a graph with dynamic sizes, the profile also has the sizes of
each run (see `dynamic_sizes`). Each graph break is recorded with the position (file:line) where it occurs, and each
recompilation with the position at which the recompiled function begins.
"""

from __future__ import annotations

import itertools
import logging
import os
import re
import threading
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any
from unittest.mock import patch

import torch
from torch import fx

from rooftop.analysis.compiled.dynamic_sizes import (
    Sizes,
    SizeSource,
    kept,
    naming_its_sizes,
    size_sources,
)
from rooftop.analysis.compiled.kernel_work import KernelWork, kernel_works
from rooftop.analysis.compiled.when_imported import WhenImported
from rooftop.analysis.report_contents import Compilation, GraphBreak, Recompilation
from rooftop.hardware.interruptions import pass_on
from rooftop.words import in_a_line

TORCH = os.path.dirname(torch.__file__) + os.sep
GRAPH_KEY = "rooftop graph "
SWITCHES = {
    "trace.provenance_tracking_level": 1,  # makes inductor keep the nodes of each kernel
    "cpp.enable_kernel_profile": True,  # on a CPU the profile shows only kernels that record themselves
    "fx_graph_cache": False,  # a graph from a cache has no nodes
    "fx_graph_remote_cache": False,
}
"""Settings of inductor while it compiles the analyzed program."""
SIZES_UNKNOWN = "its graph was compiled for dynamic sizes, and the sizes of this run are unknown"
_BREAKING = "torch._dynamo.symbolic_convert"
_BREAKS = f"{_BREAKING}.__graph_breaks"


@dataclass(frozen=True)
class CompiledGraph:
    """A graph that inductor compiled.

    Attributes:
        works: the work of each kernel, in launch order. For dynamic sizes, the work at the sizes for which the graph
            was compiled.
        backward: whether the graph is a backward pass.
        problem: why the kernels are unknown; "" if they are known.
        dynamic: the data to compute `works` for other sizes; None for fixed sizes.
    """

    works: list[KernelWork]
    backward: bool
    problem: str = ""
    dynamic: DynamicGraph | None = None

    def at(self, sizes: Sizes | None) -> CompiledGraph:
        """The graph with the sizes of one run. `sizes` is None if the profile does not name the sizes."""
        if self.dynamic is None:
            return self
        if sizes is None or self.dynamic.sources is None:
            return CompiledGraph([], self.backward, SIZES_UNKNOWN)
        if sizes not in self.dynamic.ran:
            self.dynamic.ran[sizes] = self.dynamic.run_with(sizes, self.backward)
        return self.dynamic.ran[sizes]


@dataclass(frozen=True)
class DynamicGraph:
    """A compiled graph whose sizes vary from run to run.

    Attributes:
        graph: the graph, with symbols for dynamic sizes.
        kernels: (name, nodes) in the order of their launches.
        sources: the inputs from which the sizes of a call are read; None if the inputs do not determine the sizes.
        ran: sizes of an earlier run -> the graph at these sizes.
    """

    graph: fx.Graph
    kernels: list[tuple[str, list[str]]]
    sources: tuple[SizeSource, ...] | None
    ran: dict[Sizes, CompiledGraph] = field(default_factory=dict)

    def run_with(self, sizes: Sizes, backward: bool) -> CompiledGraph:
        try:
            symbols = {source.symbol: size for source, size in zip(self.sources or (), sizes, strict=True)}
            return CompiledGraph(kernel_works(self.graph, self.kernels, symbols), backward)
        except Exception as error:
            pass_on(error)
            return _unreadable(error, backward)


# Graphs are numbered across all analyses in this process, since code compiled in an earlier analysis keeps its key.
_numbers = itertools.count()
_RECORDED: dict[str, CompiledGraph] = {}
"""The graphs of all analyses. Code that one analysis has compiled is not compiled again, so later analyses look its
graph up here.
"""


def recorded_graph(key: str) -> CompiledGraph | None:
    """The graph with that key, from any analysis; None if there is none."""
    return _RECORDED.get(key)


@dataclass
class CompiledGraphs:
    """Record all graphs that are compiled in a `with` block. The graphs are stored by the key that the profiler
    shows."""

    graphs: dict[str, CompiledGraph] = field(default_factory=dict)
    _breaks: list[tuple[str, str]] = field(default_factory=list)  # (file:line, reason)
    _frames: deque[Any] = field(default_factory=deque)  # dynamo's metrics of each compilation; dynamo keeps the last 64
    _stack: ExitStack = field(default_factory=ExitStack)
    _thread: int = 0

    def __enter__(self) -> CompiledGraphs:
        from torch._functorch import config as functorch_config

        self._thread = threading.get_ident()
        self._stack.enter_context(functorch_config.patch(enable_autograd_cache=False))
        for name, action in (
            ("torch._dynamo.utils", self._keep_frames),
            ("torch._inductor.compile_fx", self._keep_graphs),
            (_BREAKING, self._listen),
        ):
            self._stack.enter_context(WhenImported(name, action))
        return self

    def _keep_frames(self, utils: Any) -> None:
        self._stack.callback(utils._compilation_metrics.extend, self._frames)
        self._stack.enter_context(patch.object(utils, "_compilation_metrics", self._frames))

    def _keep_graphs(self, compile_fx: Any) -> None:
        self._stack.enter_context(patch.object(compile_fx, "compile_fx", self._recording(compile_fx)))

    def _listen(self, symbolic_convert: Any) -> None:
        self._stack.enter_context(_listening(_BREAKS, self._note_break))

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        elsewhere = threading.get_ident() != self._thread
        with suppress(AssertionError) if elsewhere else nullcontext():  # another thread cannot restore a setting
            self._stack.close()

    def _recording(self, compile_fx: Any) -> Callable[..., Any]:
        """`compile_fx` with an inner compiler that records each graph (forward, backward) and the graph's kernels."""
        from torch._inductor import config, debug

        original = compile_fx.compile_fx

        def recording(model: Any, inputs: Any, *args: Any, inner_compile: Any = None, **kwargs: Any) -> Any:
            inner = inner_compile or compile_fx.compile_fx_inner

            def keeping(gm: Any, example_inputs: Any, **options: Any) -> Any:
                debug._inductor_triton_kernel_to_post_grad_node_info.clear()
                with config.patch(SWITCHES):
                    compiled = inner(gm, example_inputs, **options)
                kernels = dict(debug._inductor_triton_kernel_to_post_grad_node_info)
                key = str(getattr(compiled, "_fx_graph_cache_key", None))
                # With options, `compile_fx` calls itself and wraps `keeping` twice: the inner one has kept this graph.
                if key.startswith(GRAPH_KEY):
                    self.graphs.setdefault(key, _RECORDED[key])
                    return compiled
                key = compiled._fx_graph_cache_key = f"{GRAPH_KEY}{next(_numbers)}"
                graph = _graph(gm, kernels, bool(options.get("is_backward")))
                self.graphs[key] = _RECORDED[key] = graph
                # this callable includes the CUDA graphs, if there are any
                call = getattr(compiled, "current_callable", None)
                if call is not None and graph.dynamic is not None and graph.dynamic.sources is not None:
                    compiled.current_callable = naming_its_sizes(call, graph.dynamic.sources)
                return compiled

            return original(model, inputs, *args, inner_compile=keeping, **kwargs)

        return recording

    def _note_break(self, message: str) -> None:
        found = re.search(r"in user code at (.+:\d+)", message)
        reason = re.search(r"Graph Break Reason: (.+)", message)
        lines = [line.strip() for line in message.splitlines() if line.strip()]
        detail = lines[2] if len(lines) > 2 and not lines[2].startswith(("Explanation", "User code")) else ""
        self._breaks.append((found[1] if found else "", detail or (reason[1] if reason else lines[0])))

    def compilation(self) -> Compilation:
        """The number of graphs and kernels, the total seconds of compilation, graph breaks, and recompilations."""
        frames = [frame for frame in self._frames if frame.compile_id and not frame.is_runtime and frame.co_name]
        seconds = {f"{frame.co_filename}:{frame.co_firstlineno}": _seconds(frame) for frame in frames}
        breaks = [GraphBreak(line, reason, seconds.get(line, 0.0)) for line, reason in dict.fromkeys(self._breaks)]
        again = [
            Recompilation(
                f"{frame.co_filename}:{frame.co_firstlineno}",
                frame.co_name or "",
                frame.recompile_reason,
                _seconds(frame),
            )
            for frame in frames
            if frame.recompile_reason and not str(frame.co_filename).startswith(TORCH)
        ]
        return Compilation(
            graphs=len(self.graphs),
            kernels=sum(len(graph.works) for graph in self.graphs.values()),
            seconds=sum(_seconds(frame) for frame in frames),
            graph_breaks=tuple(breaks),
            recompilations=tuple(again),
        )


def _graph(module: Any, kernels: dict[str, list[str]], backward: bool) -> CompiledGraph:
    """Make the `CompiledGraph` of a graph module. `kernels` maps "name:number" of each kernel, in the order of the
    numbers, to the names of the kernel's graph nodes."""
    graph, named = module.graph, [(name.rpartition(":")[0], nodes) for name, nodes in kernels.items()]
    try:
        works, sources = kernel_works(graph, named), size_sources(graph)
        dynamic = DynamicGraph(kept(graph), named, sources) if sources != () else None
        return CompiledGraph(works, backward, dynamic=dynamic)
    except Exception as error:  # a graph that we cannot read must not end the user's compilation
        pass_on(error)
        return _unreadable(error, backward)


def _unreadable(error: Exception, backward: bool) -> CompiledGraph:
    return CompiledGraph([], backward, f"its compiled graph could not be read: {in_a_line(error)}")


def _seconds(frame: Any) -> float:
    return float(frame.entire_frame_compile_time_s or 0.0)


class _Listener(logging.Handler):
    def __init__(self, note: Callable[[str], None]) -> None:
        super().__init__(logging.DEBUG)
        self._note = note

    def emit(self, record: logging.LogRecord) -> None:
        self._note(record.getMessage())


class _listening:
    """In a `with` block, pass a logger's messages to a function as well; at the end, restore the logger's settings.

    If the program has not set this logger's level, the messages go only to the function, not to the terminal.
    """

    def __init__(self, name: str, note: Callable[[str], None]) -> None:
        self._logger, self._handler = logging.getLogger(name), _Listener(note)

    def __enter__(self) -> None:
        logger = self._logger
        self._before = (logger.level, logger.propagate)
        logger.propagate = logger.propagate and logger.level != logging.NOTSET
        logger.setLevel(logging.DEBUG)
        logger.addHandler(self._handler)

    def __exit__(self, *exception: object) -> None:
        self._logger.removeHandler(self._handler)
        level, self._logger.propagate = self._before
        self._logger.setLevel(level)
