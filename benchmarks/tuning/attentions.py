"""Find the fastest back end of attention, for RULES of `attentions/plans.py`.

    python benchmarks/tuning/attentions.py [--out attentions.json] [--seconds 60] [--quick]

Each candidate is a rule that names one back end. Candidates are checked on few positions, with half as many key heads
as query heads: forward, and backward with and without a gradient of the log-sum-exp. TFLOP/s count only visible pairs.
A CPU has only one back end, which ignores the rules.
"""

from __future__ import annotations

from functools import partial

import torch
from candidates import QUICK, Call, Settings, Task, main, randn
from torch import Tensor
from torch.nn import functional

from rooftop.cost.formulas.attentions import visible_pairs
from rooftop.kernels.attentions import attentions
from rooftop.kernels.attentions import plans as attention_plans
from rooftop.kernels.attentions.plans import Direction, Rule

BACKENDS = ("cudnn", "flash", "efficient")
DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")
TOKENS, FEATURES = 16384, 2048  # tokens in the batch; features over all heads


def inputs(batch: int, heads: int, key_heads: int, positions: int, width: int) -> list[Tensor]:
    """(query, key, value, gradient), (B, H, S, D) as views of (B, S, H, D)."""
    return [randn(batch, positions, h, width).transpose(1, 2) for h in (heads, key_heads, key_heads, heads)]


def call(direction: Direction, shape: tuple[int, ...], causal: bool) -> Call:
    """A call by the back end that RULES name when the call is created. For backward, forward runs once by the same back
    end."""
    query, key, value, dout = inputs(*shape)
    scale = query.shape[-1] ** -0.5
    if direction == "forward":
        return lambda: attentions._attention(query, key, value, None, causal, scale)
    out, lse = attentions._attention(query, key, value, None, causal, scale)
    arguments = (query, key, value, None, out, lse, causal, scale, False)
    return lambda: attentions._attention_backward(dout, None, *arguments)


def sdpa(shape: tuple[int, ...], causal: bool) -> Call:
    query, key, value, _ = inputs(*shape)
    grouped = query.shape[1] != key.shape[1]
    attend = functional.scaled_dot_product_attention
    return lambda: attend(query, key, value, is_causal=causal, enable_gqa=grouped)


def check(backend: str, direction: Direction, positions: int, width: int, causal: bool) -> None:
    query, key, value, dout = inputs(2, 4, 2, positions, width)
    scale = width**-0.5
    shape = attention_plans.shape_of(query, key, value, None, causal)
    plan = attention_plans.plan_of(shape, query.device, direction)
    assert QUICK or plan.backend == backend, plan.refused
    wide = [t.double() for t in (query, key, value)]
    exact, exact_lse = attentions.attention_reference(*wide, None, causal, scale)
    out, lse = attentions._attention(query, key, value, None, causal, scale)
    if direction == "forward":
        torch.testing.assert_close(out.double(), exact, rtol=2e-2, atol=2e-2)
        torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-3, atol=1e-3)
        return
    for dlse in (None, torch.randn_like(lse)):
        found = attentions._attention_backward(dout, dlse, query, key, value, None, out, lse, causal, scale, False)
        exact_dlse = None if dlse is None else dlse.double()
        expected = attentions.attention_backward_reference(
            dout.double(), exact_dlse, *wide, None, exact_lse, causal, scale
        )
        for mine, wanted in zip(found[:3], expected[:3], strict=True):
            torch.testing.assert_close(mine.double(), wanted, rtol=5e-2, atol=5e-2)


def rules(backend: str, direction: Direction) -> Settings:
    """Rules that name one back end for this direction, and leave the other direction to PyTorch's order."""
    others = [rule for rule in attention_plans.RULES if rule.direction != direction]
    return {(attention_plans, "RULES"): (Rule(direction, (backend,)), *others)}


def task(
    direction: Direction, positions: int, width: int, causal: bool, heads: int | None = None, groups: int = 1
) -> Task:
    if QUICK:
        positions, width, heads = 16, 8, 2 * groups
    heads = heads or FEATURES // width
    batch = 1 if QUICK else max(1, TOKENS // positions)
    shape = (batch, heads, heads // groups, positions, width)
    flops = (4 if direction == "forward" else 10) * batch * heads * visible_pairs(positions, positions, causal) * width
    name = (
        f"{direction} S={positions} D={width} {'causal' if causal else 'full'}{f' groups of {groups}' * (groups > 1)}"
    )
    checked = min(positions, 192)

    def proof() -> None:
        (first, *_) = attention_plans.RULES
        check(first.order[0], direction, checked, width, causal)

    return Task(
        name,
        2 * batch * positions * width * 4 * heads,
        {backend: rules(backend, direction) for backend in BACKENDS},
        partial(call, direction, shape, causal),
        proof,
        {"sdpa": partial(sdpa, shape, causal)} if direction == "forward" else {},
        "the best back end",
        flops=flops,
    )


SHAPES = [
    (positions, width, causal)
    for positions in (512, 1024, 256, 128, 2048, 4096)
    for width in (128, 64)
    for causal in (True, False)
]
OTHERS = [(4096, 256, True), (1024, 96, True), (4096, 96, True), (1024, 32, True), (64, 128, True), (64, 64, False)]
TASKS = [
    *(task(direction, *shape) for shape in SHAPES for direction in DIRECTIONS),
    *(task(direction, 4096, 128, True, heads=16, groups=4) for direction in DIRECTIONS),
    *(task(direction, *shape) for shape in OTHERS for direction in DIRECTIONS),
]

if __name__ == "__main__":
    main(TASKS[:4] if QUICK else TASKS, __doc__)
