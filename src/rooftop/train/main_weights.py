"""The weights that an optimizer steps: a model's own, or float32 copies where it computes in a narrow dtype.

In bfloat16 a weight has 8 bits: a step of less than 1/256 of it would be lost, and so would the small ones among the
gradients of several micro-batches. So both are kept in float32, and the model gets what the step makes, rounded.

Whatever somebody writes into the model, by whatever door, is training's from then on: where a weight of the model is
not its float32 copy rounded, the copy takes it over before the next step (`adopt`).

Source: Micikevicius et al. 2018, "Mixed Precision Training" (arXiv:1710.03740), section 3.1.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rooftop.parallel import ModelGradients
from rooftop.parallel.weight_places import WeightPlaces

Held = list[tuple[Tensor | None, Tensor | None]]
"""Of each weight the gradient in `.grad`, and the narrow one."""


class MainWeights:
    """Of a model in float32 or float64, which then computes in `dtype`.

    Args:
        model: gets the dtype, with the same parameters in it.
        dtype: bfloat16; or the one that it has, and nothing is copied.
        keep_narrow: leave a gradient as backward has made it, in `dtype`, until another is added to it or it is asked
            for in float32 (`widen`). That costs no precision, and `rooftop.train.AdamW` takes it so. What looks for
            gradients in `.grad`, such as `clip_grad_norm_` and `GradScaler`, needs `widen` first.

    Attributes:
        named: what the optimizer steps, by the model's names; tied ones once. Without `keep_narrow` their gradients are
            complete after each backward; with copies the model's own are gone by then.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype, *, keep_narrow: bool = False) -> None:
        own = dict(model.named_parameters())
        self.narrow = any(parameter.dtype != dtype for parameter in own.values())
        self.named = own
        self._places = WeightPlaces(model)
        self._gradients = _Gradients(keep_narrow)
        self._model_has: dict[Tensor, nn.Parameter] = {}
        if not self.narrow:
            return
        self.named = {
            name: nn.Parameter(parameter.detach().clone(), parameter.requires_grad) for name, parameter in own.items()
        }
        model.to(dtype)
        self._every: list[Tensor] = list(own.values())
        self._model_has = {self.named[name]: parameter for name, parameter in own.items()}
        self._main_of = {parameter: main for main, parameter in self._model_has.items()}
        self.synchronized()
        for name, parameter in own.items():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(_Moved(self._gradients, self.named[name]))

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.synchronized()  # the copies of tensors count what is written to them from 0 on

    @torch.no_grad()
    def publish(self) -> None:
        """Give the model what the optimizer has made.

        Raises:
            RuntimeError: somebody has put other tensors in the places of the model's parameters, or has written into a
                parameter after its backward and before this.
        """
        self._places.check("MainWeights.publish")
        if not self.narrow:
            return
        for name, main in self.named.items():
            if self._gradients.was_written(main) and self._gradients.model_was_written(main, self._model_has[main]):
                raise RuntimeError(
                    f"MainWeights.publish: both {name} of the model and its copy were written to: load before "
                    "backward, or call adopt() after loading"
                )
        torch._foreach_copy_(self._every, [*self.named.values()])
        self.synchronized()

    @torch.no_grad()
    def adopt(self, contents: bool = True) -> None:
        """Take over what somebody has written into the model, put in its parameters' places, or written into `named`.

        It is called before each step by what makes that, and need not be called otherwise.

        Args:
            contents: compare each of the model's weights with its copy; else only what costs no pass over them: whether
                a parameter is still in its place, and whether `named` were written to.

        Raises:
            RuntimeError: other tensors in the places of the model's parameters that cannot be taken over.
        """
        for own, found in self._places.take_back("MainWeights.adopt").items():
            main = self._main_of.get(own) if self.narrow else None
            if main is not None:
                main.copy_(found)  # it may be wider than the model
        if not self.narrow:
            return
        for main, own in self._model_has.items():
            if self._gradients.was_written(main):
                own.copy_(main)
            elif contents:
                adopt_into(main, own)
        if contents:
            self.synchronized()
        else:
            self._gradients.saw(self._model_has.items(), only_main=True)

    def before_step(self, contents: bool) -> None:
        """`adopt` between backward and the step, where it is too late for parameters that are not in their places.

        Raises:
            RuntimeError: some are not.
        """
        self._places.check("AdamW.step")
        self.adopt(contents)

    def synchronized(self) -> None:
        """Say that model and copies are the same now: a step has written both."""
        if self.narrow:
            self._gradients.saw(self._model_has.items())

    def step_adopts(self) -> None:
        """Say that an optimizer calls `before_step`: then backward does not look for what was written."""
        self._gradients.step_adopts = True

    def model_has(self, main: Tensor) -> nn.Parameter | None:
        """The model's own weight for one of `named`; None where that is it."""
        return self._model_has.get(main)

    def gradient_of(self, main: Tensor) -> Tensor | None:
        """The gradient of one of `named`, float32 or narrow; None if there is none."""
        return main.grad if main.grad is not None else self._gradients.narrow.get(main)

    def gradients_of(self, mains: Sequence[Tensor]) -> list[Tensor | None]:
        """Those of several of `named`."""
        narrow = self._gradients.narrow
        return [narrow.get(main) if main.grad is None else main.grad for main in mains]

    def widen(self, main: Tensor | None = None) -> None:
        """Make a gradient, or all of them, what `named` have in `.grad`."""
        for each in [*self._gradients.narrow] if main is None else [main]:
            self._gradients.widen(each)

    def add(self, main: Tensor, gradient: Tensor) -> None:
        """Add to the gradient of one of `named`, as backward does with that of the model's own; it may be kept.

        Raises:
            ValueError: it is of another shape, or no floating dtype.
        """
        if gradient.shape != main.shape or not gradient.is_floating_point():
            raise ValueError(
                f"MainWeights: a gradient must be floating and {tuple(main.shape)} as its weight is, got "
                f"{gradient.dtype} {tuple(gradient.shape)}"
            )
        self._gradients.add(main, gradient)

    def answer_for(self, gradients: ModelGradients) -> None:
        """Make these the gradients that are summed over ranks and clipped, in place of the model's own."""
        gradients.parameters = self.named
        gradients.gradient_of, gradients.widen = self.gradient_of, self.widen

    def held(self) -> Held:
        """All gradients as they lie now."""
        narrow = self._gradients.narrow
        return [(main.grad, narrow.get(main)) for main in self.named.values()]

    def hold(self, held: Held) -> None:
        """Make these the gradients again, in place of any others: a CUDA graph has written them anew."""
        narrow = self._gradients.narrow
        for main, (wide, of_model) in zip(self.named.values(), held, strict=True):
            main.grad = wide
            if of_model is None:
                narrow.pop(main, None)
            else:
                narrow[main] = of_model

    def forget_gradient(self, main: Tensor) -> None:
        """Let go of a narrow one; those in `.grad` are the optimizer's `zero_grad` to let go of."""
        self._gradients.narrow.pop(main, None)


