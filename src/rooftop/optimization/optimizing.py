"""`rooftop.optimize`: check the arguments, search, and measure the result once more."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from rooftop.errors import InputError
from rooftop.optimization.as_before import as_before
from rooftop.optimization.building import Builder
from rooftop.optimization.carried import check_nothing_is_carried
from rooftop.optimization.draws import Arguments, Draw, draws, in_words, key_of, of_shape, others, tensors_of
from rooftop.optimization.gate import Gate, check_taken
from rooftop.optimization.optimized import PLAN_VERSION, Optimized, OptimizedModule
from rooftop.optimization.outcomes import SEED, Step
from rooftop.optimization.requirements import check_arguments, check_drawn, check_shapes
from rooftop.optimization.searching import Progress, Search
from rooftop.rewrites import RULES, Candidate, Rule
from rooftop.rewrites.candidates import set_mode
from rooftop.user_paths import user_path
from rooftop.words import did_you_mean, in_a_line

GATE_SHARE = 0.25
"""Share of the budget for the original's results on special values, and for comparisons of doubtful results."""


def optimize(
    module: nn.Module,
    *args: Any,
    train: bool = False,
    loss: Callable[[Any], Tensor] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    shapes: Sequence[Sequence[int]] = (),
    rules: Sequence[str | Rule] | None = None,
    exact: bool = False,
    min_gain: float = 0.02,
    budget_s: float = 60.0,
    draw: Callable[[], tuple[Any, ...]] | None = None,
    plan: str | os.PathLike[str] | None = None,
    progress: Progress = lambda what, fraction: None,
    **kwargs: Any,
) -> Optimized:
    """Make a model faster: try each rule in the whole model, prove it, time it, and keep it if it saves time.

    The original does not change. The faster module shares the original's parameters and buffers, except where a kept
    rule computes new ones.

    Args:
        module: the model, on its device, in its dtype.
        *args, **kwargs: arguments of a typical call: tensors, numbers, and structures of them.
        train: True: optimize forward and backward in training mode. False: optimize forward in evaluation mode, without
            gradients.
        loss: computes the loss from the output. None: if only one output tensor requires a gradient, and it has one
            element, it is the loss; otherwise all outputs get fixed random gradients.
        optimizer: the optimizer of the step. A rule may replace this optimizer by a faster one. So create learning rate
            schedulers after this call, on `Optimized.optimizer`.
        shapes: other expected shapes of the first tensor argument. Other tensors with the same first dimension also get
            the new first dimension.
        rules: names of rules, or your own rules (`rooftop.rewrites.Rule`). None: all rules except those that lower the
            precision. With `plan`: your own rules that the plan names.
        exact: keep only rules whose results are identical bit for bit.
        min_gain: smallest measured gain for which a rule is kept, as a share of a step. Half of `min_gain` is enough
            if any gain was predicted.
        budget_s: time limit in seconds. Rules that do not fit in the time are listed as not tried.
        draw: a function that returns a tuple of other positional arguments, if values drawn from the given arguments
            are not valid. Keyword arguments stay the same.
        plan: a file of `Optimized.save`, whose rules are applied, proven and timed without a search.
        progress: called with (the current activity, fraction done).

    Raises:
        TypeError, ValueError: wrong arguments, or a model that cannot be optimized: hooks, several devices.
        InputError: the file of the plan cannot be read, has another version, or names unknown or conflicting rules.
        Exception: any error that the model raises on the given inputs.

    Example:
        >>> found = rooftop.optimize(model, x)
        >>> print(found)
        >>> y = found.module(x)
    """
    began = time.perf_counter()
    check_arguments(module, train, loss, optimizer, min_gain, budget_s, exact, progress)
    chosen, plan_of = (_rules(rules), None) if plan is None else _planned(plan, rules)
    step = Step(train, loss)
    generator = torch.Generator().manual_seed(SEED)
    given: Arguments = (args, kwargs)
    key_of(given)  # raises for values that a key cannot represent

    def fresh(like: Arguments = given) -> Draw:
        return drawn() if draw is not None else others(like, generator)

    def drawn(what: str = "") -> Draw:
        try:
            made = draw()  # type: ignore[misc]
        except Exception as error:
            raise ValueError(
                f"optimize: draw() raised {in_a_line(error)}: it must create arguments each time it is called"
            ) from error
        return Draw(what, (check_drawn(made), kwargs), needed="the arguments that draw() creates")

    with torch.inference_mode(False), torch.enable_grad(), as_before(module) as originals:
        set_mode(module, train)
        progress("the original's results", 0.0)
        claimed = _of_shapes(shapes, given, generator)
        tried = [*draws(given, generator), *claimed]
        if draw is not None:
            tried[1] = replace(tried[1], needed="")
            tried += [drawn(f"draw() {i + 1}") for i in range(2)]
        check_nothing_is_carried(module, step, tried[:2])
        twin = Candidate.of(module, None, train, tensors_of(given)).model  # a copy, because calls may change attributes
        check_taken(twin, step, tried)

        def gate() -> Gate:
            # draws with special values come last, because they are skipped if time is short
            in_order = sorted(tried, key=lambda each: each.special)
            return Gate.of(twin, step, in_order, GATE_SHARE * budget_s, exact, fresh)

        proven = [given, *(each.given for each in claimed)]

        def wrap(candidate: Candidate) -> OptimizedModule:
            # This records the train or eval mode of each module. Inside the `with` block, these are the modes of the
            # proofs.
            return OptimizedModule(module, candidate, proven)

        ends = began + budget_s
        builder = Builder(twin, optimizer, step, gate, given, ends, fresh, originals)
        search = Search(builder, min_gain, ends, progress, wrap)
        search.run(chosen, all_at_once=plan_of is not None)
        result = search.result()
        faster = wrap(result.candidate)
    found = Optimized(
        faster,
        result.candidate.optimizer if builder.changes_optimizer(result.candidate) else optimizer,
        search.changes_of(result.before_ms),
        result.before_ms,
        result.after_ms,
        result.noise,
        [known.draw.what for known in builder.gate.known] if builder.gate is not None else [],
        dict(builder.gate.dropped) if builder.gate is not None else {},
        [in_words(each) for each in proven],
        _surroundings(module, given, train),
        without_ms=result.without_ms,
    )
    if plan_of is not None:
        found.differs = _differences(plan_of.get("surroundings", {}), found.surroundings)
    return found


