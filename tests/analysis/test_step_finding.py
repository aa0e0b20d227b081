"""The ends of steps are found in programs that do not mark them: in each kind of loop, and in loops that change
midway."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from rooftop.analysis.step_finding import MOST_THREADS, Level, StepFinder

Calls = tuple[int, int]


class Told:
    """The reports of a finder: the steps since it last changed to a coarser marker, and all earlier steps."""

    def __init__(self) -> None:
        self.steps: list[Calls] = []
        self.whole: list[bool] = []
        self.earlier: list[int] = []
        self.begins = 0
        self.compiled = 0
        self.in_charge = True

    def work_begins(self, compiled: bool) -> None:
        self.begins += 1

    def work_goes_on(self) -> None:
        pass

    def leader_changes(self) -> None:
        self.earlier.append(len(self.steps))
        self.steps, self.whole = [], []

    def step_ends(self, calls: Calls, whole: bool) -> None:
        self.steps.append(calls)
        self.whole.append(whole)

    def compiles(self) -> None:
        self.compiled += 1


def found(program: Callable[[], Any]) -> tuple[Told, StepFinder]:
    told = Told()
    with StepFinder(told) as finder:
        program()
    return told, finder


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))


def loss_of(model: nn.Module, factor: float = 1.0) -> Tensor:
    value: Tensor = factor * model(torch.ones(2, 3)).sum()
    return value


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=1e-3)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, accumulated: int = 1) -> None:
    for _ in range(steps):
        for _ in range(accumulated):
            loss_of(model).backward()
        optimizer.step()
        optimizer.zero_grad()


def evaluate(model: nn.Module, calls: int) -> None:
    with torch.no_grad():
        for _ in range(calls):
            model(torch.ones(2, 3))


# ---- each kind of loop -------------------------------------------------------------------------------------------


def test_each_step_of_the_optimizer_ends_one() -> None:
    model = net()
    told, finder = found(lambda: train(model, sgd(model), 6))
    assert told.steps == [(0, 0)] + [(1, 1)] * 5  # before, calls and then backward passes marked the first step
    assert told.whole == [False] + [True] * 5
    assert (finder.level, told.begins) == (Level.OPTIMIZER, 1)


@pytest.mark.parametrize("scaled", [False, True])
def test_a_step_ends_after_the_optimizers_label(scaled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A label that begins under one profiler and ends under another writes to freed memory."""
    order: list[str] = []
    label = torch.autograd.profiler.record_function
    leave = label.__exit__

    def left(self: Any, *error: Any) -> None:
        leave(self, *error)
        if "Optimizer.step" in self.name:
            order.append("label")

    monkeypatch.setattr(label, "__exit__", left)

    class Ordered(Told):
        def step_ends(self, calls: Calls, whole: bool) -> None:
            order.append("step")

    model = net()
    optimizer, scaler = sgd(model), torch.amp.GradScaler("cpu", enabled=scaled)
    loss_of(model).backward()
    with StepFinder(Ordered()):
        for _ in range(3):
            scaler.scale(torch.ones(()))
            scaler.step(optimizer)
            scaler.update()
    assert order == ["label", "step"] * 3


class LabelsEachOperator(TorchDispatchMode):
    """Label operators as on a GPU, where the end of a label is an operator as well."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch.autograd.profiler.record_function("an operator"):
            return func(*args, **(kwargs or {}))


def test_a_step_does_not_end_inside_a_label_of_an_operator() -> None:
    depths: list[int] = []

    class Deep(Told):
        def step_ends(self, calls: Calls, whole: bool) -> None:
            depths.append(torch._C._len_torch_dispatch_stack())

    model = net()
    with StepFinder(Deep()), LabelsEachOperator():
        train(model, sgd(model), 3)
    assert set(depths) == {1}  # inside an operator the mode is not active


class Nested(torch.optim.Optimizer):
    """An optimizer that steps another optimizer, like sharpness-aware and look-ahead optimizers."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__([p for group in inner.param_groups for p in group["params"]], {})
        self.inner = inner

    def step(self, closure: Any = None) -> None:
        self.inner.step()
        self.inner.step()


def test_an_optimizer_that_steps_another_one_is_one() -> None:
    model = net()
    told, _ = found(lambda: train(model, Nested(sgd(model)), 4))
    assert told.whole == [False, True, True, True]


def test_after_an_optimizer_that_raised_steps_are_found_as_before() -> None:
    model = net()
    optimizer = sgd(model)

    def impossible() -> float:
        raise ArithmeticError("no loss")

    def program() -> None:
        train(model, optimizer, 2)
        with pytest.raises(ArithmeticError):
            optimizer.step(impossible)
        train(model, optimizer, 2)

    told, _ = found(program)
    assert len(told.steps) == 4


