"""`AdamW` gives PyTorch's numbers in one pass over memory. Under TRITON_INTERPRET=1 the CPU runs the kernel, with
float16 in place of bfloat16, because the interpreter truncates to bfloat16."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from rooftop.launch import INTERPRETED, count_launches
from rooftop.parallel import ModelGradients
from rooftop.train import AdamW, MainWeights
from rooftop.train.optimizers import adamw_launches

NARROW = torch.float16 if INTERPRETED else torch.bfloat16
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
OPTIONS: dict[str, Any] = {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}
SHAPES = [(5,), (), (0, 3), (3, 1), (40, 101), (2049,), (4096,)]


def parameters(dtype: torch.dtype, device: str) -> list[nn.Parameter]:
    """Parameters of several sizes; the last two have permuted dimensions."""
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES]
    made += [torch.randn(30, 7, generator=generator, dtype=torch.float64).t()]
    made += [torch.randn(2, 3, 4, 5, generator=generator, dtype=torch.float64).to(memory_format=torch.channels_last)]
    return [nn.Parameter(each.to(device, dtype, memory_format=torch.preserve_format)) for each in made]


def given_gradients(parameters: list[nn.Parameter], step: int, alike: bool = False) -> None:
    """Gradients that depend only on the step; small and large, contiguous or with their parameter's layout; the first
    parameter has none in the second step."""
    generator = torch.Generator().manual_seed(step)
    for number, each in enumerate(parameters):
        gradient = torch.randn(each.shape, generator=generator, dtype=torch.float64) * 10.0 ** (number % 5 - 2)
        made = torch.empty_like(each).copy_(gradient) if alike else gradient.to(each)
        each.grad = None if number == 0 and step == 1 else made


def stepped(optimizer: torch.optim.Optimizer, every: list[nn.Parameter], steps: range, **options: Any) -> list[Tensor]:
    for step in steps:
        given_gradients(every, step, alike=bool(optimizer.param_groups[0]["fused"]))  # as PyTorch needs
        optimizer.param_groups[0]["lr"] = 0.01 / (1 + step)
        optimizer.step(**options)
    return [each.detach() for each in every]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 2e-6)])
def test_steps_are_those_of_pytorch(device: str, dtype: torch.dtype, tolerance: float) -> None:
    ours, theirs = parameters(dtype, device), parameters(torch.float64, "cpu")
    found = stepped(AdamW(ours, **OPTIONS), ours, range(5))
    expected = stepped(torch.optim.AdamW(theirs, **OPTIONS), theirs, range(5))
    for mine, other in zip(found, expected, strict=True):
        assert mine.dtype == dtype
        torch.testing.assert_close(mine.cpu().double(), other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("device", DEVICES)
def test_a_state_goes_on_with_pytorch_and_back(device: str) -> None:
    first, second, plain = (parameters(torch.float64, device) for _ in range(3))
    one, other = AdamW(first, **OPTIONS), torch.optim.AdamW(second, **OPTIONS)
    stepped(one, first, range(2))
    for mine, theirs in zip(second, first, strict=True):
        mine.data.copy_(theirs.data)
    other.load_state_dict(one.state_dict())
    stepped(other, second, range(2, 4))
    for mine, theirs in zip(first, second, strict=True):
        mine.data.copy_(theirs.data)
    one.load_state_dict(other.state_dict())
    found = stepped(one, first, range(4, 6))
    expected = stepped(torch.optim.AdamW(plain, **OPTIONS), plain, range(6))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("device", DEVICES)
def test_scaled_gradients(device: str) -> None:
    ours, theirs = parameters(torch.float64, device), parameters(torch.float64, device)
    scale = torch.tensor(0.25, device=device)
    optimizer, plain = AdamW(ours, **OPTIONS), torch.optim.AdamW(theirs, **OPTIONS)
    for step in range(2):
        given_gradients(ours, step)
        given_gradients(theirs, step)
        for each in theirs:
            if each.grad is not None:
                each.grad *= 0.25
        optimizer.step(scale=scale)
        plain.step()
    torch.testing.assert_close(
        [each.detach() for each in ours], [each.detach() for each in theirs], rtol=1e-13, atol=1e-13
    )


def main_weights(device: str, keep_narrow: bool) -> tuple[nn.Module, MainWeights]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 50), nn.Tanh(), nn.Linear(50, 3, bias=False)).to(device)
    return model, MainWeights(model, NARROW, keep_narrow=keep_narrow)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("most", [0.05, 1e9])
def test_main_weights_are_stepped_as_one_after_another(device: str, micro_batches: int, most: float) -> None:
    """The result equals casting to float32, clipping, stepping and rounding one after the other, except that clipped
    gradients are not rounded in between."""
    (model, weights), (other, plain_weights) = main_weights(device, True), main_weights(device, False)
    gradients, plain_gradients = ModelGradients(model), ModelGradients(other)
    weights.answer_for(gradients)
    plain_weights.answer_for(plain_gradients)
    optimizer = AdamW(weights.named.values(), **OPTIONS, weights=weights)
    plain = torch.optim.AdamW(plain_weights.named.values(), **OPTIONS)
    for step in range(4):
        for part in range(micro_batches):
            x = torch.randn(8, 24, generator=torch.Generator().manual_seed(9 * step + part)).to(device, NARROW)
            model(x).float().square().mean().backward()
            other(x).float().square().mean().backward()
        held = [weights.gradient_of(each) for each in weights.named.values()]
        assert {each.dtype for each in held if each is not None} == {NARROW if micro_batches == 1 else torch.float32}
        norm, scale = gradients.scale_for(most)
        torch.testing.assert_close(norm, plain_gradients.clip_(most), rtol=1e-6, atol=0)
        optimizer.step(scale=scale)
        plain.step()
        optimizer.zero_grad()
        plain.zero_grad()
        plain_weights.publish()
        assert all(weights.gradient_of(each) is None for each in weights.named.values())
        for name, each in weights.named.items():
            torch.testing.assert_close(each, plain_weights.named[name], rtol=1e-6, atol=1e-6)
        for mine, main in zip(model.parameters(), weights.named.values(), strict=True):
            assert torch.equal(mine, main.to(NARROW))


@pytest.mark.parametrize("device", DEVICES)
def test_a_step_is_from_what_was_loaded_into_the_model(device: str) -> None:
    """The program changes some elements of weights without autograd, also in another layout. Other elements keep their
    float32 digits."""
    model, weights = main_weights(device, True)
    model[2].weight.data = model[2].weight.data.t().contiguous().t()
    optimizer = AdamW(weights.named.values(), **OPTIONS, weights=weights)
    before = {name: each.detach().clone() for name, each in weights.named.items()}
    for name, own in model.named_parameters():
        own.data.flatten()[3:].fill_(0.5) if own.is_contiguous() else own.data[1:].fill_(0.5)
        before[name][own != before[name].to(NARROW)] = 0.5
    model(torch.ones(8, 24, device=device, dtype=NARROW)).float().square().mean().backward()
    plain = [nn.Parameter(each) for each in before.values()]
    for each, main in zip(plain, weights.named.values(), strict=True):
        gradient = weights.gradient_of(main)
        assert gradient is not None
        each.grad = gradient.float()
    optimizer.step()
    torch.optim.AdamW(plain, **OPTIONS).step()
    for main, own, each in zip(weights.named.values(), model.parameters(), plain, strict=True):
        torch.testing.assert_close(main.detach(), each.detach(), rtol=1e-6, atol=1e-6)
        assert torch.equal(own, main.to(NARROW))


def test_gradients_that_are_asked_for_are_wide() -> None:
    model, weights = main_weights("cpu", True)
    model(torch.ones(2, 24, dtype=NARROW)).sum().backward()
    main = weights.named["0.weight"]
    narrow = weights.gradient_of(main)
    assert narrow is not None
    assert main.grad is None
    weights.widen(main)
    assert main.grad is not None
    assert torch.equal(main.grad, narrow.float())
    assert weights.named["2.weight"].grad is None
    gradients = ModelGradients(model)
    weights.answer_for(gradients)
    gradients.clip_(1e-3)
    assert weights.named["2.weight"].grad is not None
    torch.testing.assert_close(gradients.norm(), torch.tensor(1e-3), rtol=1e-3, atol=0)


def test_a_model_leaves_with_its_weights() -> None:
    """Parameter hooks must not reference the model, because they would keep model and weights alive forever."""
    model, weights = main_weights("cpu", True)
    model(torch.ones(2, 24, dtype=NARROW)).sum().backward()
    left = weakref.ref(next(model.parameters()))
    del model, weights
    gc.collect()
    assert left() is None


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 5000), st.integers(0, 3), st.sampled_from([torch.float32, NARROW]), st.integers(0, 2**31))
def test_any_size_and_place(size: int, before: int, dtype: torch.dtype, seed: int) -> None:
    """Tensors at arbitrary places in memory, next to memory that must not change."""
    generator = torch.Generator().manual_seed(seed)
    room = torch.randn(size + before + 3, generator=generator).to(dtype)
    whole = room.clone()
    weight = nn.Parameter(room[before : before + size])
    plain = nn.Parameter(whole[before : before + size].double())
    weight.grad = torch.randn(size, generator=generator).to(dtype)
    plain.grad = weight.grad.double()
    AdamW([weight], **OPTIONS).step()
    torch.optim.AdamW([plain], **OPTIONS).step()
    tolerance = 2e-6 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(weight.detach().double(), plain.detach(), rtol=tolerance, atol=tolerance)
    assert torch.equal(room[:before], whole[:before])
    assert torch.equal(room[before + size :], whole[before + size :])


def test_hooks_and_closures_run_once() -> None:
    weight = nn.Parameter(torch.ones(3))
    torch.optim.AdamW([weight])  # adds hooks around the step of its class
    optimizer = AdamW([weight], **OPTIONS)
    seen: list[str] = []
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = weight.square().sum()
        loss.backward()
        return loss

    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    assert optimizer.step(closure) == 3
    assert seen == ["after"]
    schedule.step()
    assert optimizer.param_groups[0]["lr"] == 0.005


def test_a_state_that_lies_otherwise_is_moved() -> None:
    """A state has another layout if it comes from a checkpoint, or if the model's memory format was changed."""
    ours, theirs = nn.Parameter(torch.randn(5, 4).double().t()), nn.Parameter(torch.zeros(4, 5).double())
    theirs.data.copy_(ours.data)
    optimizer, plain = AdamW([ours], **OPTIONS), torch.optim.AdamW([theirs], **OPTIONS)
    for step in range(3):
        ours.grad = torch.full_like(ours, step + 1.0) * torch.arange(5.0)
        theirs.grad = ours.grad.clone(memory_format=torch.contiguous_format)
        if step == 1:
            optimizer.load_state_dict(copy.deepcopy(plain.state_dict()))
        optimizer.step()
        plain.step()
    torch.testing.assert_close(ours.detach(), theirs.detach(), rtol=1e-13, atol=1e-13)