def _rules(given: Sequence[str | Rule] | None) -> list[Rule]:
    """The requested rules in the order of `RULES`; the user's own rules come last."""
    if given is None:
        return [rule for rule in RULES if not rule.opt_in]
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise TypeError(f"optimize: rules must be a list of names or rules, got {given!r}")
    by_name = {rule.name: rule for rule in RULES}
    for each in given:
        if not isinstance(each, Rule) and not (isinstance(each, str) and each in by_name):
            close = did_you_mean(str(each), list(by_name))
            if isinstance(each, type) and issubclass(each, Rule):
                raise TypeError(
                    f"optimize: rules must be names or rules, got the class {each.__name__}: pass {each.__name__}()"
                )
            raise ValueError(f"optimize: rules must be some of {', '.join(by_name)}, got {each!r}{close}")
    names = [each.name for each in given if isinstance(each, Rule) and each not in RULES]
    if any(not isinstance(name, str) or not name for name in names):
        raise TypeError("optimize: your own rules must have names")
    if twice := [name for name in names if name in by_name or names.count(name) > 1]:
        raise ValueError(f"optimize: two rules are named {twice[0]!r}: give each its own name")
    named = [rule for rule in RULES if rule.name in given or rule in given]
    return [*named, *(rule for rule in given if isinstance(rule, Rule) and rule not in RULES)]


def _of_shapes(shapes: Sequence[Sequence[int]], given: Arguments, generator: torch.Generator) -> list[Draw]:
    """Arguments of each requested shape, except the shape of the given arguments."""
    found = []
    for shape in check_shapes(shapes):
        if not tensors_of(given):
            raise ValueError("optimize: shapes were given, but no argument is a tensor")
        if shape != tuple(tensors_of(given)[0].shape):
            what = f"inputs of {in_words(of := of_shape(given, shape, generator))}"
            found.append(Draw(what, of, needed=f"{what}, which shapes= names"))
    return found


# ---- plans ---------------------------------------------------------------------------------------------------------


def _planned(path: str | os.PathLike[str], own: Sequence[str | Rule] | None) -> tuple[list[Rule], dict[str, Any]]:
    """(the rules of a plan, the plan).

    Args:
        own: the user's own rules, which the plan may name.

    Raises:
        InputError: the file is not a plan of this version, or it names unknown or conflicting rules.
        ValueError: `own` has rules of Rooftop.
    """
    mine = _rules(own) if own is not None else []
    if built_in := [rule.name for rule in mine if rule in RULES]:
        raise ValueError(
            f"optimize: with plan=, pass only rules that you wrote, got {', '.join(built_in)}: the plan names "
            "Rooftop's rules"
        )
    try:
        plan = json.loads(user_path(path).read_text(encoding="utf-8"))
        version, names, surroundings = plan["version"], plan["rules"], plan.get("surroundings", {})
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InputError(f"{path} is not a plan of rooftop.optimize ({type(error).__name__}: {error})") from error
    if version != PLAN_VERSION:
        raise InputError(f"{path} is a plan of version {version}, expected {PLAN_VERSION}: optimize and save again")
    if not isinstance(names, list) or not all(isinstance(n, str) for n in names):
        raise InputError(f"{path} is not a plan of rooftop.optimize: rules must be a list of names, got {names!r}")
    if not isinstance(surroundings, dict):
        raise InputError(
            f"{path} is not a plan of rooftop.optimize: surroundings must be an object, got {surroundings!r}"
        )
    by_name = {rule.name: rule for rule in (*RULES, *mine)}
    unknown = [name for name in names if name not in by_name]
    if unknown:
        raise InputError(
            f"{path} has the rule {unknown[0]!r}, which this version of Rooftop does not have: if it is your own, call "
            "rooftop.optimize(..., plan=..., rules=[...])"
        )
    rules = [by_name[name] for name in dict.fromkeys(names)]
    for kind in dict.fromkeys(rule.kind for rule in rules if rule.kind):
        same = [rule.name for rule in rules if rule.kind == kind]
        if len(same) > 1:
            raise InputError(f"{path} has the rules {' and '.join(same)}, which exclude each other: remove one")
    return rules, plan


def _surroundings(module: nn.Module, given: Arguments, train: bool) -> dict[str, str]:
    """What a plan file records of the run that found the plan: model, inputs, mode, device, and so on."""
    tensors = (*module.parameters(), *module.buffers(), *tensors_of(given))
    device = next((t.device for t in tensors), torch.device("cpu"))
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return {
        "model": type(module).__name__,
        "parameters": str(sum(p.numel() for p in module.parameters())),
        "inputs": in_words(given),
        "mode": "training" if train else "inference",
        "device": name,
        "threads": str(torch.get_num_threads()) if device.type == "cpu" else "",
        "torch": torch.__version__,
    }


def _differences(planned: dict[str, str], here: dict[str, str]) -> list[str]:
    return [
        f"{what}: {planned.get(what)} in the plan, {value} here"
        for what, value in here.items()
        if planned.get(what) != value
    ]
