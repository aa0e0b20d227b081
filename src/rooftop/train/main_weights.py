"""The weights that an optimizer steps: a model's own, or float32 copies where it computes in a narrow dtype.

In bfloat16 a weight has 8 bits: a step of less than 1/256 of it would be lost, and so would the small ones among the
gradients of several micro-batches. So both are kept in float32, and the model gets what the step makes, rounded.

Source: Micikevicius et al. 2018, "Mixed Precision Training" (arXiv:1710.03740), section 3.1.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from rooftop.parallel import ModelGradients

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
        for name, parameter in own.items():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(_Moved(self._gradients, self.named[name]))

    @torch.no_grad()
    def publish(self) -> None:
        """Give the model what the optimizer has made."""
        if self.narrow:
            torch._foreach_copy_(self._every, [*self.named.values()])

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
        self.gradients.add(self.main, gradient)