def test_copies_and_pickles_go_on() -> None:
    every = parameters(torch.float64, "cpu")
    optimizer = AdamW(every, **OPTIONS)
    stepped(optimizer, every, range(1))
    copied = pickle.loads(pickle.dumps(optimizer))
    mine = copied.param_groups[0]["params"]
    other = copy.deepcopy(copied)
    expected = stepped(optimizer, every, range(1, 3))
    torch.testing.assert_close(stepped(copied, mine, range(1, 3)), expected, rtol=0, atol=0)
    torch.testing.assert_close(stepped(other, other.param_groups[0]["params"], range(1, 3)), expected, rtol=0, atol=0)


def test_optimizers_share_main_weights() -> None:
    model, weights = main_weights("cpu", True)
    first, *rest = weights.named.values()
    before = [each.detach().clone() for each in (first, *rest)]
    one, other = AdamW([first], weights=weights), AdamW(rest, weights=weights)
    model(torch.ones(2, 24, dtype=NARROW)).sum().backward()
    one.zero_grad()
    one.step()
    other.step()
    assert torch.equal(first, before[0])
    assert all(not torch.equal(each, old) for each, old in zip(rest, before[1:], strict=True))


def test_a_model_that_moved_gets_the_steps() -> None:
    model, weights = main_weights("cpu", True)
    optimizer = AdamW(weights.named.values(), **OPTIONS, weights=weights)
    for parameter in model.parameters():
        parameter.data = parameter.data.clone(memory_format=torch.contiguous_format)
    model(torch.ones(2, 24, dtype=NARROW)).sum().backward()
    optimizer.step()
    for parameter, main in zip(model.parameters(), weights.named.values(), strict=True):
        assert torch.equal(parameter, main.to(NARROW))


