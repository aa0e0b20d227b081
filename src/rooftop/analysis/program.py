"""One step of the user's program, in a form that can be run repeatedly.

For a module the step is a forward pass without gradients. In training the step is forward, backward and, if an
optimizer is given, the optimizer's step. Any other callable is called directly. After the last run (the end of
`Program.preserved`), all changes by the steps are undone: in a module (buffers, gradients, train flags, and weights
that the given optimizer does not update), in the arguments, in the target's own state (see `given_objects`), and in the
random state.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import register_optimizer_step_pre_hook

from rooftop.analysis.compiled.finding import has_compiled_parts
from rooftop.analysis.given_objects import GivenObjects, repeats_elements
from rooftop.analysis.kept_weights import weights_kept
from rooftop.cost.accounting import tensors_in
from rooftop.errors import InputError, ModelRunError, RooftopError
from rooftop.hardware.source_lines import LIBRARIES
from rooftop.words import did_you_mean, first_line

IMAGE_CHANNELS = (1, 3, 4)


class Program:
    """A step that can be repeated.

    Args:
        target: a module or any callable.
        args, kwargs: arguments of the program, the same at every step.
        train: also run the backward pass. The loss is `loss(output)`. Without `loss`, an output of one element is the
            loss itself, and other outputs get fixed random gradients.
        optimizer: an optimizer, which steps after each backward pass and so changes the parameters.
        compile: compile the target with `torch.compile`: True, or one of its modes ("reduce-overhead").

    Raises:
        TypeError: `target` or `loss` is not callable, `optimizer` is not an optimizer or is LBFGS, or `train` is not a
            bool.
        ValueError: an optimizer or a loss is given without `train`, or the device is not supported.
    """

    def __init__(
        self,
        target: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        train: bool = False,
        optimizer: torch.optim.Optimizer | None = None,
        loss: Callable[[Any], Tensor] | None = None,
        compile: bool | str = False,
    ) -> None:
        if not callable(target):
            raise TypeError(f"expected a module or another callable, got {type(target).__name__}")
        if not isinstance(train, bool):
            raise TypeError(f"train={train!r}: expected True or False")
        if not train and (optimizer is not None or loss is not None):
            raise ValueError("optimizer=... and loss=... need train=True: without it there is no backward pass")
        if optimizer is not None and (isinstance(optimizer, type) or not hasattr(optimizer, "step")):
            raise TypeError(
                f"optimizer={optimizer!r}: expected an optimizer, e.g. torch.optim.SGD(model.parameters(), lr=0.1)"
            )
        if isinstance(optimizer, torch.optim.LBFGS):
            raise TypeError(
                "optimizer=LBFGS(...): its step calls the model itself, any number of times; analyze a loop of your "
                "own within rooftop.recording()"
            )
        if loss is not None and not callable(loss):
            raise TypeError(f"loss={loss!r}: expected a function of the output, e.g. lambda output: output.mean()")
        self.module = target if isinstance(target, nn.Module) else None
        self._name = type(target).__name__ if self.module is not None else getattr(target, "__name__", "callable")
        self.target = torch.compile(target, mode=_compile_mode(compile)) if compile else target
        self.args, self.kwargs = args, kwargs
        self.train = train
        self.optimizer = optimizer
        self._loss = loss
        self._output_gradients: list[Tensor] = []
        self._output_shapes: list[tuple[int, ...]] = []
        self._given: GivenObjects | None = None  # set inside `preserved`
        self.notes: list[str] = []
        if self.device.type not in ("cpu", "cuda"):
            raise ValueError(
                f"expected a program on a cpu or cuda device, but {self.name} or its input is on {self.device}: move "
                "both (model.to, for meta model.to_empty), or predict the program (rooftop.predict)"
            )

    @property
    def name(self) -> str:
        return self._name

    @property
    def compiled(self) -> bool:
        """Whether the target, or a part of it, is `torch.compile`d."""
        return has_compiled_parts(self.target)

    @property
    def device(self) -> torch.device:
        """The device of the first parameter or tensor argument on an accelerator. If no parameter or tensor argument is
        on an accelerator, the CPU."""
        tensors = [
            *(self.module.parameters() if self.module is not None else ()),
            *tensors_in([self.args, self.kwargs]),
        ]
        devices = [t.device for t in tensors]
        return next((d for d in devices if d.type != "cpu"), devices[0] if devices else torch.device("cpu"))

    @property
    def samples(self) -> int | None:
        """The number of samples of a step, from the first argument with tensors; None if unknown.

        A tensor has the samples in its first dimension. In a list, each tensor is one sample if the tensors differ in
        their first dimensions (sentences, point clouds) or are images (channels, height, width), as for detectors.
        Other lists hold parts of one batch (feature maps).
        """
        listed = self._listed_samples
        if listed is not None:
            return len(listed)
        return next((t.size(0) for t in tensors_in([self.args, self.kwargs]) if t.dim() > 0), None)

    @property
    def is_batched(self) -> bool:
        """Whether the samples of a step are in one tensor, so that more samples need no additional launches."""
        return self._listed_samples is None

    @property
    def _listed_samples(self) -> list[Tensor] | None:
        given = next((a for a in (*self.args, *self.kwargs.values()) if any(t.dim() for t in tensors_in(a))), None)
        tensors = list(tensors_in(given)) if isinstance(given, list) else []
        images = all(t.dim() == 3 and t.size(0) in IMAGE_CHANNELS for t in tensors)
        return tensors if tensors and (images or len({t.shape[:1] for t in tensors}) > 1) else None

    def step(self, observe: Callable[[Any], None] = lambda output: None) -> None:
        """Run the step once. Inside `preserved`, each run begins with the original arguments.

        Args:
            observe: called with the output of the target.

        Raises:
            ModelRunError: the user's code raised; the message names the program, its inputs and the line.
            InputError: no output can start a backward pass, or the output is a generator or a coroutine.
        """
        if self._given is not None:
            self._given.put_back()
        try:
            self._step(observe)
            if self._given is not None:
                self._given.look()
        except RooftopError:
            raise
        except (Exception, SystemExit) as error:  # an analyzed model must not end the analysis, even by `sys.exit`
            raise ModelRunError(self._explanation(error)) from error

    def _step(self, observe: Callable[[Any], None]) -> None:
        if not self.train:
            with torch.no_grad() if self.module is not None else nullcontext():
                output = self._output()
            observe(output)
            return
        output = self._output()
        observe(output)
        if self._loss is not None:
            _checked(self._loss(output)).backward()
        else:
            self._backward(output)
        if self.optimizer is not None:
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        elif self.module is not None:
            self.module.zero_grad(set_to_none=True)
        for tensor in self._leaves():
            tensor.grad = None

    def _output(self) -> Any:
        """Call the target. Generators and coroutines are refused: they run nothing before they are read."""
        output = self.target(*self.args, **self.kwargs)
        if isinstance(output, (Generator, Coroutine, AsyncGenerator)):
            if isinstance(output, Coroutine):
                output.close()  # without this, Python warns that the coroutine was never awaited
            raise InputError(
                f"the output of {self.name} is of type {type(output).__name__}, which runs nothing before it is read: "
                "pass a function that reads it to its end, e.g. lambda *inputs: list(model(*inputs))"
            )
        return output

    def _leaves(self) -> list[Tensor]:
        """The arguments that accumulate gradients."""
        return [t for t in tensors_in([self.args, self.kwargs]) if t.is_leaf and t.requires_grad]

    def _backward(self, output: Any) -> None:
        roots = [t for t in tensors_in(output) if t.requires_grad]
        if not roots:
            raise InputError(
                f"train=True, but no output of {self.name} requires a gradient: expected parameters or inputs that "
                "require a gradient, and no torch.no_grad() or torch.inference_mode() around the call"
            )
        if len(roots) == 1 and roots[0].numel() == 1:
            roots[0].backward()
            return
        shapes: list[tuple[int, ...]] = [() if t.is_nested else t.shape for t in roots]
        if shapes != self._output_shapes:
            self._output_shapes, self._output_gradients = shapes, [_random_like(t) for t in roots]
        torch.autograd.backward(roots, self._output_gradients)

    def _explanation(self, error: BaseException) -> str:
        inputs = ", ".join(describe_tensor(t) for t in tensors_in([self.args, self.kwargs])) or "no tensor"
        if isinstance(error, torch.cuda.OutOfMemoryError) or "can't allocate memory" in str(error):
            return f"{self.name} ran out of memory for inputs {inputs}: try a smaller batch. ({first_line(error)})"
        explained = f"{self.name} raised {type(error).__name__} for inputs {inputs}: {first_line(error)}{_place(error)}"
        if self.module is not None and not self.train and "does not require grad" in str(error):
            explained += (
                "; a module runs under torch.no_grad() unless it is trained: if its forward computes gradients, call "
                "torch.enable_grad() there, or pass a function that calls the module"
            )
        return explained

    @contextmanager
    def preserved(self) -> Iterator[None]:
        """Within the block, run the program in its train or eval mode. At the end, restore flags, buffers, gradients,
        arguments and random state, and the weights, except those that `optimizer` updates."""
        devices = [self.device] if self.device.type == "cuda" else []
        gradients = [(tensor, tensor.grad) for tensor in (*self._parameters(), *self._leaves())]
        for tensor, _ in gradients:
            tensor.grad = None
        self._given, lost = GivenObjects((self.args, self.kwargs), self.target), list[str]()
        try:
            with ExitStack() as stack:
                stack.enter_context(torch.random.fork_rng(devices))
                if self.module is not None:
                    stack.enter_context(weights_kept(self.module, self.optimizer, lost))
                stack.enter_context(_preserved(self.module, self.train))
                if self.module is not None:
                    stack.enter_context(_inner_optimizers_undone(self.optimizer))
                yield
        finally:
            self._given.put_all_back()
            self.notes, self._given = [*self._given.notes, *lost], None
            for tensor, gradient in gradients:
                tensor.grad = gradient

    def _parameters(self) -> Iterator[Tensor]:
        return self.module.parameters() if self.module is not None else iter(())


def _compile_mode(compile: bool | str) -> str | None:
    modes = torch._inductor.list_mode_options()
    if isinstance(compile, str) and compile not in modes:
        raise ValueError(
            f"compile={compile!r}: expected True or one of {', '.join(modes)}{did_you_mean(compile, modes)}"
        )
    return compile if isinstance(compile, str) else None


@contextmanager
def _preserved(module: nn.Module | None, train: bool) -> Iterator[None]:
    """Within the block, set the module to train or eval mode. At the end, restore its flags and buffers."""
    children = list(module.modules()) if module is not None else []
    flags = [(child, child.training) for child in children]
    buffers = [(child, dict(child._buffers)) for child in children]
    held = [buffer for _, named in buffers for buffer in named.values() if buffer is not None]
    values = [(buffer, buffer.clone()) for buffer in held if not (is_lazy(buffer) or repeats_elements(buffer))]
    try:
        if module is not None:
            module.train(train)
        yield
    finally:
        for child, flag in flags:
            child.training = flag
        for child, named in buffers:
            for name, buffer in named.items():  # TorchScript's modules lack `update`
                child._buffers[name] = buffer  # type: ignore[assignment]
        for value, before in values:
            with torch.inference_mode() if value.is_inference() else torch.no_grad():
                if not value.is_nested and value.shape != before.shape:
                    value.resize_(before.shape)
                value.copy_(before)


@contextmanager
def _inner_optimizers_undone(known: torch.optim.Optimizer | None) -> Iterator[None]:
    """Undo, at the end of the block, the steps of optimizers that a module itself runs (in hooks of its parameters,
    say).

    The caller did not request these steps. Steps of the optimizer that the caller passed stay.
    """
    before: dict[torch.optim.Optimizer, tuple[list[tuple[Tensor, Tensor]], dict[Any, Any]]] = {}

    def keep(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if optimizer is not known and optimizer not in before:
            weights = [weight for group in optimizer.param_groups for weight in group["params"]]
            values = [(weight, weight.detach().to("cpu", copy=True)) for weight in weights]
            before[optimizer] = values, {weight: _copied(state) for weight, state in optimizer.state.items()}

    handle = register_optimizer_step_pre_hook(keep)
    try:
        yield
    finally:
        handle.remove()
        with torch.no_grad():
            for optimizer, (values, states) in before.items():
                for weight, value in values:
                    weight.copy_(value)
                optimizer.state.clear()
                optimizer.state.update(states)


def _copied(state: dict[str, Any]) -> dict[str, Any]:
    return {name: part.clone() if isinstance(part, Tensor) else part for name, part in state.items()}


def _checked(loss: Any) -> Tensor:
    """Check that the loss is one number that requires a gradient, and return it."""
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
        found = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise InputError(f"loss must return one number that requires a gradient, got {found}")
    return loss


def _random_like(tensor: Tensor) -> Tensor:
    """Normal random numbers. PyTorch cannot draw them in dtypes of eight bits."""
    if tensor.element_size() > 1:
        return torch.randn_like(tensor)
    return torch.randn_like(tensor, dtype=torch.float32).to(tensor.dtype)


def describe_tensor(tensor: Tensor) -> str:
    """Shape and dtype as `--input` takes them: "8x3x224x224:float32". For a nested tensor without a shape:
    "nested:float32".
    """
    strided = not tensor.is_nested or tensor.layout != torch.strided
    shape = ("x".join(str(size) for size in tensor.shape) or "scalar") if strided else "nested"
    return f"{shape}:{str(tensor.dtype).removeprefix('torch.')}"


def _place(error: BaseException) -> str:
    """ " (file:line)" of the innermost call in the user's own code (outside torch and Rooftop); "" if there is none."""
    place, trace = "", error.__traceback__
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if not file.startswith(LIBRARIES):
            place = f" ({file}:{trace.tb_lineno})"
        trace = trace.tb_next
    return place
