"""`rooftop.predict`: the time of a step on another machine, without running the step.

The step runs on fake tensors, which have shapes but no data. So neither the other machine nor its memory is needed, and
a laptop can predict a model of 7 billion parameters. Each operator is assumed to take its roof time on the other
machine, so the report is a lower bound. The kernel gap is zero. The launch gap is the time by which the eager
launches, at the time per launch in the ceilings, take longer than the kernels; 0 if they take less.

If the ceilings are those of a GPU, the step uses the operators that PyTorch chooses on a GPU
(`rooftop.analysis.as_on_gpu`), and matrix products use TF32 if PyTorch's settings allow it.
"""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from contextvars import copy_context
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.attention.flex_attention import BlockMask
from torch.nn.parameter import is_lazy
from torch.nn.utils.rnn import PackedSequence
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

from rooftop.analysis.advice import advise
from rooftop.analysis.as_on_gpu import as_on_gpu
from rooftop.analysis.attribution import ModuleTracker
from rooftop.analysis.fake_leftovers import fakes_taken_out, require_no_fakes
from rooftop.analysis.findings import Findings
from rooftop.analysis.floors import comparable, module_tree, operator_rows
from rooftop.analysis.held_objects import Held, left_as_they_were
from rooftop.analysis.instruments import MeasuredOperator
from rooftop.analysis.program import Program, describe_tensor
from rooftop.analysis.report import Report
from rooftop.analysis.report_contents import Gaps, Summary
from rooftop.analysis.without_values import RESULTS, answered_without_values
from rooftop.cost import CountingMode, Record, counted_for, roof
from rooftop.cost.accounting import tensors_in
from rooftop.errors import InputError
from rooftop.hardware.ceilings import Ceilings, require_ceilings
from rooftop.hardware.observing import LightMode
from rooftop.words import in_a_line, utc_now

_predicting = threading.RLock()
"""This lock lets predictions in several threads run one after another. Each prediction restores globals and caches, and
then searches all memory for its fake tensors, which another prediction might still hold or put back.
"""

MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def predict(
    target: Callable[..., Any],
    *args: Any,
    ceilings: Ceilings,
    train: bool = False,
    optimizer: MakeOptimizer | None = None,
    loss: Callable[[Any], Tensor] | None = None,
    dtype: torch.dtype | None = None,
    name: str | None = None,
    **kwargs: Any,
) -> Report:
    """Predict the shortest possible time of one step of a model on the machine with these ceilings.

    Nothing is computed, and the model does not change, even if the target is a callable that uses the model. Results
    that the program caches (in a `functools.lru_cache`, a global, an attribute of a class) are removed.

    Args:
        target: a module or callable; its weights may be real, fake (see `fake_tensors`) or on the meta device.
        *args, **kwargs: arguments of the program; only shape, strides and dtype of tensors are used.
        ceilings: ceilings of the other machine (`rooftop.hardware.ceilings_of("h200")`, or `Ceilings.load(file)`).
        train: also predict the backward pass.
        loss: as for `analyze`.
        optimizer: also predict a step of the optimizer that this function creates from the parameters
            (`torch.optim.AdamW`).
        dtype: cast floating-point weights and arguments to this dtype.
        name: the target's name in the report.

    Raises:
        TypeError: `ceilings` is not Ceilings (a machine's name, for example), `optimizer` does not return an optimizer,
            or `dtype` is not a floating-point dtype.
        InputError: the model does nothing or cannot be copied, reads values (`.item()`, `nonzero`), which fake tensors
            do not have, or has stored fake tensors in a place from which they cannot be removed.
        ModelRunError: the model raised.

    Example:
        >>> report = rooftop.predict(model, x, ceilings=rooftop.hardware.ceilings_of("h200"), train=True)
        >>> report.summary.op_roof_ms
    """
    require_ceilings(ceilings, "predict")
    if optimizer is not None and (isinstance(optimizer, torch.optim.Optimizer) or not callable(optimizer)):
        raise TypeError(
            f"predict(optimizer={type(optimizer).__name__}): expected a function that creates an optimizer from "
            "parameters, e.g. torch.optim.AdamW, because a prediction has its own copy of the parameters"
        )
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise TypeError(f"predict(dtype={dtype!r}): expected a floating-point dtype, e.g. torch.bfloat16")
    with _predicting:
        step = copy_context().run(_counted_step, target, args, kwargs, ceilings.kind, train, optimizer, loss, dtype)
        if step.ended is not None:
            require_no_fakes(step.ended, step.name, step.emptied)
    records, tracker = step.records, step.tracker
    if not any(record.cost is not None and _works(record) for record in records):
        raise InputError(
            f"nothing to predict: {step.name} runs no operator with a cost formula, or all results are empty tensors"
        )
    records = [comparable(record, ceilings) for record in records]
    operators = [MeasuredOperator(r, roof(r.cost, ceilings).ms if r.cost is not None else 0.0, ()) for r in records]
    rows = operator_rows(operators, ceilings)
    modules = module_tree(operators, tracker, ceilings, type(target).__name__)
    launches = sum(1 for op in operators if op.measured_ms > 0)
    wall_ms = max(modules.op_roof_ms, launches * ceilings.launch_eager_ms)
    summary = Summary(
        wall_ms=wall_ms,
        wall_spread=0.0,
        busy_ms=modules.op_roof_ms,
        op_roof_ms=modules.op_roof_ms,
        fused_roof_ms=modules.fused_roof_ms,
        flops=modules.flops,
        bytes=modules.bytes,
        parameters=modules.parameters,
        kernels=launches,
        samples=step.samples,
        repeats=0,
    )
    gaps = Gaps(0.0, modules.op_roof_ms - modules.fused_roof_ms, wall_ms - modules.op_roof_ms)
    working = [op for op in operators if _works(op.record)]
    uncovered = dict.fromkeys(op.record.shown_name for op in working if op.record.cost is None)
    notes = [
        f"Predicted for {ceilings.device} from ceilings measured there: each operator at its roof, launched eagerly. "
        "Nothing was run; real kernels are slower."
    ]
    if uncovered:
        notes.append(f"Operators without a cost are missing from the prediction: {', '.join(uncovered)}.")
    return Report(
        target=name or step.name,
        mode="training" if train else "inference" if isinstance(target, nn.Module) else "callable",
        inputs=step.inputs,
        created=utc_now(),
        device={"kind": ceilings.kind, "name": ceilings.device},
        versions=dict(ceilings.versions),
        ceilings=ceilings.to_dict(),
        summary=summary,
        gaps=gaps,
        coverage=1 - sum(op.record.cost is None for op in working) / max(1, len(working)),
        ops=tuple(rows),
        modules=modules,
        advice=tuple(advise(Findings(operators, rows, summary, gaps, ceilings))),
        predicted=True,
        notes=tuple(notes),
    )


@dataclass(frozen=True)
class _CountedStep:
    """The counted operators of a step on fake tensors. This object refers to none of the fake tensors.

    Attributes:
        ended: the `FakeTensorMode` that made the fake tensors and has ended; None if the caller's mode is still active.
        emptied: see `fake_leftovers`.
    """

    name: str
    records: list[Record]
    tracker: ModuleTracker
    samples: int | None
    inputs: tuple[str, ...]
    ended: FakeTensorMode | None
    emptied: list[Any]