def test_frozen_weights_stay() -> None:
    model = nn.Linear(3, 2)
    model.weight.requires_grad_(False)
    before = model.weight.detach().clone()
    weights = MainWeights(model, NARROW, keep_narrow=True)
    optimizer = AdamW(weights.named.values(), **OPTIONS, weights=weights)
    model(torch.ones(1, 3, dtype=NARROW)).sum().backward()
    optimizer.step()
    assert torch.equal(weights.named["weight"], before)
    assert model.bias.grad is None


def test_betas_may_change_and_gradients_be_absent() -> None:
    """A schedule of betas does not cause compilation; without gradients, weights do not change."""
    ours, theirs = parameters(torch.float64, "cpu"), parameters(torch.float64, "cpu")
    optimizer, plain = AdamW(ours, **OPTIONS), torch.optim.AdamW(theirs, **OPTIONS)
    optimizer.step(scale=torch.tensor(0.5))
    for step in range(4):
        for each, every in ((optimizer, ours), (plain, theirs)):
            each.param_groups[0]["betas"] = (0.5 + 0.1 * step, 0.9)
            given_gradients(every, step)
            each.step()
    torch.testing.assert_close([p.detach() for p in ours], [p.detach() for p in theirs], rtol=1e-12, atol=1e-12)
    assert all(len(each._tables) == 1 for each in optimizer._plans.values())


