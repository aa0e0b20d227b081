"""`rooftop.optimize`: kept changes are faster and correct, arguments stay unchanged, and wrong calls are refused."""

from __future__ import annotations

import copy
import json
import math
import re
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rooftop
from rooftop.errors import InputError
from rooftop.hardware.timing import Timing
from rooftop.launch import repeated_calls
from rooftop.models.vision.resnet import BasicBlock, ResNet
from rooftop.optimization import OptimizedModule
from rooftop.optimization.outcomes import Step, outcome_of
from rooftop.optimization.profiles import Profiles
from rooftop.optimization.rounds import Rounds
from rooftop.optimization.searching import Search
from rooftop.optimization.trial_order import TrialOrder
from rooftop.rewrites import RULES, Candidate, Compile, CompileBlocks, Rule, Times
from rooftop.rewrites.candidates import Call
from rooftop.rewrites.compiler_rules import counted_blocks, repeated_blocks

pytestmark = pytest.mark.usefixtures("clock")


class Faster(Rule):
    """A rule that skips the sleep of `Sleepy`, once or at each call."""

    trains = True

    def __init__(self, name: str = "faster") -> None:
        self.name = name

    def apply(self, candidate: Candidate) -> str:
        candidate.model.asleep_s = 0.0
        return "the sleep"


class Sleepy(nn.Module):
    """Two layers, a norm with statistics, and a sleep that a rule can take out."""

    def __init__(self) -> None:
        super().__init__()
        self.asleep_s: Any = 0.01
        self.layers = nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 3))

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        time.sleep(self.asleep_s)
        return self.layers(x) * scale  # type: ignore[no-any-return]


def sleepy(train: bool = False) -> Sleepy:
    torch.manual_seed(1)
    return Sleepy().train(train)


def state_of(model: nn.Module) -> list[Tensor]:
    return [t.detach().clone() for t in (*model.parameters(), *model.buffers())]


@pytest.mark.parametrize("train", [False, True])
def test_what_is_given_stays_as_it_was(train: bool) -> None:
    model, x = sleepy(not train), torch.randn(5, 6, requires_grad=True)
    x.grad = torch.ones_like(x)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1) if train else None
    before, state, given = state_of(model), torch.get_rng_state(), x.detach().clone()
    found = rooftop.optimize(
        model, x, train=train, optimizer=optimizer, rules=[Faster(), "fused-optimizer", "fold-norms"], scale=2.0
    )
    assert "faster" in found.kept
    assert all(torch.equal(a, b) for a, b in zip(state_of(model), before, strict=True))
    assert model.training is (not train)
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(x, given)
    assert torch.equal(x.grad, torch.ones_like(x))
    if optimizer is not None:
        assert not optimizer.state
        assert not optimizer.param_groups[0].get("fused")
    assert model.asleep_s == 0.01
    verdicts = {change.rule: (change.verdict, change.reason) for change in found.changes}
    refused = ("refused", "not for training") if train else ("refused", "not for inference")
    assert verdicts["fold-norms" if train else "fused-optimizer"] == refused


def test_a_training_with_it_is_the_same(tmp_path: Path) -> None:
    model, x, target = sleepy(True), torch.randn(5, 6), torch.randn(5, 3)
    other = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    plan = tmp_path / "plan.json"
    plan.write_text('{"version": 1, "rules": ["fused-optimizer", "faster"]}')
    found = rooftop.optimize(
        model,
        x,
        train=True,
        loss=lambda y: (y - target).square().mean(),
        optimizer=optimizer,
        plan=plan,
        rules=[Faster()],
    )
    assert found.kept == ["fused-optimizer", "faster"]
    assert found.optimizer is not None
    assert found.optimizer is not optimizer
    plain = torch.optim.AdamW(other.parameters(), lr=0.1, fused=True)
    for _ in range(4):
        for module, steps in ((found.module, found.optimizer), (other, plain)):
            steps.zero_grad()
            (module(x) - target).square().mean().backward()
            steps.step()
    assert not found.module.unproven
    for one, same in zip(state_of(model), state_of(other), strict=True):
        torch.testing.assert_close(one, same, rtol=1e-5, atol=1e-6)


