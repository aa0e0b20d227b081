"""The faster module runs the proven change, and the original for all other calls. In all else, it behaves like the
original."""

from __future__ import annotations

import copy
import io
import json
import os
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.utils import prune

from rooftop.optimization import Optimized, OptimizedModule, optimize
from rooftop.rewrites import Candidate, FoldNorms
from rooftop.rewrites.splitting import OtherPathError

Proven = Callable[..., Optimized]
X = torch.randn(4, 6)


def made(train: bool = False, frozen: bool = False) -> tuple[nn.Sequential, OptimizedModule, list[str]]:
    """A model, the module that replaces it, and a list to which the faster model appends a word at each call."""
    model = nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3)).train(train)
    candidate, calls = Candidate.of(model, None, train), list[str]()
    run = candidate.call
    candidate.frozen = frozen

    def call(*args: Any, **kwargs: Any) -> Any:
        calls.append("faster")
        return run(*args, **kwargs)

    candidate.call, candidate.changes = call, {"counts": "the whole model"}
    return model, OptimizedModule(model, candidate, [((X,), {})]), calls


def ran(module: OptimizedModule, calls: list[str], x: Tensor = X) -> str:
    """Which model ran, and why."""
    calls.clear()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        module(x)
    words = [str(each.message) for each in said]
    assert len(words) <= 1
    return "faster" if calls else words[0] if words else "the original, silently"


def test_proven_calls_run_the_faster_model() -> None:
    model, module, calls = made()
    with torch.no_grad():
        assert torch.equal(module(X), model(X))
    with torch.inference_mode():
        assert ran(module, calls) == "faster"
    assert module.unproven == {}


def test_if_nothing_was_kept_all_calls_run_the_original() -> None:
    model = nn.Sequential(nn.Linear(6, 3))
    module = OptimizedModule(model, Candidate.of(model, None, False), [((X,), {})])
    model[0].register_forward_hook(lambda *_: torch.zeros(()))
    assert torch.equal(module(torch.randn(2, 6)), torch.zeros(()))
    assert module.unproven == {}