BETWEEN = ["nothing", "cleared", "one state replaced", "one state dropped", "loaded", "another group", "zeroed", "rate"]


@settings(max_examples=20, deadline=None)
@given(
    st.lists(st.lists(st.sampled_from([0, 1, 2, 5, 33]), max_size=3), min_size=1, max_size=6),
    st.sampled_from([(0.9, 0.99), (0.0, 0.5), (0.5, 0.0), (0.0, 0.0)]),
    st.lists(st.sampled_from(BETWEEN), min_size=2, max_size=6),
    st.randoms(use_true_random=False),
)
def test_whatever_happens_between_steps(
    shapes: list[list[int]], betas: tuple[float, float], between: list[str], random: Any
) -> None:
    """Data kept from step to step is used only while it is still valid."""
    generator = torch.Generator().manual_seed(random.randrange(2**31))
    ours = [nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64)) for shape in shapes]
    sides = [ours, [nn.Parameter(each.detach().clone()) for each in ours]]
    options = {**OPTIONS, "betas": betas}
    optimizers = [AdamW(sides[0], **options), torch.optim.AdamW(sides[1], **options)]
    for step, what in enumerate(between):
        skipped = [random.random() < 0.2 for _ in sides[0]]
        given = [torch.randn(each.shape, generator=generator, dtype=torch.float64) for each in sides[0]]
        for every, optimizer in zip(sides, optimizers, strict=True):
            for each, skip, gradient in zip(every, skipped, given, strict=True):
                each.grad = None if skip else gradient.clone()
            optimizer.step()
            state = optimizer.state
            if what == "cleared":
                state.clear()
            elif what == "one state replaced" and state:
                first = next(iter(state))
                state[first] = {name: value.clone() for name, value in state[first].items()}
            elif what == "one state dropped":
                state.pop(every[0], None)
            elif what == "loaded":
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            elif what == "another group":
                every.append(nn.Parameter(torch.full((4,), step + 1.0, dtype=torch.float64)))
                optimizer.add_param_group({"params": every[-1:]})
            elif what == "zeroed":
                optimizer.zero_grad(set_to_none=False)
            elif what == "rate":
                optimizer.param_groups[0]["lr"] = 0.1 / (1 + step)
        torch.testing.assert_close([p.detach() for p in ours], [p.detach() for p in sides[1]], rtol=1e-11, atol=1e-11)