def test_an_optimizer_whose_hooks_raise_is_not_kept() -> None:
    model = net()

    def program() -> weakref.ref[Any]:
        optimizer = sgd(model)

        def impossible(*_: Any) -> None:
            raise ArithmeticError("no hook")

        loss_of(model).backward()
        hook = register_optimizer_step_post_hook(impossible)  # runs after ours
        try:
            with pytest.raises(ArithmeticError):
                optimizer.step()
        finally:
            hook.remove()
        return weakref.ref(optimizer)

    with StepFinder(Told()):
        optimizer = program()
        gc.collect()
        assert optimizer() is None


def test_who_takes_compile_by_its_name_keeps_no_finder() -> None:
    told = Told()
    finder = StepFinder(told)
    with finder:
        from torch import compile

        compile(lambda x: x)
    assert told.compiled == 1
    compile(lambda x: x)
    assert told.compiled == 1
    gone = weakref.ref(finder)
    del finder
    gc.collect()
    assert gone() is None


def test_micro_batches_are_one_step() -> None:
    model = net()
    told, _ = found(lambda: train(model, sgd(model), 5, accumulated=4))
    assert told.steps[1:] == [(4, 4)] * 4


@pytest.mark.parametrize("make", [torch.optim.LBFGS, torch.optim.SGD])
def test_forward_and_backward_in_a_closure_belong_to_the_optimizers_step(make: Callable[..., Any]) -> None:
    """LBFGS calls its closure several times; Lightning passes a closure to every optimizer."""
    model = net()
    optimizer = make(model.parameters(), lr=1e-3)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model).square()
        loss.backward()
        return loss

    told, finder = found(lambda: [optimizer.step(closure) for _ in range(4)])
    assert (len(told.steps), finder.level) == (4, Level.OPTIMIZER)
    assert all(modules == backwards >= 1 for modules, backwards in told.steps)
    assert told.earlier == []  # no call in the closure was counted as a step


def test_of_two_optimizers_the_first_leads() -> None:
    one, other = net(), net()
    optimizers = [sgd(one), sgd(other)]

    def gan() -> None:
        for _ in range(5):
            for model, optimizer in zip((one, other), optimizers, strict=True):
                train(model, optimizer, 1)

    told, _ = found(gan)
    assert told.steps[1:] == [(2, 2)] * 4


def test_an_optimizer_that_steps_once_for_several_of_another_leads() -> None:
    """A critic takes three training steps for each step of a generator."""
    critic, generator = net(), net()
    optimizers = sgd(critic), sgd(generator)

    def gan() -> None:
        for _ in range(6):
            train(critic, optimizers[0], 3)
            train(generator, optimizers[1], 1)

    told, _ = found(gan)
    # the critic's six steps before the generator's second step
    assert told.earlier[-1] == 6
    assert told.steps[1:] == [(4, 4)] * 4