class _Gradients:
    """Of main weights, as long as they are narrow; then they are in `.grad`. It knows nothing of the model, whose
    parameters have it in their hooks: Python would never find such a circle."""

    def __init__(self, keep_narrow: bool) -> None:
        self.keep_narrow = keep_narrow
        self.narrow: dict[Tensor, Tensor] = {}
        self.step_adopts = False
        self._versions: dict[Tensor, tuple[int, int]] = {}  # of a main weight and of the model's

    def saw(self, pairs: Iterable[tuple[Tensor, Tensor]], only_main: bool = False) -> None:
        """Main weights and the model's are as they shall be; what is written to them from now on is new."""
        for main, own in pairs:
            self._versions[main] = (main._version, self._versions[main][1] if only_main else own._version)

    def was_written(self, main: Tensor) -> bool:
        """Whether somebody wrote to it since `saw`; what goes past autograd, as `.data`, is not seen."""
        return self._versions[main][0] != main._version

    def model_was_written(self, main: Tensor, own: Tensor) -> bool:
        """The same of the model's weight."""
        return self._versions[main][1] != own._version

    def adopt(self, main: Tensor, own: Tensor) -> None:
        """Before the first gradient of a step, for an optimizer that does not know of narrow weights."""
        if self.step_adopts or main.grad is not None or main in self.narrow or self.was_written(main):
            return
        with torch.no_grad():
            adopt_into(main, own)
        self.saw([(main, own)])

    def add(self, main: Tensor, gradient: Tensor) -> None:
        if main.grad is None and main not in self.narrow:
            self.narrow[main] = gradient
            if not self.keep_narrow:
                self.widen(main)
            return
        self.widen(main)
        assert main.grad is not None
        with torch.no_grad():
            main.grad += gradient

    @torch.no_grad()
    def widen(self, main: Tensor) -> None:
        gradient = self.narrow.pop(main, None)
        if gradient is not None:
            main.grad = gradient.to(main.dtype)


class _Moved:
    """Moves a parameter's gradient to that of its copy."""

    def __init__(self, gradients: _Gradients, main: nn.Parameter) -> None:
        self.gradients, self.main = gradients, main

    def __call__(self, parameter: Tensor) -> None:
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None
        self.gradients.adopt(self.main, parameter)
        self.gradients.add(self.main, gradient)


def adopt_into(main: Tensor, own: Tensor) -> None:
    """Make a copy what the model has, wherever that is not the copy rounded. A GPU's host does not wait."""
    same = main.to(own.dtype) == own
    if main.device.type == "cpu" and bool(same.all()):
        return
    main.copy_(torch.where(same, main, own.to(main.dtype)))