def _counted_step(
    target: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    kind: str,
    train: bool,
    optimizer: MakeOptimizer | None,
    loss: Callable[[Any], Tensor] | None,
    dtype: torch.dtype | None,
) -> _CountedStep:
    """Count a step on fake CPU tensors, with the operators that a device of this kind ("cpu", "cuda") would run.

    The caller runs this function in a copy of the context, so that changes of context variables are lost afterwards.
    """
    on_gpu = kind == "cuda"
    is_inside = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None
    with fake_tensors() as mode:
        fake_target, fake_args, fake_kwargs = _faked(target, args, kwargs, mode, dtype)
        stepper = None
        if optimizer is not None:
            with _Untouched(mode):  # it lets the optimizer read the value of a learning rate that is a tensor
                stepper = optimizer(p for p in _parameters(fake_target) if p.requires_grad)
            if stepper is None:
                raise TypeError(f"predict(optimizer={optimizer!r}): the function returned None, expected an optimizer")
        program = Program(fake_target, fake_args, fake_kwargs, train=train, optimizer=stepper, loss=loss)
        tracker = ModuleTracker(program.module)
        unchanged = left_as_they_were([target, loss, optimizer], logs=program.module is None)
        roots = [target, args, kwargs, optimizer, loss, [*copy_context().values()]]
        with (
            fakes_taken_out(roots, mode) as emptied,
            unchanged,
            _DataStays(),
            answered_without_values(),
            _Untouched(mode),
            counted_for(kind),
        ):
            if program.module is None or (train and (stepper is not None or loss is None)):
                # The first step creates the optimizer's state, or draws the gradients of the outputs.
                _counted(program, ModuleTracker(program.module), on_gpu)
            records = _counted(program, tracker, on_gpu)
    return _CountedStep(
        name=program.name,
        records=records,
        tracker=tracker,
        samples=program.samples,
        inputs=tuple(describe_tensor(t).replace(":", " ") for t in tensors_in([program.args, program.kwargs])),
        ended=None if is_inside else mode,
        emptied=emptied,
    )


def _works(record: Record) -> bool:
    return record.cost is None or record.cost.bytes > 0 or record.cost.total_flops > 0


@contextmanager
def fake_tensors() -> Iterator[FakeTensorMode]:
    """Within the block, make new tensors fake, without data. A model that is built inside the block takes no memory,
    however large it is."""
    active = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
    with (
        answered_without_values(),
        _errors_only_raised(),
        active if active is not None else FakeTensorMode(allow_non_fake_inputs=True) as mode,
    ):
        yield mode


@contextmanager
def _errors_only_raised() -> Iterator[None]:
    """Within the block, keep PyTorch from also logging the traceback of each error of an operator on fake tensors."""
    thread = threading.get_ident()
    logger = logging.getLogger(torch._subclasses.fake_tensor.__name__)

    def is_shown(record: logging.LogRecord) -> bool:
        return record.thread != thread or record.exc_info is None

    logger.addFilter(is_shown)
    try:
        yield
    finally:
        logger.removeFilter(is_shown)


def _counted(program: Program, tracker: ModuleTracker, on_gpu: bool) -> list[Record]:
    with program.preserved(), tracker, _DeviceCounting(tracker.locate) as counted:
        try:
            with as_on_gpu() if on_gpu else nullcontext():
                program.step()
        except Exception as error:
            cause = error.__cause__ or error
            looks = type(cause).__name__ in ("DataDependentOutputException", "DynamicOutputShapeException")
            # `.numpy()` and `.tolist()` raise "... not supported", C++ code that reads values "... not allocated yet"
            looks = looks or "() is not supported for tensor subclasses" in str(cause)
            if looks or "its data is not allocated yet" in str(cause):
                raise InputError(
                    f"{program.name} cannot be predicted: its operators depend on values ({cause}), and a prediction "
                    "has only shapes; analyze it on a real machine instead"
                ) from error
            if type(cause).__name__ == "UnsupportedFakeTensorException":
                raise InputError(
                    f"{program.name} cannot be predicted: PyTorch {torch.__version__} cannot compute the shapes of "
                    f"one of its operators ({cause}); analyze it on a real machine instead"
                ) from error
            raise
    return counted.records