def test_a_step_that_a_scaler_skips_is_a_step() -> None:
    model = net()
    optimizer, scaler = sgd(model), torch.amp.GradScaler("cpu", init_scale=2.0)
    stepped = []
    optimizer.register_step_post_hook(lambda *given: stepped.append(1))

    def loop() -> None:
        for step in range(6):
            scaler.scale(loss_of(model, float("inf") if step in (1, 3) else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

    told, _ = found(loop)
    assert len(stepped) == 4
    assert told.steps[1:] == [(1, 1)] * 5


@pytest.mark.parametrize(
    ("differentiate", "level"),
    [
        (lambda model: loss_of(model).backward(), Level.BACKWARD),
        (lambda model: torch.autograd.grad(loss_of(model), list(model.parameters())), Level.GRADIENT),
    ],
)
def test_weights_updated_by_hand(differentiate: Callable[[nn.Module], object], level: Level) -> None:
    model = net()
    told, finder = found(lambda: [differentiate(model) for _ in range(7)])
    assert (told.steps[1:], finder.level) == ([(1, 1)] * 6, level)


def test_matrices_alone_trained_by_hand() -> None:
    weight = torch.ones(3, 3, requires_grad=True)
    told, finder = found(lambda: [(torch.ones(2, 3) @ weight).sum().backward() for _ in range(7)])
    assert (told.steps, finder.level) == ([(0, 1)] * 7, Level.BACKWARD)


def test_inference_is_one_step_for_each_call_of_the_outermost_module() -> None:
    model = net()
    told, finder = found(lambda: evaluate(model, 15))
    assert (told.steps, finder.level) == ([(1, 0)] * 15, Level.CALL)


def test_modules_without_parameters_count_where_there_is_no_other() -> None:
    told, finder = found(lambda: [nn.ReLU()(torch.ones(3)) for _ in range(1)])
    assert (len(told.steps), finder.level) == (1, Level.BARE_CALL)
    model, scale = net(), nn.Softmax(dim=0)
    told, finder = found(lambda: [scale(model(torch.ones(2, 3))) for _ in range(5)])
    assert (told.steps, finder.level) == ([(1, 0)] * 5, Level.CALL)


def test_a_program_without_any_of_these_has_no_steps() -> None:
    told, finder = found(lambda: torch.ones(3) + 1)
    assert (told.steps, finder.level, finder.began_at) == ([], None, None)


# ---- programs that change or interfere ---------------------------------------------------------------------------


def test_evaluation_after_training_ends_no_step_of_it() -> None:
    model = net()
    optimizer = sgd(model)

    def program() -> None:
        train(model, optimizer, 4)
        evaluate(model, 9)
        train(model, optimizer, 4)

    told, _ = found(program)
    assert told.steps[1:4] + told.steps[5:] == [(1, 1)] * 6
    assert told.steps[4] == (10, 1)  # ten calls distinguish this step from the others


def test_a_program_that_evaluates_first_is_judged_by_its_training() -> None:
    model = net()
    optimizer = sgd(model)

    def program() -> None:
        evaluate(model, 5)
        train(model, optimizer, 4)

    told, finder = found(program)
    assert told.earlier[0] == 6  # five calls, and the call of the first training step
    assert (len(told.steps), finder.level) == (4, Level.OPTIMIZER)
    assert not told.whole[0]


def test_training_goes_on_with_a_new_optimizer() -> None:
    def program() -> None:
        for _ in range(2):
            model = net()
            train(model, sgd(model), 5)

    told, _ = found(program)
    assert len(told.steps) == 10
    assert told.whole == [False, *[True] * 4] * 2


def test_a_leading_optimizer_that_is_used_no_more_is_forgotten() -> None:
    first, second = net(), net()
    optimizers = sgd(first), sgd(second)

    def program() -> None:
        train(first, optimizers[0], 4)
        train(second, optimizers[1], 40)

    told, _ = found(program)
    assert 4 + 10 < len(told.steps) < 44
    assert told.steps[-3:] == [(1, 1)] * 3


def test_what_backward_computes_again_is_no_call() -> None:
    model = net()
    optimizer = sgd(model)

    def program() -> None:
        for _ in range(4):
            checkpoint(model, torch.ones(2, 3, requires_grad=True), use_reentrant=False).sum().backward()
            optimizer.step()

    told, _ = found(program)
    assert told.steps[1:] == [(1, 1)] * 3


def test_a_gradient_inside_a_module_ends_no_step() -> None:
    class Force(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.energy = net()

        def forward(self, x: Tensor) -> Tensor:
            x = x.requires_grad_()
            return torch.autograd.grad(self.energy(x).sum(), x)[0]

    model = Force()
    told, finder = found(lambda: [model(torch.ones(2, 3)) for _ in range(5)])
    assert (told.steps, finder.level) == ([(1, 1)] * 5, Level.CALL)


def test_other_threads_end_no_step_and_are_counted() -> None:
    model = net()
    optimizer = sgd(model)

    def elsewhere() -> None:
        evaluate(model, 3)
        train(model, optimizer, 2)

    def program() -> None:
        thread = threading.Thread(target=elsewhere, name="loader")
        thread.start()
        thread.join()
        evaluate(model, 2)

    told, finder = found(program)
    assert (told.steps, finder.level) == ([(1, 0)] * 2, Level.CALL)
    assert list(finder.threads) == ["loader"]


def test_threads_that_come_and_go_are_added_up() -> None:
    """A program may start new threads at each step."""
    model = net()

    def program() -> None:
        for number in range(MOST_THREADS + 9):
            thread = threading.Thread(target=evaluate, args=(model, 1), name=f"worker {number}")
            thread.start()
            thread.join()

    _, finder = found(program)
    assert list(finder.threads) == [*(f"worker {number}" for number in range(MOST_THREADS)), ""]
    assert min(finder.threads.values()) > 0


def test_nothing_is_told_to_a_watcher_that_is_not_in_charge() -> None:
    told, model = Told(), net()
    told.in_charge = False
    with StepFinder(told):
        train(model, sgd(model), 3)
    assert (told.steps, told.begins) == ([], 0)


def test_pytorch_is_as_it_was_afterwards() -> None:
    names = [
        (nn.Module, "__call__"),
        (torch, "compile"),
        (torch.autograd, "_engine_run_backward"),
        (torch.amp.GradScaler, "step"),
        (torch.autograd.profiler.record_function, "__exit__"),
    ]
    before = [getattr(*name) for name in names]
    told = Told()
    with StepFinder(told):
        assert torch.compile(net()) is not None
        assert all(getattr(*name) is not was for name, was in zip(names, before, strict=True))
    assert told.compiled == 1
    assert [getattr(*name) for name in names] == before
    model = net()
    train(model, sgd(model), 1)
    assert told.steps == []