@pytest.mark.skipif(not INTERPRETED, reason="without the kernel, PyTorch computes steps on a CPU")
@pytest.mark.parametrize("graph", [False, True])
def test_weights_share_a_launch(graph: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """New gradients and some new weights change neither results nor the number of launches. Each captured graph has its
    own data."""
    monkeypatch.setattr(adamw_launches, "capturing", lambda device: graph)
    ours, theirs = parameters(torch.float64, "cpu"), parameters(torch.float64, "cpu")
    optimizer, plain = AdamW(ours, **OPTIONS), torch.optim.AdamW(theirs, **OPTIONS)
    for step in range(6):
        for each, every in ((plain, theirs), (optimizer, ours)):
            given_gradients(every, step)
            if step == 4:
                every[3].grad = None
                every[2].grad = None
            with count_launches() as launched:
                each.step()
        stepped = sum(each.grad is not None and each.numel() > 0 for each in ours)
        assert launched == {"adamw_numbers": 1, **({"adamw_step": stepped} if graph else {"adamw_steps": 1})}
        torch.testing.assert_close([p.detach() for p in ours], [p.detach() for p in theirs], rtol=1e-12, atol=1e-12)


def test_weights_that_moved_are_found() -> None:
    """Each tensor may be in other memory in the next step, and a parameter may have become smaller."""
    ours, theirs = parameters(torch.float64, "cpu"), parameters(torch.float64, "cpu")
    optimizer, plain = AdamW(ours, **OPTIONS), torch.optim.AdamW(theirs, **OPTIONS)
    for step in range(5):
        for each, every in ((optimizer, ours), (plain, theirs)):
            given_gradients(every, step)
            each.step()
            state = each.state[every[4]]
            state["exp_avg"].data = state["exp_avg"].clone()
            state["exp_avg_sq"] = state["exp_avg_sq"].clone()
            every[5].data = every[5].data.clone()
        torch.testing.assert_close([p.detach() for p in ours], [p.detach() for p in theirs], rtol=1e-12, atol=1e-12)
    ours[5].data = ours[5].data[:100]
    ours[5].grad = torch.ones(100, dtype=torch.float64)
    with pytest.raises((ValueError, RuntimeError), match="100"):
        optimizer.step()


@pytest.mark.parametrize("device", DEVICES)
def test_gradients_that_are_not_in_memory_as_they_are(device: str) -> None:
    """Gradients with the negative bit, which autograd creates for complex numbers; a negated view; and zeros without
    memory."""

    def after(make: Callable[..., torch.optim.Optimizer]) -> list[float]:
        weights = [nn.Parameter(torch.tensor(2.0, device=device)) for _ in range(3)]
        ones = torch.ones((), device=device)
        (torch.complex(ones, weights[0]).conj() * torch.complex(ones, ones)).imag.sum().backward()
        weights[1].grad = torch._neg_view(ones)
        weights[2].grad = torch._efficientzerotensor((), device=device)
        assert weights[0].grad is not None
        assert weights[0].grad.is_neg()
        make(weights, lr=0.1, weight_decay=0.5).step()
        return [weight.item() for weight in weights]

    def plain(weights: list[nn.Parameter], **options: Any) -> torch.optim.Optimizer:
        for weight in weights:
            assert weight.grad is not None
            weight.grad = torch.zeros_like(weight) if weight.grad._is_zerotensor() else weight.grad.resolve_neg()
        return torch.optim.AdamW(weights, **options)

    assert after(AdamW) == pytest.approx(after(plain), abs=1e-6)


@pytest.mark.parametrize("device", DEVICES)
def test_states_that_moved_are_found(device: str) -> None:
    """States move, for example, by `.data = .data.cpu()` and back. In the test, other tensors have then taken the
    states' former memory."""
    ours, theirs = (parameters(torch.float32, device)[-1:] for _ in range(2))
    one, other = AdamW(ours, **OPTIONS), torch.optim.AdamW(theirs, **OPTIONS)
    kept = []
    for step in range(4):
        for optimizer, every in ((one, ours), (other, theirs)):
            given_gradients(every, step + 2, alike=True)
            optimizer.step()
        for state in one.state.values():
            for value in state.values():
                value.data = value.data.clone()
        kept += [torch.full((), 7.0, device=device) for _ in range(20)]
    torch.testing.assert_close(ours, theirs, rtol=2e-6, atol=2e-6)
    assert one.state[ours[0]]["step"].item() == 4


def test_wrong_scales_and_sparse_gradients_leave_all_as_it_was() -> None:
    dense, embedding = nn.Parameter(torch.ones(3)), nn.Embedding(4, 2, sparse=True)
    optimizer = AdamW([{"params": [dense]}, {"params": embedding.parameters()}])
    (dense.sum() + embedding(torch.tensor([1])).sum()).backward()
    before = embedding.weight.detach().clone()
    with pytest.raises(TypeError, match="scale must be a tensor, as returned by scale_for, got float"):
        optimizer.step(scale=0.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"scale must be one number, got \(3,\)"):
        optimizer.step(scale=torch.ones(3))
    if INTERPRETED:
        with pytest.raises(RuntimeError, match="a gradient is sparse"):
            optimizer.step()
    assert torch.equal(dense, torch.ones(3))
    assert torch.equal(embedding.weight, before)
    assert not optimizer.state


def test_a_gradient_of_another_shape_is_no_gradient() -> None:
    weights = MainWeights(nn.Linear(3, 4, bias=False), NARROW, keep_narrow=True)
    for wrong in (torch.ones(1, 3), torch.ones(4, 3, dtype=torch.int64)):
        with pytest.raises(ValueError, match=r"must be floating-point with its weight's shape \(4, 3\), got"):
            weights.add(weights.named["weight"], wrong)


def test_autograd_can_tell_that_weights_have_changed() -> None:
    weight = nn.Parameter(torch.ones(3))
    optimizer = AdamW([weight], **OPTIONS)
    loss = weight.pow(3).sum()
    loss.backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_what_is_no_weight_is_refused() -> None:
    whole = torch.zeros(4, 6)
    with pytest.raises(ValueError, match="gaps or overlaps"):
        AdamW([nn.Parameter(whole[:, :3])])
    with pytest.raises(TypeError, match="complex64"):
        AdamW([nn.Parameter(torch.zeros(2, dtype=torch.complex64))])
    with pytest.raises(ValueError, match="empty"):
        AdamW([])
    optimizer = AdamW([nn.Parameter(torch.zeros(2))])
    with pytest.raises(ValueError, match="gaps or overlaps"):
        optimizer.add_param_group({"params": [nn.Parameter(whole[:, :3])]})
    with pytest.raises(ValueError, match="maximize=True is not supported"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))], "maximize": True})
    assert len(optimizer.param_groups) == 1  # the refused groups leave nothing behind
    with pytest.raises(ValueError, match="amsgrad=True is not supported"):
        optimizer.load_state_dict(torch.optim.AdamW([nn.Parameter(torch.zeros(2))], amsgrad=True).state_dict())
    model, weights = main_weights("cpu", True)
    with pytest.raises(ValueError, match=r"not in weights\.named"):
        AdamW(model.parameters(), weights=weights)
    with pytest.raises(ValueError, match="beta"):
        AdamW([nn.Parameter(whole)], betas=(0.9, 1.0))


