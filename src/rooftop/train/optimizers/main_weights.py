"""The weights that an optimizer updates: the model's own, or float32 copies if the model computes in a narrow dtype.

A bfloat16 number has 8 bits of precision. So a bfloat16 weight would lose every update of less than 1/512 of its
value, and a bfloat16 sum over micro-batches would lose small gradients. Therefore weights and gradients are kept in
float32, and the rounded result of each step is written to the model.

The user may write to the model at any time: the next step first finds the elements of the model's weights that differ
from the rounded float32 weights, and copies only these elements to the float32 weights (`adopt`).

Source: Micikevicius et al. 2018, "Mixed Precision Training" (arXiv:1710.03740), section 3.1.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rooftop.nn.fused_steps import notice_fused_steps
from rooftop.parallel import ModelGradients
from rooftop.parallel.weight_places import WeightPlaces

Held = list[tuple[Tensor | None, Tensor | None]]
"""For each weight: (the gradient in `.grad`, the narrow gradient, which has the model's dtype)."""


class MainWeights:
    """The main weights, float32 or float64, of a model that computes in `dtype`.

    Args:
        model: the model, which is converted to `dtype`; its parameters stay the same objects.
        dtype: bfloat16, or the model's dtype, for which no copies are needed.
        keep_narrow: keep a gradient in the `dtype` of backward until another gradient is added or `widen` is called.
            Narrow gradients lose no precision, and `rooftop.train.AdamW` accepts them. Before code such as
            `clip_grad_norm_` or `GradScaler` reads `.grad`, call `widen`.

    Attributes:
        named: the weights that the optimizer updates, by the model's names; tied weights appear once. Without
            `keep_narrow`, each backward adds this rank's gradients to `.grad` of the named weights, in the dtype of
            these weights. If the named weights are copies, backward releases the gradients of the model's own weights.
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
        notice_fused_steps([*self._every, *self.named.values()])
        self.synchronized()
        for name, parameter in own.items():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(_Moved(self._gradients, self.named[name]))

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self.narrow:
            notice_fused_steps([*self._every, *self.named.values()])
        self.synchronized()  # the version counters of new copies begin at 0 again

    @torch.no_grad()
    def publish(self) -> None:
        """Write the updated weights to the model.

        Raises:
            RuntimeError: other tensors have replaced the model's parameters, or both a parameter and its float32 copy
                were written to.
        """
        self._places.check("MainWeights.publish")
        if not self.narrow:
            return
        for name, main in self.named.items():
            if self._gradients.was_written(main) and self._gradients.model_was_written(main, self._model_has[main]):
                raise RuntimeError(
                    f"MainWeights.publish: {name} was changed both in the model and in its copy: load before "
                    "backward, or call adopt() after loading"
                )
        torch._foreach_copy_(self._every, [*self.named.values()])
        self.synchronized()

    @torch.no_grad()
    def adopt(self, contents: bool = True) -> None:
        """Copy values that the user wrote to the model into `named`, and values written to `named` into the model. A
        weight that was written in both takes the value in `named`. If a tensor has replaced a parameter of the model,
        copy its values into the parameter and into `named`, and put the parameter back.

        `GptTrainer` calls this before each step, so its users need not call it.

        Args:
            contents: whether to compare each weight of the model with its copy. If False, no weights are read: only
                check whether parameters were replaced and whether weights in `named` were written to.

        Raises:
            RuntimeError: a tensor that replaced a parameter cannot be adopted.
        """
        for own, found in self._places.take_back("MainWeights.adopt").items():
            main = self._main_of.get(own) if self.narrow else None
            if main is not None:
                main.copy_(found)  # the new tensor may have a wider dtype than the model
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
        """Call `adopt` between backward and the step. At this time a replaced parameter is not adopted, but raises an
        error.

        Raises:
            RuntimeError: a parameter was replaced.
        """
        self._places.check("AdamW.step")
        self.adopt(contents)

    def synchronized(self) -> None:
        """Record that the model's weights agree with the main weights. Call this after a step has written both."""
        if self.narrow:
            self._gradients.saw(self._model_has.items())

    def step_adopts(self) -> None:
        """Record that the optimizer calls `before_step`. The optimizer's step then adopts values that were written to
        the model, so backward need not look for such values."""
        self._gradients.step_adopts = True

    def model_has(self, main: Tensor) -> nn.Parameter | None:
        """The model's parameter for a main weight in `named`; None if the main weight is the parameter itself."""
        return self._model_has.get(main)

    def gradient_of(self, main: Tensor) -> Tensor | None:
        """The gradient of a main weight in `named`, in the dtype of the main weight or of the model; None if it has no
        gradient."""
        return main.grad if main.grad is not None else self._gradients.narrow.get(main)

    def gradients_of(self, mains: Sequence[Tensor]) -> list[Tensor | None]:
        """The gradient of each of these main weights, as from `gradient_of`."""
        narrow = self._gradients.narrow
        return [narrow.get(main) if main.grad is None else main.grad for main in mains]

    def widen(self, main: Tensor | None = None) -> None:
        """Convert the gradient of `main` to its dtype and store it in `.grad`; None: do so for all main weights."""
        for each in [*self._gradients.narrow] if main is None else [main]:
            self._gradients.widen(each)

    def add(self, main: Tensor, gradient: Tensor) -> None:
        """Add a tensor to the gradient of a weight in `named`, as backward does. The tensor may be kept without a copy.

        Raises:
            ValueError: the tensor does not have the shape of the weight, or is not floating point.
        """
        if gradient.shape != main.shape or not gradient.is_floating_point():
            raise ValueError(
                f"MainWeights: a gradient must be floating-point with its weight's shape {tuple(main.shape)}, got "
                f"{gradient.dtype} {tuple(gradient.shape)}"
            )
        self._gradients.add(main, gradient)

    def answer_for(self, gradients: ModelGradients) -> None:
        """Make a `ModelGradients` sum over ranks and clip the gradients of weights in `named`, not those of the model's
        parameters."""
        gradients.parameters = self.named
        gradients.gradient_of, gradients.widen = self.gradient_of, self.widen

    def held(self) -> Held:
        """List the current gradient tensors of all main weights, to pass to `hold` later."""
        narrow = self._gradients.narrow
        return [(main.grad, narrow.get(main)) for main in self.named.values()]

    def hold(self, held: Held) -> None:
        """Restore the gradient tensors that `held` returned, because a CUDA graph writes to them; drop all others."""
        narrow = self._gradients.narrow
        for main, (wide, of_model) in zip(self.named.values(), held, strict=True):
            main.grad = wide
            if of_model is None:
                narrow.pop(main, None)
            else:
                narrow[main] = of_model

    def forget_gradient(self, main: Tensor) -> None:
        """Release the gradient of a main weight that is still in the model's dtype. The optimizer's `zero_grad`
        releases the gradients in `.grad`."""
        self._gradients.narrow.pop(main, None)


class _Gradients:
    """The narrow gradients of main weights; wide gradients are in `.grad`.

    Hooks of the model's parameters refer to this object. So this object must not refer to the model, because Python
    cannot collect such a cycle.
    """

    def __init__(self, keep_narrow: bool) -> None:
        self.keep_narrow = keep_narrow
        self.narrow: dict[Tensor, Tensor] = {}
        self.step_adopts = False
        # for each main weight, its version and the version of the model's weight
        self._versions: dict[Tensor, tuple[int, int]] = {}

    def saw(self, pairs: Iterable[tuple[Tensor, Tensor]], only_main: bool = False) -> None:
        """Record the version counters of each pair: a main weight and the model's weight. Later writes to either count
        as new."""
        for main, own in pairs:
            self._versions[main] = (main._version, self._versions[main][1] if only_main else own._version)

    def was_written(self, main: Tensor) -> bool:
        """Whether a main weight was written to since `saw`.

        Writes that bypass autograd, such as `.data`, are not detected.
        """
        return self._versions[main][0] != main._version

    def model_was_written(self, main: Tensor, own: Tensor) -> bool:
        """Whether the model's weight was written to since `saw`."""
        return self._versions[main][1] != own._version

    def adopt(self, main: Tensor, own: Tensor) -> None:
        """Before the first gradient of a step, copy values that the user wrote to the model's weight into the main
        weight. Do nothing if the user wrote to the main weight too, or if the optimizer calls `before_step`: the
        step then copies these values."""
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
    """Hook of backward: moves the gradient of a model's parameter to its main weight, a copy in a wider dtype."""

    def __init__(self, gradients: _Gradients, main: nn.Parameter) -> None:
        self.gradients, self.main = gradients, main

    def __call__(self, parameter: Tensor) -> None:
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None
        self.gradients.adopt(self.main, parameter)
        self.gradients.add(self.main, gradient)


def adopt_into(main: Tensor, own: Tensor) -> None:
    """Copy those elements of a model's weight to the main weight that differ from the rounded main weight.

    The host does not wait for the GPU.
    """
    same = main.to(own.dtype) == own
    if main.device.type == "cpu" and bool(same.all()):
        return
    main.copy_(torch.where(same, main, own.to(main.dtype)))