class _DeviceCounting(CountingMode):
    """Count the device's work. Updates of an optimizer's step counters run on the host, so these updates are not
    counted. An operator counts as such an update if all its tensors are fake tensors with constant values.
    """

    def observe(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._locate()[1] == "optimizer":
            tensors = list(tensors_in([args, kwargs]))
            if tensors and all(isinstance(t, FakeTensor) and t.constant is not None for t in tensors):
                return func(*args, **kwargs)
        return super().observe(func, types, args, kwargs)


def _faked(
    target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], mode: FakeTensorMode, dtype: torch.dtype | None
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Copies of a model and its arguments, with fake tensors in place of real ones. A callable that is not a module is
    not copied (see `_Untouched`)."""
    try:
        with _FakeCopies(mode, dtype) as copies:
            fake_target = copies.of(target) if isinstance(target, nn.Module) else target
            return (
                fake_target,
                tuple(copies.of(arg) for arg in args),
                {name: copies.of(arg) for name, arg in kwargs.items()},
            )
    except Exception as error:  # copying an object runs its own code
        raise InputError(
            "the program cannot be predicted: copying the model and its inputs with fake tensors failed "
            f"({in_a_line(error)}); analyze it on a real machine instead"
        ) from error


def _fake(value: Tensor, mode: FakeTensorMode, dtype: torch.dtype | None) -> Tensor:
    """A fake CPU tensor in place of a real tensor.

    Raises:
        ValueError: the tensor is a lazy parameter, or is sparse, nested or quantized.
    """
    if is_lazy(value):
        raise ValueError("a lazy module's parameters have no shape before its first call: run the model once")
    if isinstance(value, nn.Parameter):
        parameter = nn.Parameter(_fake(value.detach(), mode, dtype), requires_grad=value.requires_grad)
        if value.requires_grad:
            for hook in (value._backward_hooks or {}).values():
                parameter.register_hook(hook)
            for hook in (value._post_accumulate_grad_hooks or {}).values():
                parameter.register_post_accumulate_grad_hook(hook)
        return parameter
    kind = dtype if dtype is not None and value.is_floating_point() else value.dtype
    if isinstance(value, FakeTensor) and value.device.type == "cpu" and value.dtype == kind:
        return value
    if value.layout != torch.strided or value.is_nested or value.is_quantized:
        kind_of = "sparse" if value.layout != torch.strided else "nested" if value.is_nested else "quantized"
        raise ValueError(f"times cannot be predicted with a {kind_of} tensor: pass dense ones")
    meta = torch.empty_strided(value.shape, value.stride(), dtype=kind, device="meta")
    fake: Tensor = FakeTensor(mode, meta, torch.device("cpu"))
    return fake.requires_grad_(value.requires_grad)


class _FakeCopies(TorchFunctionMode):
    """Copy objects, with fake tensors in place of real ones. An object to which several others refer is copied once.

    Floating-point parameters, buffers and arguments are cast to `dtype`; other tensors of a module are not, as with
    `nn.Module.to`.
    """

    def __init__(self, mode: FakeTensorMode, dtype: torch.dtype | None) -> None:
        super().__init__()
        self._mode, self._dtype = mode, dtype
        self._memo: dict[int, Any] = {}

    def of(self, value: Any) -> Any:
        """The copy of a model or of an argument. An argument may be any object that holds tensors.

        An object that contains no tensor and cannot be copied is returned unchanged.
        """
        held = Held([value], everything=True)
        objects = [value, *(each for container in held.containers for each in container.items)]
        self._memo.update((id(kept), kept) for each in objects for kept in _uncopied_in(each))
        modules = [value] if isinstance(value, nn.Module) else [each for each in objects if isinstance(each, nn.Module)]
        cast = [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
        if not isinstance(value, nn.Module):
            cast += held.tensors
        for tensor in cast:
            if id(tensor) not in self._memo:
                self._memo[id(tensor)] = _fake(tensor, self._mode, self._dtype)
        try:
            with torch.no_grad():  # TorchScript clones its tensors: a clone must not pass gradients to the real tensor
                made = copy.deepcopy(value, self._memo)
        except Exception:
            if cast:
                raise
            return value
        if isinstance(value, nn.Module):
            for real, fake in zip(value.parameters(), made.parameters(), strict=True):
                fake.requires_grad_(real.requires_grad)
        return made

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not Tensor.__deepcopy__:
            return func(*args, **(kwargs or {}))
        tensor, memo = args
        return memo.setdefault(id(tensor), _fake(tensor, self._mode, None))


def _uncopied_in(value: Any) -> list[Any]:
    """The parts of a value that are not copied: tensors whose values determine an object's shape (batch sizes, the
    blocks that a mask keeps), and random generators, because operators on fake tensors draw no random numbers.
    """
    if isinstance(value, torch.Generator):
        return [value]
    if isinstance(value, PackedSequence):
        return [value.batch_sizes]
    if isinstance(value, BlockMask):
        return [each for each in vars(value).values() if isinstance(each, Tensor)]
    return []


def _parameters(target: Any) -> Iterable[nn.Parameter]:
    return target.parameters() if isinstance(target, nn.Module) else ()


_SET_DATA: Any = Tensor.data.__set__  # type: ignore[attr-defined]


class _DataStays(TorchFunctionMode):
    """Refuse `tensor.data = ...` on a program's real tensor, because the old values could not be restored."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == _SET_DATA and not isinstance(args[0], FakeTensor):
            raise InputError(
                "the program cannot be predicted: it assigns to .data of a tensor that it holds, and a prediction "
                "would lose the values; analyze it on a real machine instead, or predict the module itself"
            )
        return func(*args, **(kwargs or {}))