@pytest.mark.skipif(INTERPRETED, reason="starts the interpreted run")
def test_the_kernel_makes_these_steps(interpreted: Callable[..., int]) -> None:
    assert interpreted(__file__) == 29


@pytest.mark.gpu
def test_a_graph_holds_steps() -> None:
    ours, theirs = parameters(torch.float32, "cuda"), parameters(torch.float32, "cuda")
    optimizer, plain = AdamW(ours, **OPTIONS), torch.optim.AdamW(theirs, **OPTIONS)
    for every in (ours, theirs):
        given_gradients(every, 0)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        optimizer.step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        optimizer.step()
    for _ in range(3):
        graph.replay()
    for _ in range(4):
        plain.step()
    torch.testing.assert_close(
        [each.detach() for each in ours], [each.detach() for each in theirs], rtol=1e-5, atol=1e-6
    )


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("scaled", [False, True])
def test_a_step_waits_for_nothing(scaled: bool) -> None:
    every = parameters(torch.float32, "cuda")
    optimizer = AdamW(every, **OPTIONS)
    scale = torch.tensor(0.5, device="cuda") if scaled else None
    given_gradients(every, 0)
    optimizer.step(scale=scale)
    try:
        torch.cuda.set_sync_debug_mode("error")
        optimizer.step(scale=scale)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_streams_and_graphs_take_turns() -> None:
    """Data that is kept on the GPU from step to step belongs to one stream, and to no graph."""
    ours, theirs = parameters(torch.float64, "cuda"), parameters(torch.float64, "cuda")
    optimizer, plain = AdamW(ours, **OPTIONS), torch.optim.AdamW(theirs, **OPTIONS)
    streams = [torch.cuda.Stream() for _ in range(3)]
    graph = torch.cuda.CUDAGraph()
    given_gradients(ours, 0)
    given_gradients(theirs, 0)
    for turn in range(8):
        stream = streams[turn % 2]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            optimizer.step()
        torch.cuda.current_stream().wait_stream(stream)
        # overwrites the released memory
        scratch = [torch.full_like(each, torch.nan) for each in ours for _ in range(4)]
        if turn == 3:
            torch.cuda.synchronize()
            with torch.cuda.graph(graph, stream=streams[2]):
                optimizer.step()
        if turn > 4:
            graph.replay()
        del scratch
    for _ in range(8 + 3):
        plain.step()
    torch.testing.assert_close(
        [each.detach() for each in ours], [each.detach() for each in theirs], rtol=1e-12, atol=1e-12
    )


@pytest.mark.gpu
def test_a_rate_on_the_gpu() -> None:
    ours, theirs = parameters(torch.float64, "cuda"), parameters(torch.float64, "cuda")
    rate = torch.tensor(0.0, dtype=torch.float64, device="cuda")
    optimizer, plain = AdamW(ours, **{**OPTIONS, "lr": rate}), torch.optim.AdamW(theirs, **OPTIONS)
    for step in range(4):
        rate.fill_(0.01 / (1 + step))
        given_gradients(ours, step)
        optimizer.step()
    expected = stepped(plain, theirs, range(4))
    torch.testing.assert_close([each.detach() for each in ours], expected, rtol=1e-12, atol=1e-12)
