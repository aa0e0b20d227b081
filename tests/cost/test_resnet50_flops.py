"""The published cost of ResNet-50: 4.09 G multiply-adds for an image of 224x224."""

from __future__ import annotations

import torch

from rooftop.cost import CountingMode

PUBLISHED_FLOPS = 2 * 4.09e9


def test_resnet50_costs_what_is_published() -> None:
    from rooftop.models import resnet50

    with torch.device("meta"):
        network, image = resnet50().eval(), torch.empty(1, 3, 224, 224)
    with torch.no_grad(), CountingMode() as counted:
        network(image)
    assert {record.name for record in counted.records if record.cost is None} == set()
    costs = {id(record): record.cost for record in counted.records if record.cost is not None}
    products = sum(
        costs[id(record)].total_flops
        for record in counted.records
        if record.name in ("aten::convolution", "aten::addmm")
    )
    assert abs(products / PUBLISHED_FLOPS - 1) < 0.002
    total = sum(cost.total_flops for cost in costs.values())
    assert abs(total / PUBLISHED_FLOPS - 1) < 0.01
    # 25.6 M parameters are read once, in float32.
    weights = sum(parameter.numel() for parameter in network.parameters()) * 4
    assert sum(cost.read_bytes for cost in costs.values()) > weights > 25.5e6 * 4