def test_rules_by_plan_are_applied_without_a_search(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x, path = ResNet(BasicBlock, (1, 1, 1, 1)).eval(), torch.randn(2, 3, 32, 32), tmp_path / "plan.json"
    plan = {"version": 1, "rules": ["fold-norms", "channels-last"], "surroundings": {"torch": "1.0", "model": "ResNet"}}
    path.write_text(json.dumps(plan))
    found = rooftop.optimize(model, x, plan=path)
    assert found.kept == ["fold-norms", "channels-last"]
    assert f"torch: 1.0 in the plan, {torch.__version__} here" in found.differs
    assert not any("model" in each for each in found.differs)
    found.save(path)
    assert json.loads(path.read_text())["rules"] == ["fold-norms", "channels-last"]
    assert list(tmp_path.iterdir()) == [path]
    assert not rooftop.optimize(model, x, plan=path).differs
    with torch.no_grad():
        torch.testing.assert_close(found.module(x), model(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is not a plan of rooftop.optimize"),
        ("[]", "is not a plan of rooftop.optimize"),
        ('{"version": 9, "rules": []}', "version 9, expected 1"),
        ('{"version": 1, "rules": ["magic"]}', "'magic', which this version of Rooftop does not"),
        ("[" * 200_000, "is not a plan of rooftop.optimize (RecursionError"),
        (
            '{"version": 1, "rules": ["compile", "compile-blocks"]}',
            "compile and compile-blocks, which exclude each other",
        ),
    ],
)
def test_what_is_no_plan_is_refused(text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(InputError, match=re.escape(words)):
        rooftop.optimize(sleepy(), torch.randn(2, 6), plan=path)
    with pytest.raises(InputError, match="is not a plan"):
        rooftop.optimize(sleepy(), torch.randn(2, 6), plan=tmp_path / "none.json")


def test_without_time_nothing_is_tried_and_that_is_said() -> None:
    found = rooftop.optimize(sleepy(), torch.randn(2, 6), budget_s=1e-6)
    assert {change.verdict for change in found.changes} <= {"refused", "not tried", "no gain"}
    assert all(change.measured_ms is None for change in found.changes)
    assert "not tried" in {change.verdict for change in found.changes}
    assert not found.kept
    assert not found.checked, "no change was left to check"


def test_two_rules_of_one_kind_exclude_each_other() -> None:
    class Kind(Faster):
        kind = "sleep"

        def __init__(self, name: str, asleep_s: float) -> None:
            super().__init__(name)
            self.asleep_s = asleep_s

        def predicted_ms(self, times: Any) -> float:
            return self.asleep_s

        def apply(self, candidate: Candidate) -> str:
            assert candidate.model.asleep_s == 0.01, "the rule was applied on top of another one"
            candidate.model.asleep_s = self.asleep_s
            return "the sleep"

    found = rooftop.optimize(sleepy(), torch.randn(2, 6), rules=[Kind("short", 0.0), Kind("shorter", 0.004)])
    assert found.kept == ["short"]
    assert {change.rule: change.reason for change in found.changes} == {
        "short": "instead of shorter",
        "shorter": "short is faster",
    }
    assert found.module._own.candidate.changes.keys() == {"short"}


def test_a_keyboard_interrupt_at_the_end_says_what_was_learned(capsys: pytest.CaptureFixture[str]) -> None:
    def progress(what: str, done: float) -> None:
        if what == "the result":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        rooftop.optimize(sleepy(), torch.randn(2, 6), rules=[Faster("first")], progress=progress)
    assert "kept      first" in capsys.readouterr().out


def test_what_a_rule_of_the_user_returns_is_checked() -> None:
    class Refuses(Faster):
        def refusal(self, candidate: Candidate) -> Any:
            return True

    class Absent(Faster):
        def absent(self, times: Times) -> Any:
            return ""

    class Asks(Faster):
        def seconds(self, times: Times) -> Any:
            return "soon"

    class Unsure(Faster):
        def predicted_ms(self, times: Times) -> float:
            return math.nan

    rules = [Refuses("refuses"), Absent("absent"), Asks("asks"), Unsure("unsure"), Faster("first")]
    found = rooftop.optimize(sleepy(), torch.randn(2, 6), rules=rules)
    assert found.kept == ["first"]
    assert {change.rule: change.reason for change in found.changes if change.verdict == "failed"} == {
        "refuses": "TypeError: refusal of refuses must return a reason in words, or None, got True",
        "absent": "TypeError: absent of absent must return a reason in words, or None, got ''",
        "asks": "its prediction: ValueError: could not convert string to float: 'soon'",
        "unsure": "its prediction: ValueError: a time must be a number, got 0.0 s and nan ms",
    }
    assert "refuses" in str(found)


def test_an_estimate_that_fails_later_is_the_first_one() -> None:
    class Once(Faster):
        asked = 0

        def seconds(self, times: Times) -> float:
            self.asked += 1
            if self.asked > 1:
                raise RuntimeError("only once")
            return 0.0

    assert rooftop.optimize(sleepy(), torch.randn(2, 6), rules=[Once("once")]).kept == ["once"]


def test_a_keyboard_interrupt_says_what_was_learned(capsys: pytest.CaptureFixture[str]) -> None:
    class Interrupts(Faster):
        def apply(self, candidate: Candidate) -> str:
            raise KeyboardInterrupt

    model = sleepy(True)
    before = state_of(model)
    with pytest.raises(KeyboardInterrupt):
        rooftop.optimize(model, torch.randn(2, 6), rules=[Faster("first"), Interrupts("second")])
    assert "kept      first" in capsys.readouterr().out
    assert model.training
    assert all(torch.equal(a, b) for a, b in zip(state_of(model), before, strict=True))


def test_a_model_that_raises_says_its_own_error() -> None:
    model = sleepy(True)
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        rooftop.optimize(model, torch.randn(2, 7))
    assert model.training


WRONG: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "no module": (lambda: rooftop.optimize(len, 1), TypeError, "must be a torch.nn.Module, got builtin"),  # type: ignore[arg-type]
    "already optimized": (
        lambda: rooftop.optimize(rooftop.optimize(sleepy(), torch.randn(2, 6), rules=[]).module, torch.randn(2, 6)),
        TypeError,
        "already optimized",
    ),
    "a loss without training": (
        lambda: rooftop.optimize(sleepy(), torch.randn(2, 6), loss=Tensor.sum),
        ValueError,
        "pass train=True",
    ),
    "no loss": (
        lambda: rooftop.optimize(sleepy(), torch.randn(2, 6), train=True, loss=3),  # type: ignore[arg-type]
        TypeError,
        "must be a function of the output, got int",
    ),
    "another model's optimizer": (
        lambda: rooftop.optimize(
            sleepy(), torch.randn(2, 6), train=True, optimizer=torch.optim.SGD(sleepy().parameters(), lr=1)
        ),
        ValueError,
        "parameters that are not the module's",
    ),
    "a gain above all": (lambda: rooftop.optimize(sleepy(), min_gain=2), ValueError, "at least 0 and below 1"),
    "no time": (lambda: rooftop.optimize(sleepy(), budget_s=0), ValueError, "seconds above 0, got 0"),
    "no rule": (
        lambda: rooftop.optimize(sleepy(), torch.randn(2, 6), rules=["fold-norm"]),
        ValueError,
        "did you mean fold-norms",
    ),
    "a string of rules": (
        lambda: rooftop.optimize(sleepy(), torch.randn(2, 6), rules="compile"),
        TypeError,
        "must be a list of names",
    ),
    "no shape": (
        lambda: rooftop.optimize(sleepy(), torch.randn(2, 6), shapes=[(-1, 6)]),
        ValueError,
        "must be a shape such as",
    ),
    "a number for shapes": (
        lambda: rooftop.optimize(sleepy(), torch.randn(2, 6), shapes=[8]),  # type: ignore[list-item]
        ValueError,
        "must be a shape such as",
    ),
    "an object as argument": (
        lambda: rooftop.optimize(sleepy(), torch.randn(2, 6), scale=object()),
        TypeError,
        "must be tensors, numbers, strings and None",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_calls_are_refused(case: str) -> None:
    call, kind, words = WRONG[case]
    with pytest.raises(kind, match=words):
        call()


def test_a_model_with_hooks_is_refused_by_the_name_of_the_module() -> None:
    model = sleepy()
    model.layers[1].register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match=r"layers.1 \(BatchNorm1d\) has hooks"):
        rooftop.optimize(model, torch.randn(2, 6))


def test_a_model_that_cannot_be_copied_is_refused() -> None:
    model = sleepy()
    model.left = (number for number in [])
    with pytest.raises(TypeError, match="Sleepy cannot be copied"):
        rooftop.optimize(model, torch.randn(2, 6))


def test_with_dropout_masks_must_be_the_same() -> None:
    class Dropped(Sleepy):
        def __init__(self) -> None:
            super().__init__()
            self.dropout = nn.Dropout(0.3)
            self.doubly = False

        def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
            hidden = super().forward(x, scale)
            return self.dropout(hidden.double()).to(x.dtype) if self.doubly else self.dropout(hidden)

    class Doubly(Faster):
        def apply(self, candidate: Candidate) -> str:
            candidate.model.doubly = True
            return super().apply(candidate)

    class OtherMasks(Faster):
        def apply(self, candidate: Candidate) -> str:
            run = candidate.call

            def call(*args: Any, **kwargs: Any) -> Any:
                torch.rand(1)
                return run(*args, **kwargs)

            candidate.call = call
            return super().apply(candidate)

    torch.manual_seed(2)
    model, x = Dropped().train(), torch.randn(40, 6)
    for rule, verdict in ((Faster(), "kept"), (Doubly(), "kept"), (OtherMasks(), "refused")):
        (change,) = rooftop.optimize(model, x, train=True, rules=[rule]).changes
        assert change.verdict == verdict, change


def test_a_lower_precision_is_opt_in_and_held_to_the_original_in_it() -> None:
    class Lower(Faster):
        opt_in = True

        def apply(self, candidate: Candidate) -> str:
            run = candidate.call

            def call(*args: Any, **kwargs: Any) -> Any:
                with torch.autocast("cpu", torch.bfloat16):
                    return run(*args, **kwargs)

            candidate.call = call
            candidate.model.asleep_s = 0.004
            return "the whole model"

    class Wrong(Faster):
        def predicted_ms(self, times: Any) -> float:
            return -1.0  # one rule after the other

        def apply(self, candidate: Candidate) -> str:
            run = candidate.call
            candidate.call = lambda x: run(x) * 1.05
            return super().apply(candidate)

    x = torch.randn(5, 6)
    for rule, verdict in ((Lower("lower"), "kept"), (Wrong("wrong"), "refused")):
        found = rooftop.optimize(sleepy(), x, rules=[rule])
        assert found.changes[0].verdict == verdict
    found = rooftop.optimize(sleepy(), x, rules=[Lower("lower"), Wrong("wrong")])
    assert [change.verdict for change in found.changes] == ["kept", "refused"]
    assert "bf16-autocast" not in [change.rule for change in rooftop.optimize(sleepy(), x, budget_s=1).changes]


def test_a_scheduler_comes_after() -> None:
    model = sleepy(True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    found = rooftop.optimize(model, torch.randn(2, 6), train=True, optimizer=optimizer, rules=["fused-optimizer"])
    (change,) = found.changes
    assert "optimize before you create one" in change.reason


def test_names_of_rules_are_different_and_docs_name_each() -> None:
    names = [rule.name for rule in RULES]
    assert len(set(names)) == len(names)
    page = (Path(__file__).parents[2] / "docs" / "optimize.md").read_text(encoding="utf-8")
    assert not [name for name in names if f"`{name}`" not in page]


def test_blocks_that_repeat() -> None:
    def block() -> nn.Module:
        return nn.Sequential(nn.Linear(2, 2), nn.ReLU())

    layers = nn.ModuleList([block() for _ in range(4)])
    model = nn.ModuleDict({"layers": layers, "head": nn.Sequential(block(), nn.Linear(2, 2))})
    assert repeated_blocks(model) == list(layers)


def test_kinds_of_blocks() -> None:
    class Block(nn.Module):
        def __init__(self, place: int, shift: int, features: int = 4) -> None:
            super().__init__()
            self.layer_idx, self.shift, self.layer = place, shift, nn.Linear(features, features)

    equal = nn.Sequential(*(Block(i, 0) for i in range(6)))
    assert counted_blocks(equal) == (6, 1)
    assert counted_blocks(nn.Sequential(*(Block(i, i % 2) for i in range(6)))) == (6, 2)
    assert counted_blocks(nn.Sequential(*(Block(i, i % 2, 4 + i // 3) for i in range(6)))) == (6, 4)
    assert counted_blocks(nn.Sequential(nn.Linear(2, 2), nn.ReLU())) == (0, 0)
    endless: list[Any] = []
    endless.append(endless)
    for block in equal:
        block.endless = endless
    assert counted_blocks(equal) == (6, 1)
    calls = (Call(torch.ops.aten.relu.default, (), torch.device("cuda"), 600, 1.0),)
    few, many = Times(9.0, calls, blocks=(6, 1)), Times(9.0, calls, blocks=(6, 6))
    assert CompileBlocks().seconds(few) < Compile().seconds(few) < CompileBlocks().seconds(many)
    assert CompileBlocks().absent(Times(9.0, calls, blocks=(0, 0))) == "no block occurs repeatedly"


def test_a_module_with_a_list_of_tensors_and_integers() -> None:
    class Lookup(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(7, 4)
            self.asleep_s = 0.01

        def forward(self, words: list[Tensor], mask: Tensor | None = None) -> dict[str, Tensor]:
            time.sleep(self.asleep_s)
            found = [self.table(each) for each in words]
            return {"first": found[0], "sum": sum(each.sum() for each in found)}  # type: ignore[dict-item]

    model = Lookup().eval()
    words = [torch.tensor([1, 6, 2]), torch.tensor([[0, 5]])]
    found = rooftop.optimize(model, words, rules=[Faster()])
    assert found.kept == ["faster"]
    assert found.proven == ["3 int64, 1x2 int64"]
    with torch.no_grad():
        results = found.module(words)
    assert results.keys() == {"first", "sum"}
    assert isinstance(found.module, OptimizedModule)


def test_a_rule_that_finds_no_work_is_not_tried() -> None:
    class Idle(Faster):
        def absent(self, times: Times) -> str | None:
            assert times.calls
            return "there are no sums"

    class Broken(Faster):
        def absent(self, times: Times) -> str | None:
            raise ZeroDivisionError("of a rule")

    found = rooftop.optimize(sleepy(), torch.randn(5, 6), rules=[Idle("idle"), Broken("broken"), Faster()])
    verdicts = {change.rule: (change.verdict, change.reason) for change in found.changes}
    assert verdicts["idle"] == ("no gain", "there are no sums")
    assert verdicts["broken"][0] == "failed"
    assert "of a rule" in verdicts["broken"][1]
    assert found.kept == ["faster"]


@pytest.mark.parametrize(("saved", "verdict"), [(40, "kept"), (4, "no gain")])
def test_what_saves_memory_is_kept_although_it_is_slower(
    saved: int, verdict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Saves(Rule):
        name = "saves"
        trains = True
        saves_memory = True

        def apply(self, candidate: Candidate) -> str:
            candidate.model.asleep_s = 0.013
            return "all blocks"

    monkeypatch.setattr(Profiles, "_peak_bytes", lambda self, candidate: 100_000_000)
    monkeypatch.setattr(Profiles, "more_memory", lambda self, candidate, held: -saved * 1_000_000)
    found = rooftop.optimize(sleepy(True), torch.randn(5, 6), train=True, rules=[Saves()])
    (change,) = found.changes
    assert change.verdict == verdict
    assert change.measured_ms == pytest.approx(-3.0)
    assert verdict == "kept" or change.reason == "saves 4 of 100 MB, which is less than 10%"


class Kernel(Faster):
    """Calls something that the compiler leaves as it is."""

    opaque = True

    def apply(self, candidate: Candidate) -> str:
        candidate.model.asleep_s -= 0.004
        return "a kernel"


class Compiler(Faster):
    """Saves much without `Kernel`, and little or nothing with it."""

    kind = "compile"

    def __init__(self, alone_s: float, with_kernel_s: float) -> None:
        super().__init__("compiler")
        self.alone_s, self.with_kernel_s = alone_s, with_kernel_s

    def seconds(self, times: Times) -> float:
        return 0.01  # tried after the rules that apply at once

    def apply(self, candidate: Candidate) -> str:
        candidate.model.asleep_s = self.with_kernel_s if "kernel" in candidate.changes else self.alone_s
        return "the whole model"


@pytest.mark.parametrize(
    ("alone_s", "with_kernel_s", "kept"),
    [
        (0.001, 0.005, ["compiler"]),
        (0.0065, 0.003, ["kernel", "compiler"]),
        (0.0065, 0.0065, ["kernel"]),
        (0.02, 0.003, ["kernel"]),
    ],
)
def test_the_compiler_is_tried_instead_of_our_kernels_and_with_them(
    alone_s: float, with_kernel_s: float, kept: list[str]
) -> None:
    found = rooftop.optimize(sleepy(), torch.randn(2, 6), rules=[Kernel("kernel"), Compiler(alone_s, with_kernel_s)])
    assert sorted(found.kept) == sorted(kept)
    reasons = {change.rule: change.reason for change in found.changes}
    if kept == ["compiler"]:
        assert reasons == {"kernel": "compiler is faster", "compiler": "instead of kernel"}


def test_gains_are_predicted_from_the_best_so_far() -> None:
    class Halves(Faster):
        """A rule whose gain is half of the step, as predicted."""

        def __init__(self, name: str, kind: str = "") -> None:
            super().__init__(name)
            self.__dict__["kind"] = kind

        def predicted_ms(self, times: Times) -> float:
            return times.wall_ms / 2

        def apply(self, candidate: Candidate) -> str:
            candidate.model.asleep_s = (candidate.model.asleep_s - 1e-4) / 2
            return "half of the sleep"

    found = rooftop.optimize(sleepy(), torch.randn(2, 6), rules=[Halves("one"), Halves("two"), Halves("three")])
    assert found.kept == ["one", "two", "three"]
    for change in found.changes:
        assert change.measured_ms == pytest.approx(change.predicted_ms, rel=0.05)
    assert found.changes[1].predicted_ms == pytest.approx(found.changes[0].predicted_ms / 2, rel=0.05)


def test_a_compiler_is_predicted_from_a_step_without_our_kernels() -> None:
    walls: list[float] = []

    class Other(Forecast):
        def apply(self, candidate: Candidate) -> str:
            candidate.model.asleep_s -= 0.003
            return "another rule"

    class Halves(Compiler):
        def predicted_ms(self, times: Times) -> float:
            walls.append(times.wall_ms)
            return times.wall_ms / 2

        def apply(self, candidate: Candidate) -> str:
            candidate.model.asleep_s /= 2
            return "the whole model"

    class First(Kernel):
        def predicted_ms(self, times: Times) -> float:
            return 9.0

    rules = [First("kernel"), Other("other", 3.0), Halves(0.0, 0.0)]
    found = rooftop.optimize(sleepy(), torch.randn(2, 6), rules=rules)
    change = {each.rule: each for each in found.changes}["compiler"]
    assert [each.rule for each in found.changes] == ["kernel", "other", "compiler"]
    assert found.kept == ["kernel", "other", "compiler"]
    assert walls == pytest.approx([10.1, 7.1, 3.1]), "of the original, without the kernel, and with it"
    assert change.predicted_ms == pytest.approx(3.1 / 2)
    assert change.measured_ms == pytest.approx(3.0 / 2)


def test_a_profile_that_fails_stops_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*given: object) -> None:
        raise torch.OutOfMemoryError("of a profile")

    monkeypatch.setattr(Profiles, "note", fails)
    rules = [Kernel("kernel"), Faster("other"), Compiler(0.0001, 0.02)]
    monkeypatch.setattr(Faster, "apply", lambda self, candidate: setattr(candidate.model, "asleep_s", 0.005) or "it")
    with pytest.warns(RuntimeWarning, match="predicted from earlier times: .*of a profile"):
        found = rooftop.optimize(sleepy(), torch.randn(2, 6), rules=rules)
    assert found.kept == ["other", "compiler"]


def test_compilers_that_call_our_kernels_are_tried_once() -> None:
    applied: list[str] = []

    class Opaque(Compiler):
        opaque = True

        def __init__(self, name: str, alone_s: float) -> None:
            super().__init__(alone_s, alone_s)
            self.name = name

        def apply(self, candidate: Candidate) -> str:
            applied.append(self.name)
            return super().apply(candidate)

    found = rooftop.optimize(sleepy(), torch.randn(2, 6), rules=[Opaque("one", 0.005), Opaque("two", 0.008)])
    assert found.kept == ["one"]
    assert applied.count("two") == 1


def test_an_error_of_the_caller_s_progress_is_the_caller_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeated_calls, "wait", lambda seconds: False)

    def progress(what: str, fraction: float) -> None:
        if "C++" in what:
            raise ZeroDivisionError("of the caller")

    with pytest.raises(ZeroDivisionError, match="of the caller"):
        rooftop.optimize(sleepy(), torch.randn(2, 6), rules=[Kernel("kernel")], progress=progress)


def test_predictions_follow_a_host_that_becomes_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    slower, walls = [0.0], list[float]()
    forward = Sleepy.forward

    def on_a_slow_host(self: Sleepy, x: Tensor, scale: float = 1.0) -> Tensor:
        time.sleep(slower[0])
        return forward(self, x, scale)

    class Slows(Forecast):
        def apply(self, candidate: Candidate) -> str:
            slower[0] = 0.01
            return "the host"

    class Sees(Faster):
        def predicted_ms(self, times: Times) -> float:
            walls.append(times.wall_ms)
            return 1.0

    monkeypatch.setattr(Sleepy, "forward", on_a_slow_host)
    rooftop.optimize(sleepy(), torch.randn(2, 6), rules=[Slows("slows", 2.0), Sees("sees")])
    assert walls == [pytest.approx(10.1), pytest.approx(20.1)]


def test_the_gain_without_compiler_and_graphs_is_reported() -> None:
    found = rooftop.optimize(sleepy(), torch.randn(2, 6), rules=[Kernel("kernel"), Compiler(0.0065, 0.001)])
    assert found.kept == ["kernel", "compiler"]
    assert (found.before_ms, found.after_ms) == (pytest.approx(10.1), pytest.approx(1.1))
    assert found.without_ms == pytest.approx(6.1)
    assert "6.1 ms without compiler and graphs" in str(found)
    assert rooftop.optimize(sleepy(), torch.randn(2, 6), rules=[Kernel("kernel")]).without_ms is None


def test_a_disturbed_last_round_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    rounds: list[int] = []
    timed = Rounds.timed

    def disturbed(self: Rounds, candidates: dict[str, Candidate]) -> dict[str, Timing]:
        found = timed(self, candidates)
        if "after" in found:
            rounds.append(1)
            if len(rounds) == 2:
                found["after"] = replace(found["after"], median_ms=9 * found["before"].median_ms)
        return found

    monkeypatch.setattr(Rounds, "timed", disturbed)
    found = rooftop.optimize(sleepy(), torch.randn(2, 6), rules=[Faster()])
    assert found.kept == ["faster"]
    assert len(rounds) > 3
    assert found.after_ms == pytest.approx(0.1)


def test_a_model_that_its_checks_make_slower_is_the_original(monkeypatch: pytest.MonkeyPatch) -> None:
    class Saves(Faster):
        def apply(self, candidate: Candidate) -> str:
            candidate.model.asleep_s = 0.009
            return "a little"

    forward = OptimizedModule.forward

    def checked(self: OptimizedModule, *args: Any, **kwargs: Any) -> Any:
        time.sleep(0.002)
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(OptimizedModule, "forward", checked)
    found = rooftop.optimize(sleepy(), torch.randn(2, 6), rules=[Saves()])
    (change,) = found.changes
    assert (change.verdict, found.kept) == ("no gain", [])
    assert change.reason == "together they are slower: 11.1 ms, the original 10.1 ms"
    assert found.after_ms == found.before_ms


@pytest.mark.parametrize(("predicted_ms", "kept"), [(0.3, ["little"]), (0.1, ["little"]), (0.0, [])])
def test_a_gain_close_to_the_least_one_needs_a_prediction(predicted_ms: float, kept: list[str]) -> None:
    class Little(Faster):
        def predicted_ms(self, times: Times) -> float:
            return predicted_ms

        def apply(self, candidate: Candidate) -> str:
            candidate.model.asleep_s = 0.00985  # 1.5% of a step
            return "a little"

    assert rooftop.optimize(sleepy(), torch.randn(2, 6), rules=[Little("little")]).kept == kept


class Compiles(Faster):
    """A rule with the kind and the name of the compiler, which only changes the sleep.

    Args:
        with_others, alone: the sleep together with other rules (NaN: it raises), and without any.
    """

    kind = "compile"

    def __init__(self, with_others: float, alone: float) -> None:
        super().__init__("compile")
        self.with_others, self.alone = with_others, alone
        self.tried: list[frozenset[str]] = []

    def seconds(self, times: Times) -> float:
        return 1e-3  # tried after the rules that apply at once

    def apply(self, candidate: Candidate) -> str:
        others = frozenset(candidate.changes)
        self.tried.append(others)
        if others and math.isnan(self.with_others):
            raise RuntimeError("not with these")
        candidate.model.asleep_s = self.with_others if others else self.alone
        return "the whole model"


def shorter(name: str, asleep_s: float) -> Rule:
    class Shorter(Faster):
        def apply(self, candidate: Candidate) -> str:
            candidate.model.asleep_s = asleep_s
            return "the sleep"

    return Shorter(name)


def test_the_whole_model_is_also_compiled_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    own = [rule for rule in RULES if rule.name not in ("compile", "fold-norms")]
    monkeypatch.setattr("rooftop.optimization.optimizing.RULES", own)  # frees the names of the built-in rules
    rule = Compiles(with_others=0.006, alone=0.002)
    found = rooftop.optimize(sleepy(), torch.randn(2, 6), rules=[shorter("fold-norms", 0.0057), rule])
    assert rule.tried[:2] == [{"fold-norms"}, frozenset()]
    assert found.kept == ["compile"], found.changes
    assert {change.rule: change.reason for change in found.changes}["compile"] == "instead of fold-norms"
    rule = Compiles(with_others=torch.nan, alone=0.002)
    found = rooftop.optimize(sleepy(), torch.randn(2, 6), rules=[shorter("fold-norms", 0.0057), rule])
    assert found.kept == ["compile"], "the compiler fails together with other rules, so it is kept alone"
    rule = Compiles(with_others=0.009, alone=0.002)
    rooftop.optimize(sleepy(), torch.randn(2, 6), rules=[shorter("fold-norms", 0.0057), rule])
    assert frozenset() not in rule.tried, "much slower with the others, so it is not compiled again without them"


class HostAndDevice(Sleepy):
    """Sleeps as long as its host or its device takes, whichever takes longer."""

    fused = replayed = False

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        host_s = 0.0 if self.replayed else 0.015 if self.fused else 0.010
        time.sleep(max(host_s, 0.003 if self.fused else 0.008))
        return self.layers(x) * scale  # type: ignore[no-any-return]


class Sets(Faster):
    """Sets an attribute of the model; predicts this gain in ms."""

    def __init__(self, name: str, gain_ms: float) -> None:
        super().__init__(name)
        self.gain_ms = gain_ms

    def predicted_ms(self, times: Times) -> float:
        return self.gain_ms

    def apply(self, candidate: Candidate) -> str:
        setattr(candidate.model, self.name, True)
        return "the model"


def test_rules_that_the_host_held_up_are_tried_again_before_the_compiler() -> None:
    torch.manual_seed(1)
    before: list[set[str]] = []

    class Last(Compiler):
        def apply(self, candidate: Candidate) -> str:
            before.append(set(candidate.changes))
            return ""

    rules = [Sets("fused", 5.0), Sets("replayed", 1.0), Last(0.0, 0.0)]
    found = rooftop.optimize(HostAndDevice().eval(), torch.randn(2, 6), rules=rules)
    assert set(found.kept) == {"fused", "replayed"}, found.changes
    assert {"fused", "replayed"} in before, "the compiler starts from both"


def test_rules_that_the_host_held_up_are_tried_again_without_a_compiler() -> None:
    torch.manual_seed(1)
    rules = [Sets("fused", 5.0), Sets("replayed", 1.0)]
    found = rooftop.optimize(HostAndDevice().eval(), torch.randn(2, 6), rules=rules)
    assert set(found.kept) == {"fused", "replayed"}, found.changes


def test_trials_again_leave_the_time_of_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(1)
    monkeypatch.setattr(Search, "_left_s", lambda search: 60.0)
    tried: list[str] = []

    class Noted(Sets):
        def apply(self, candidate: Candidate) -> str:
            tried.append(self.name)
            return super().apply(candidate)

    class Long(Compiler):
        def seconds(self, times: Times) -> float:
            return 100.0

        def apply(self, candidate: Candidate) -> str:
            tried.append(self.name)
            return ""

    rules = [Noted("fused", 5.0), Noted("replayed", 1.0), Long(0.0, 0.0)]
    rooftop.optimize(HostAndDevice().eval(), torch.randn(2, 6), rules=rules)
    assert tried[: tried.index("compiler")].count("fused") == 1
    assert tried[tried.index("compiler") :].count("fused") > 0


def test_rules_are_tried_if_half_of_their_time_is_left() -> None:
    class Slow(Faster):
        def __init__(self, needed_s: float) -> None:
            super().__init__("slow")
            self.needed_s = needed_s

        def seconds(self, times: Times) -> float:
            return self.needed_s

    (change,) = rooftop.optimize(sleepy(), torch.randn(2, 6), rules=[Slow(30.0)], budget_s=20).changes
    assert change.verdict == "kept", change
    (change,) = rooftop.optimize(sleepy(), torch.randn(2, 6), rules=[Slow(60.0)], budget_s=20).changes
    assert change.verdict == "not tried"
    assert "of the budget were left, but about 60 s are needed" in change.reason


class Forecast(Faster):
    """A rule with a predicted gain in ms, and the seconds of its first call."""

    def __init__(self, name: str, gain_ms: float, needed_s: float = 0.0) -> None:
        super().__init__(name)
        self.gain_ms, self.needed_s = gain_ms, needed_s

    def predicted_ms(self, times: Times) -> float:
        return self.gain_ms

    def seconds(self, times: Times) -> float:
        return self.needed_s


def test_the_whole_model_is_compiled_before_its_blocks_if_there_is_time(monkeypatch: pytest.MonkeyPatch) -> None:
    class Part(Forecast):
        kind = "compile"

        def apply(self, candidate: Candidate) -> str:
            tried.append(self.name)
            return super().apply(candidate)

    tried: list[str]

    own = [rule for rule in RULES if "compile" not in rule.name]
    monkeypatch.setattr("rooftop.optimization.optimizing.RULES", own)
    expected = ((60.0, 15.0, "compile"), (60.0, 5.0, "compile-blocks"), (20.0, 15.0, "compile-blocks"))
    for budget_s, blocks_s, first in expected:
        tried = []
        rules = [Part("compile-blocks", 8.9, blocks_s), Part("compile", 9.0, 25.0)]
        rooftop.optimize(sleepy(), torch.randn(2, 6), rules=rules, budget_s=budget_s)
        assert tried[0] == first
    for needed_s, first in ((70.0, "compile"), (25.0, "other"), (250.0, "other")):
        rules = [Part("compile", 9.0, needed_s), shorter("other", 0.009)]
        found = rooftop.optimize(sleepy(), torch.randn(2, 6), rules=rules, budget_s=100.0)
        assert found.changes[0].rule == first, "if it is tried last, there may be no time"


def test_a_compilation_leaves_time_for_other_rules() -> None:
    compiles, blocks = Forecast("compile", 9.0, 15.0), Forecast("compile-blocks", 5.0, 2.0)
    quick, loses = Forecast("quick", 1.0), Forecast("loses", -1.0)
    times = Times(10.0, ())

    def limit(rule: Rule, *waiting: Rule, left_s: float = 20.0) -> tuple[float, str]:
        forecasts = {each.name: (each.seconds(times), each.predicted_ms(times)) for each in waiting}
        return TrialOrder(waiting, forecasts, times, 0.2, left_s).limit(rule, times, left_s)

    assert limit(compiles, quick) == (15.0, "the other rules")
    assert limit(compiles, quick, left_s=16.0) == (12.0, "the other rules"), "even if that is less than estimated"
    assert limit(compiles, loses) == (20.0, "")
    assert limit(blocks, compiles, quick) == (6.0, "compile")
    assert limit(blocks, compiles, left_s=10.0) == (10.0, ""), "the whole model does not fit anyway"


def test_a_compilation_comes_before_a_trial_after_which_there_is_no_time_for_it() -> None:
    whole, quick = Forecast("compile", 9.0, 15.0), [Forecast("first", 5.0), Forecast("second", 1.0)]
    times, gains = Times(10.0, ()), {"compile": 4.0, "second": 1.0}

    def after_the_first(left_s: float) -> tuple[Rule, tuple[float, str]]:
        rules = [whole, *quick]
        forecasts = {each.name: (each.seconds(times), each.predicted_ms(times)) for each in rules}
        order = TrialOrder(rules, forecasts, times, 0.2, 40.0, gain=lambda rule: gains[rule.name])
        first = order.take(times, 40.0)
        assert first is quick[0]
        order.note_trial(first, 12.0)
        following = order.peek(times, left_s)
        rule = order.take(times, left_s)
        assert rule is following
        return rule, order.limit(rule, times, left_s)

    assert after_the_first(28.0)[0] is quick[1], "there is time for both"
    assert after_the_first(26.0) == (whole, (26.0, "")), "it may take all the time"
    assert after_the_first(14.0)[0] is quick[1], "it is too late for the compilation"
    gains["compile"] = 0.5
    assert after_the_first(26.0)[0] is quick[1], "it would save less"


def test_a_search_compiles_before_there_is_no_time_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class Whole(Forecast):
        kind = "compile"

    own = [rule for rule in RULES if "compile" not in rule.name]
    monkeypatch.setattr("rooftop.optimization.optimizing.RULES", own)  # frees the name
    monkeypatch.setattr(Search, "_left_s", lambda search: 15.001)  # a trial takes longer than 1 ms
    rules = [Forecast("first", 5.0), Forecast("second", 1.0), Whole("compile", 9.0, 15.0)]
    found = rooftop.optimize(sleepy(), torch.randn(2, 6), rules=rules)
    assert [change.rule for change in found.changes][:3] == ["first", "compile", "second"], found.changes


def test_rules_that_wait_for_the_cpp_compiler_come_after_other_quick_rules(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiling, waited_s, said = [True], list[float](), list[str]()

    def wait(seconds: float) -> bool:
        if seconds > 0:
            waited_s.append(seconds)
        return not compiling

    monkeypatch.setattr(repeated_calls, "wait", wait)

    class OfKernels(Forecast):
        opaque = True

    kernels = [OfKernels("of kernels", 2.0), OfKernels("more", 1.5)]
    rules = [*kernels, Forecast("loses", -5.0), Forecast("other", 1.0), Forecast("compiles", 0.5, 1.0)]
    found = rooftop.optimize(
        sleepy(), torch.randn(2, 6), rules=rules, budget_s=20.0, progress=lambda what, _: said.append(what)
    )
    assert [change.rule for change in found.changes] == ["other", "of kernels", "more", "compiles", "loses"]
    assert "waiting for the C++ compiler" in said
    assert len(waited_s) == 1, "once, even if the compilation is not over"
    assert 0 < waited_s[0] < 20.0


def test_a_budget_may_be_infinite() -> None:
    found = rooftop.optimize(sleepy(), torch.randn(2, 6), rules=[Forecast("gains", 2.0)], budget_s=math.inf)
    assert [change.rule for change in found.changes] == ["gains"]


@pytest.mark.parametrize(("budget_s", "left_s"), [(1.0, 0.05), (60.0, 3.0)])
def test_a_search_leaves_time_for_its_end(budget_s: float, left_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[float] = []

    def run(search: Search, rules: object, all_at_once: bool) -> None:
        left.append(search._limit - search.ends)

    monkeypatch.setattr(Search, "run", run)
    rooftop.optimize(sleepy(), torch.randn(2, 6), rules=[Forecast("gains", 2.0)], budget_s=budget_s)
    assert 0.9 * left_s < left[0] < left_s + 1.0, "the end of a short search needs little more"


def test_a_predicted_loss_is_tried_last() -> None:
    rules = [Forecast("loses", -1.0), Forecast("compiles", 0.5, 1.0), Forecast("even", -0.05), Forecast("gains", 2.0)]
    found = rooftop.optimize(sleepy(), torch.randn(2, 6), rules=rules)
    assert [change.rule for change in found.changes] == ["gains", "even", "compiles", "loses"]


def test_a_kept_rule_whose_times_cannot_be_measured_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """The times are only for predictions. A failed measurement ended the search."""
    profiled = Profiles._times_of

    def fails(self: Profiles, candidate: Candidate, wall_ms: float) -> Times:
        if candidate.changes:
            raise RuntimeError("an operator refuses to be watched")
        return profiled(self, candidate, wall_ms)

    monkeypatch.setattr(Profiles, "_times_of", fails)
    with pytest.warns(RuntimeWarning, match="predicted from earlier times: RuntimeError: an operator refuses"):
        found = rooftop.optimize(sleepy(), torch.randn(2, 6), rules=[shorter("one", 0.005), shorter("two", 0.002)])
    assert found.kept == ["one", "two"]
    assert [change.measured_ms for change in found.changes] == pytest.approx([5.0, 3.0])


def test_times_of_changes_are_those_of_the_last_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine is half as fast while it is profiled. The kept rules once saved more time than a step took."""
    profiled = Profiles._times_of

    def twice_as_long(self: Profiles, candidate: Candidate, wall_ms: float) -> Times:
        times = profiled(self, candidate, wall_ms)
        return replace(times, wall_ms=2 * times.wall_ms)

    monkeypatch.setattr(Profiles, "_times_of", twice_as_long)
    monkeypatch.setattr(Profiles, "note_wall", lambda self, best_ms: None)
    found = rooftop.optimize(sleepy(), torch.randn(2, 6), rules=[shorter("one", 0.005), shorter("two", 0.002)])
    assert found.before_ms == pytest.approx(10.0, rel=0.05)
    assert [change.measured_ms for change in found.changes] == pytest.approx([5.0, 3.0], rel=0.05)


def test_gradients_have_the_strides_of_their_parameters() -> None:
    """Fused optimizers refuse others. `backward` would store them in the parameters' strides, too."""
    model: Any = nn.Conv2d(3, 4, 2)

    def call(x: Tensor) -> Tensor:
        weight = model.weight.contiguous(memory_format=torch.channels_last)
        return nn.functional.conv2d(x, weight, model.bias)

    x = torch.randn(2, 3, 5, 5).contiguous(memory_format=torch.channels_last)
    _, found = Step(True, lambda y: y.square().sum()).run(call, model, ((x,), {}))
    call(x).square().sum().backward()
    assert found["gradient of weight"].stride() == model.weight.stride()
    torch.testing.assert_close(found["gradient of weight"], model.weight.grad)


def test_reference_results_keep_no_graph_of_autograd() -> None:
    """A living graph ties parameters to its stream, so that captures on other streams fail."""
    model = sleepy(True)
    outcome = outcome_of(Step(True), model, model, ((torch.randn(5, 6),), {}))
    assert all(not result.requires_grad for result in outcome.results)