def test_calls_are_told_apart_by_values_types_and_names() -> None:
    class Scales(nn.Module):
        def forward(self, x: Tensor, scale: float | bool = 2, other: Tensor | None = None) -> Tensor:
            return x * scale

    model = Scales().eval()
    candidate = Candidate.of(model, None, False)
    candidate.changes = {"nothing": "the whole model"}
    module = OptimizedModule(model, candidate, [((X,), {"scale": 1})])
    calls: tuple[tuple[tuple[Any, ...], dict[str, Any]], ...] = (
        ((X,), {"scale": True}),
        ((X,), {"scale": 2}),
        ((X,), {"scale": 1.0}),
        ((X,), {"scale": 1, "other": X}),
        ((X, 1), {}),
        ((X.double(),), {"scale": 1}),
    )
    for _ in range(2):
        module(X, scale=1)
        assert module.unproven == {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for args, kwargs in calls:
            module(*args, **kwargs)
    assert sum(module.unproven.values()) == len(calls)


def test_others_run_the_original_which_is_said_once_and_counted() -> None:
    model, module, calls = made()
    assert "gradients are on: call it under torch.no_grad()" in ran(module, calls)
    assert ran(module, calls) == "the original, silently"
    with torch.no_grad():
        assert "not proven for 5x6 float32" in ran(module, calls, torch.randn(5, 6))
        with torch.autocast("cpu", torch.bfloat16):
            assert "autocast is on" in ran(module, calls)
        model.train()
        assert "it is in training mode" in ran(module, calls)
        model.eval()
        assert ran(module, calls) == "faster"
    assert sum(module.unproven.values()) == 5
    assert len(module.unproven) == 4


def test_for_training_gradients_must_be_on() -> None:
    model, module, calls = made(train=True)
    assert ran(module, calls) == "faster"
    with torch.no_grad():
        assert "gradients are off" in ran(module, calls)
    module.eval()
    assert not model.training
    assert "it is in evaluation mode" in ran(module, calls)
    module.train()
    assert ran(module, calls) == "faster"


def test_changed_weights_are_noticed_where_a_rule_used_them() -> None:
    for frozen in (False, True):
        model, module, calls = made(frozen=frozen)
        with torch.no_grad():
            assert ran(module, calls) == "faster"
            model[0].weight.mul_(2)
            result = ran(module, calls)
            assert result == "faster" if not frozen else "its weights were changed" in result
            assert torch.equal(module(X), model(X))


def test_weights_given_another_memory_are_noticed() -> None:
    model, module, calls = made(frozen=True)
    model[0].weight.data = torch.ones(3, 6)
    with torch.no_grad():
        assert "its weights were changed" in ran(module, calls)


def test_hooks_that_come_later_are_noticed() -> None:
    model, module, calls = made()
    other = nn.Linear(2, 2)
    other.register_forward_hook(lambda *_: None)
    with torch.no_grad():
        assert ran(module, calls) == "faster"
        handle = model[0].register_forward_hook(lambda *_: seen.append(1))
        seen: list[int] = []
        assert "hooks were registered" in ran(module, calls)
        assert seen == [1]
        handle.remove()
        assert ran(module, calls) == "faster"


def test_it_stands_for_the_original() -> None:
    model, module, _ = made()
    assert list(module.state_dict()) == list(model.state_dict())
    assert [name for name, _ in module.named_parameters()] == [name for name, _ in model.named_parameters()]
    assert [*map(id, module.parameters())] == [*map(id, model.parameters())]
    assert [*map(id, module.buffers())] == [*map(id, model.buffers())]
    assert module.original is model
    assert module.append == model.append
    with pytest.raises(AttributeError, match="nothing_of_that_name"):
        _ = module.nothing_of_that_name
    module.load_state_dict({name: torch.zeros_like(t) for name, t in model.state_dict().items()})
    assert not model[0].weight.any()


def test_replaced_weights_moved_and_cast_models_are_noticed() -> None:
    model, module, calls = made()
    module.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
    with torch.no_grad():
        assert "its weights were replaced" in ran(module, calls)
    model, module, calls = made()
    module.double()
    assert model[0].weight.dtype == torch.float64
    with torch.no_grad():
        assert "moved or cast" in ran(module, calls, X.double())


def test_a_copy_is_one_of_the_original_and_none_is_pickled() -> None:
    model, module, _ = made()
    same = copy.deepcopy(module)
    assert type(same) is nn.Sequential
    assert same[0].weight is not model[0].weight
    for dump in (pickle.dumps, lambda it: torch.save(it, io.BytesIO())):
        with pytest.raises(TypeError, match="save its state_dict and the plan"):
            dump(module)


def test_gradients_reach_the_original_and_data_parallel_sums_them() -> None:
    model, module, calls = made(train=True)
    module(X).sum().backward()
    assert calls == ["faster"]
    assert all(p.grad is not None for p in model.parameters())


class Scaled(nn.Module):
    """A layer with a number, a tensor and a module that PyTorch does not register."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.number, self.scale, self.others = nn.Linear(6, 3), 2.0, torch.ones(3), [nn.Linear(3, 3)]

    def forward(self, x: Tensor) -> Tensor:
        return self.others[0](self.layer(x)) * self.scale * self.number  # type: ignore[no-any-return]


CHANGES: dict[str, Callable[[Any], object]] = {
    "a number": lambda model: setattr(model, "number", 3.0),
    "a tensor": lambda model: setattr(model, "scale", torch.zeros(3)),
    "a module": lambda model: setattr(model, "layer", nn.Linear(6, 3)),
    "a parameter": lambda model: setattr(model.layer, "bias", nn.Parameter(torch.ones(3))),
    "a part more": lambda model: model.add_module("more", nn.Identity()),
    "pruned": lambda model: prune.random_unstructured(model.layer, "weight", 0.5),
    "cast": lambda model: model.layer.double() and model.layer.float(),
    "mode of a part": lambda model: model.layer.train(),
}


@pytest.mark.parametrize("through", ["the original", "the faster module"])
@pytest.mark.parametrize("change", CHANGES)
def test_what_is_replaced_afterwards_is_noticed(proven: Proven, change: str, through: str) -> None:
    model = Scaled().eval()
    found = proven(model, X)
    CHANGES[change](found.module if through == "the faster module" else model)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert torch.equal(found.module(X), model(X))
    if change != "cast":  # the model has the same objects again
        assert sum(found.module.unproven.values()) == 1


def test_values_of_tensors_that_are_no_parameters_are_shared(proven: Proven) -> None:
    model = Scaled().eval()
    found = proven(model, X)
    with torch.no_grad():
        model.scale.mul_(2)
        model.others[0].weight.mul_(2)
        assert torch.equal(found.module(X), model(X))
    assert not found.module.unproven


def test_a_cast_original_is_noticed(proven: Proven) -> None:
    model, words = nn.Sequential(nn.Embedding(5, 4)).eval(), torch.randint(5, (3,))
    found = proven(model, words)
    model.half()
    with torch.no_grad(), pytest.warns(RuntimeWarning, match="moved or cast"):
        assert found.module(words).dtype == torch.float16


def test_transforms_and_traces_take_the_original(proven: Proven) -> None:
    model = nn.Sequential(nn.Linear(6, 3)).eval()
    found = proven(model, X)
    zeros = {name: torch.zeros_like(p) for name, p in found.module.named_parameters()}
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert not torch.func.functional_call(found.module, zeros, X).any()
        assert torch.equal(torch.vmap(found.module)(X[None]), model(X)[None])
        with forward_ad.dual_level():
            assert forward_ad.unpack_dual(found.module(forward_ad.make_dual(X, X))).tangent is not None
        assert torch.equal(torch.jit.trace(found.module, (X,))(X), model(X))
        reasons = " ".join(found.module.unproven)
        assert torch.equal(torch.export.export(found.module, (X,)).module()(X), model(X))
    for words in ("was replaced", "torch.func", "forward-mode", "traced"):
        assert words in reasons


def test_norms_that_were_frozen_stay_frozen(proven: Proven) -> None:
    model = nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3)).train()
    model[1].eval()
    found = proven(model, X, train=True)
    assert [part.training for part in model] == [True, False]
    assert torch.equal(found.module(X), model(X))
    assert not model[1].num_batches_tracked
    found.module.train()
    with pytest.warns(RuntimeWarning, match="some of its modules are in another mode"):
        found.module(X)
    assert model[1].num_batches_tracked == 1


def test_for_training_it_does_not_run_in_inference_mode(proven: Proven) -> None:
    found = proven(nn.Linear(6, 3), X, train=True)
    with torch.inference_mode(), pytest.warns(RuntimeWarning, match="gradients are off"):
        found.module(X)


def test_layouts_of_inputs_are_told_apart(proven: Proven) -> None:
    model = nn.Linear(6, 3).eval()
    found = proven(model, X)
    with torch.no_grad(), pytest.warns(RuntimeWarning, match="not proven for"):
        found.module(X.to_sparse())


def test_weights_in_other_memory_are_not_what_graphs_read() -> None:
    model, module, calls = made(train=True)
    module._own.candidate.placed = True
    assert ran(module, calls) == "faster"
    with torch.no_grad():
        model[0].weight.mul_(2)
    assert ran(module, calls) == "faster", "a change of values in the same memory, as by an optimizer"
    model[0].weight.data = torch.ones(3, 6)
    assert "its weights are in other memory" in ran(module, calls)


class Turns(nn.Module):
    """Takes another path once `other` is set. It may change its input first."""

    def __init__(self, changes: bool) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)
        self.changes = changes

    def forward(self, x: Tensor) -> Tensor:
        if self.changes:
            x.mul_(2)
        y = self.conv(x)
        return y * 2 if OTHER_PATH else self.norm(y)  # type: ignore[no-any-return]


OTHER_PATH = False


class Folds(FoldNorms):
    name = "folds"


def folded(proven: Proven, changes: bool) -> Optimized:
    found = proven(Turns(changes).eval(), torch.randn(2, 4, 5, 5), rule=Folds())
    assert found.kept == ["folds"]
    return found


def test_a_call_on_another_path_than_the_trace_runs_the_original(
    proven: Proven, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, x = folded(proven, changes=False), torch.randn(2, 4, 5, 5)
    monkeypatch.setitem(globals(), "OTHER_PATH", True)
    with torch.no_grad(), pytest.warns(RuntimeWarning, match="the original model runs, because .* takes another path"):
        assert torch.equal(found.module(x), found.module.original(x))


def test_a_call_on_another_path_that_has_changed_something_is_not_run_again(
    proven: Proven, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, x = folded(proven, changes=True), torch.ones(2, 4, 5, 5)
    monkeypatch.setitem(globals(), "OTHER_PATH", True)
    with torch.no_grad(), pytest.raises(OtherPathError):
        found.module(x)
    assert torch.equal(x, torch.full_like(x, 2.0)), "changed once, not twice"


def test_it_says_which_part_of_a_call_is_not_proven() -> None:
    _, module, calls = made()
    with torch.no_grad():
        assert "not proven for 2x6 float32: pass shapes=[...] to optimize" in ran(module, calls, X[:2])
        other = "a dtype, a device, requires_grad or another argument differs: optimize again with such arguments"
        assert f"not proven for 4x6 float32: {other}" in ran(module, calls, X.clone().requires_grad_())


def convolved(proven: Proven) -> tuple[nn.Sequential, Optimized, Tensor]:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()).eval()
    x = torch.randn(2, 3, 8, 8)
    return model, proven(model, x, rule=Folds()), x


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize(
    "use",
    [
        pytest.param(lambda module, x: torch.export.export(module, (x,)), id="export"),
        pytest.param(lambda module, x: torch.compile(module, backend="eager")(x), id="compile"),
        pytest.param(lambda module, x: torch.compile(module.original, backend="eager")(x), id="compile the original"),
        pytest.param(lambda module, x: module.to("cpu"), id="to the same device"),
        pytest.param(
            lambda module, x: module.original[0].__dict__.update(stride=tuple(int(n) for n in "11")), id="equal tuple"
        ),
    ],
)
def test_what_changes_nothing_leaves_the_faster_model(use: Callable[[Any, Tensor], Any], proven: Proven) -> None:
    _, found, x = convolved(proven)
    candidate = found.module._own.candidate
    calls: list[int] = []
    run = candidate.call

    def counted(*args: Any) -> Any:
        calls.append(1)
        return run(*args)

    candidate.call, candidate.changes["folds"] = counted, "1 norm"
    found.module._own.unchanged = False
    with torch.no_grad():
        use(found.module, x)
        before = len(calls)
        for _ in range(2):
            found.module(x)
    assert len(calls) == before + 2
    assert not found.module.unproven
    found.module.original[0].stride = (2, 2)
    with torch.no_grad():
        with pytest.warns(RuntimeWarning, match="attributes, tensors or modules was replaced"):
            found.module(x)
        found.module(x)
    assert list(found.module.unproven.values()) == [2], "the present state does not become the one that is compared"


def test_containers_are_still_containers(proven: Proven) -> None:
    model, found, _ = convolved(proven)
    assert len(found.module) == 3
    assert list(found.module) == list(model)
    assert found.module[0] is model[0]
    assert not hasattr(optimize(nn.Linear(2, 2), torch.ones(1, 2), budget_s=1).module, "__len__")


def test_a_plan_replaces_neither_links_nor_pipes(tmp_path: Path, proven: Proven) -> None:
    _, found, _ = convolved(proven)
    (tmp_path / "link").symlink_to(tmp_path / "plan.json")
    for _ in range(2):
        found.save(tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert json.loads((tmp_path / "plan.json").read_text())["rules"] == found.kept
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    found.save(tmp_path / "pipe")
    assert json.loads(os.read(reader, 1 << 20))["rules"] == found.kept
    os.close(reader)
    with pytest.raises(OSError, match="missing"):
        found.save(tmp_path / "missing" / "plan.json")
    assert {each.name for each in tmp_path.iterdir()} == {"link", "plan.json", "pipe"}


class Saving(nn.Sequential):
    """A model with its own state, keys of an older version, and methods in place of those of `nn.Module`."""

    version = 1
    loaded: list[int]

    def get_extra_state(self) -> int:
        return self.version

    def set_extra_state(self, state: int) -> None:
        self.loaded.append(state)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        state_dict.pop(f"{prefix}older", None)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def eval(self) -> Saving:
        self.evaluated = True
        return super().eval()

    def parameters(self, recurse: bool = True) -> Any:
        return self[1].parameters(recurse)


def test_inside_another_module_it_loads_as_the_original(proven: Proven) -> None:
    model, x = Saving(nn.Linear(6, 3), nn.Linear(3, 3)).eval(), torch.randn(4, 6)
    model.loaded = []
    around = nn.Sequential(proven(model, x).module)
    hooked: list[str] = []
    around[0].register_load_state_dict_post_hook(lambda module, keys: hooked.append("loaded"))
    around[0].register_state_dict_post_hook(lambda module, state, *_: hooked.append("saved"))
    state = around.state_dict() | {"0.older": torch.ones(1)}
    around.load_state_dict(state)
    assert model.loaded == [1]
    assert hooked == ["saved", "loaded"]
    with torch.no_grad():
        assert torch.equal(around(x), model(x))
    assert not around[0].unproven


def test_methods_that_the_original_has_in_place_of_pytorchs_are_its_own(proven: Proven) -> None:
    model = Saving(nn.Linear(6, 3), nn.Linear(3, 3)).eval()
    module = proven(model, torch.randn(4, 6)).module
    del model.evaluated
    assert module.eval() is module
    assert model.evaluated
    assert list(map(id, module.parameters())) == list(map(id, model[1].parameters()))


def test_the_order_of_keyword_arguments_does_not_matter(proven: Proven) -> None:
    class Sum(nn.Linear):
        def forward(self, one: Tensor, other: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(one - other)

    model, x, y = Sum(6, 3).eval(), torch.randn(4, 6), torch.randn(4, 6)
    module = proven(model, other=y, one=x).module
    with torch.no_grad():
        assert torch.equal(module(one=x, other=y), model(x, y))
        assert not module.unproven
        with pytest.warns(RuntimeWarning, match="give the same arguments by position and by name as in the call"):
            assert torch.equal(module(x, y), model(x, y))


def test_parts_of_a_container_can_be_replaced(proven: Proven) -> None:
    model, found, x = convolved(proven)
    found.module[0] = nn.Conv2d(3, 4, 5)
    del found.module[2]
    assert len(model) == 2
    with torch.no_grad(), pytest.warns(RuntimeWarning, match="or modules was replaced"):
        assert torch.equal(found.module(x), model(x))


@pytest.mark.parametrize(
    "optimizer",
    [
        pytest.param(lambda own: torch.optim.AdamW(own, fused=True), id="fused"),
        pytest.param(lambda own: torch.optim.SGD(own, 0.1, fused=True), id="fused SGD"),
        pytest.param(lambda own: torch.optim.SGD(own, 0.1), id="SGD"),
    ],
)
def test_a_fused_step_changes_weights_that_a_rule_used(optimizer: Callable[[Any], torch.optim.Optimizer]) -> None:
    model, module, calls = made(frozen=True)
    stepping = optimizer(model.parameters())
    with torch.no_grad():
        stepping.step()  # without gradients, it changes nothing
        assert ran(module, calls) == "faster"
    model[0](X).sum().backward()
    stepping.step()
    with torch.no_grad():
        assert "its weights were changed" in ran(module, calls)
        assert torch.equal(module(X), model(X))