class _Untouched(LightMode):
    """Keep a callable's real tensors unchanged.

    Operators get a fake twin of each real tensor: without twins, `FakeTensorMode` would run in-place operators on the
    real tensors. At the end of the block, gradients and the state of optimizers are restored.
    """

    supports_higher_order_operators = True  # else PyTorch raises an error at the first higher-order operator

    def __init__(self, mode: FakeTensorMode) -> None:
        super().__init__()
        self._mode = mode
        # id of a real tensor -> (real tensor, fake twin, gradient of the real tensor before the step)
        self._twins: dict[int, tuple[Tensor, Tensor, Tensor | None]] = {}
        self._states: dict[torch.optim.Optimizer, dict[Any, Any]] = {}
        self._hooks = ExitStack()
        self._scales = False  # whether the optimizer now in step() calls .item() on tensors only to scale its updates

    def __enter__(self) -> _Untouched:
        self._hooks.callback(register_optimizer_step_pre_hook(self._optimizer_entering).remove)
        self._hooks.callback(register_optimizer_step_post_hook(self._optimizer_leaving).remove)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._hooks.close()
        for real, _, gradient in self._twins.values():
            if real.is_leaf and real.grad is not gradient:
                real.grad = gradient
        for optimizer, state in self._states.items():
            optimizer.state.clear()
            optimizer.state.update(state)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # the excluded functions implement torch.tensor(...), for which `FakeTensorMode` itself makes the tensor fake
        if func not in self._mode.lift_fns:
            args, kwargs = tree_map_only(Tensor, self._twin, (args, kwargs))
        if func is torch.ops.aten._local_scalar_dense.default and self._scales and args[0].constant is None:
            return 1.0
        return RESULTS.get(func, func)(*args, **(kwargs or {}))

    def _twin(self, tensor: Tensor) -> Tensor:
        if isinstance(tensor, FakeTensor):
            return tensor
        if id(tensor) not in self._twins:
            fake: Tensor
            if _is_looked_at(tensor):
                with _disable_current_modes():
                    value = tensor.detach().clone()
                fake = self._mode.fake_tensor_converter.from_real_tensor(self._mode, value, make_constant=True)
            else:
                fake = _fake(tensor.detach(), self._mode, None)
            self._twins[id(tensor)] = (tensor, fake, tensor.grad if tensor.is_leaf else None)
        return self._twins[id(tensor)][1]

    def _optimizer_entering(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._scales = isinstance(optimizer, (torch.optim.Adafactor, torch.optim.ASGD))
        if optimizer not in self._states:
            self._states[optimizer] = {parameter: dict(state) for parameter, state in optimizer.state.items()}

    def _optimizer_leaving(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._scales = False


def _is_looked_at(tensor: Tensor) -> bool:
    """Whether the tensor may be one whose values PyTorch itself reads: an optimizer's step counter, or the batch sizes
    of packed sequences."""
    is_list_of_sizes = tensor.dim() == 1 and tensor.dtype == torch.int64
    return tensor.device.type == "cpu" and (tensor.numel() == 1 or is_list_of_sizes)
