"""Weights in spconv's layouts: (out, *kernel, in) unchanged, (*kernel, out, in) and (*kernel, in, out) converted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rooftop.sparse as spconv
from rooftop.sparse.weight_layouts import LAYOUTS, as_krsc, fitting


def a_network() -> nn.Module:
    """Has layers whose layout follows from their shape, and one with as many channels in as out."""
    torch.manual_seed(0)
    return spconv.SparseSequential(
        first=spconv.SubMConv3d(4, 16, 3, bias=False),
        norm=nn.BatchNorm1d(16),
        same=spconv.SubMConv3d(16, 16, 3),
        down=spconv.SparseConv3d(16, 24, (3, 1, 1), (2, 1, 1), indice_key="down"),
        up=spconv.SparseInverseConv3d(24, 16, (3, 1, 1), "down"),
        head=nn.Linear(16, 2),
    )


def saved(network: nn.Module, layout: str) -> dict[str, Tensor]:
    """The state dict as a version of spconv saves it."""
    places = {"KRSC": (0, 1, 2, 3, 4), "RSKC": (1, 2, 3, 0, 4), "RSCK": (1, 2, 3, 4, 0)}[layout]
    return {
        k: (v.permute(places) if v.dim() == 5 else v).clone(memory_format=torch.contiguous_format)
        for k, v in network.state_dict().items()
    }


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_checkpoint_of_any_layout_loads(layout: str, given: bool) -> None:
    network = a_network()
    expected = {key: value.clone() for key, value in network.state_dict().items()}
    state = saved(network, layout)
    for parameter in network.parameters():
        nn.init.zeros_(parameter)
    report = spconv.load_spconv_state_dict(network, state, layout if given else None)
    for key, value in network.state_dict().items():
        assert torch.equal(value, expected[key]), key
    weights = ["first.weight", "same.weight", "down.weight", "up.weight"]
    assert report.layouts == dict.fromkeys(weights, layout)
    assert report.converted == ([] if layout == "KRSC" else weights)
    assert str(report) == (f"4 weights of sparse convolutions: 4 in {layout}; {0 if layout == 'KRSC' else 4} converted")


def test_a_module_with_two_names() -> None:
    shared = spconv.SubMConv3d(3, 3, 3)  # a weight whose shape fits all layouts
    network = nn.ModuleDict({"one": shared, "other": shared})
    before = shared.weight.detach().clone()
    spconv.load_spconv_state_dict(network, saved(network, "RSCK"), "RSCK")
    assert torch.equal(shared.weight, before)


def test_converted_weights_are_contiguous() -> None:
    """Converted weights must be contiguous, in order to be saved and assigned."""
    network, twin = a_network(), a_network().to("meta")
    converted, _ = spconv.convert_state_dict(network, saved(network, "RSKC"))
    assert all(value.is_contiguous() for value in converted.values())
    first = {key.removeprefix("first."): value for key, value in saved(network, "RSCK").items() if "first" in key}
    twin.first.load_state_dict(first, assign=True)
    assert twin.first.weight.is_contiguous()
    assert torch.equal(twin.first.weight, network.first.weight)


def test_layers_in_different_layouts() -> None:
    """A file like spconv 2.1's, where each layer's algorithm decided the layout."""
    network = a_network()
    state = {**saved(network, "KRSC"), "down.weight": saved(network, "RSKC")["down.weight"]}
    converted, report = spconv.convert_state_dict(network, state)
    assert report.layouts["down.weight"] == "RSKC"
    assert report.converted == ["down.weight"]
    assert all(torch.equal(converted[key], value) for key, value in network.state_dict().items())


def test_a_single_convolution() -> None:
    conv = spconv.SubMConv2d(3, 5, 3)
    converted, report = spconv.convert_state_dict(conv, {"weight": conv.weight.movedim(0, -1), "bias": conv.bias})
    assert torch.equal(converted["weight"], conv.weight)
    assert report.layouts == {"weight": "RSCK"}


def test_what_nothing_decides() -> None:
    conv = spconv.SubMConv3d(16, 16, 3, bias=False)
    state = {"weight": conv.weight.detach().movedim(0, -1)}
    with pytest.raises(
        ValueError, match=r"weight of shape \(3, 3, 3, 16, 16\) may be in the layout RSKC or RSCK.*layout="
    ):
        spconv.load_spconv_state_dict(conv, state)
    other = spconv.SubMConv3d(16, 16, 3, bias=False)
    spconv.load_spconv_state_dict(other, state, "RSCK")
    assert torch.equal(other.weight, conv.weight)
    with pytest.raises(RuntimeError, match=r"spconv's layout RSKC or RSCK: load it with .*load_spconv_state_dict"):
        other.load_state_dict(state)


@pytest.mark.parametrize("layout", ["KRSC", "RSKC"])
def test_load_state_dict_refuses_what_nothing_decides(layout: str) -> None:
    conv, other = spconv.SubMConv3d(16, 3, 3), spconv.SubMConv3d(16, 3, 3)
    before = other.weight.detach().clone()
    state = saved(conv, layout)  # a plain dict without a version, as in other files
    with pytest.raises(RuntimeError, match=r"layout KRSC or RSKC: load it with .*load_spconv_state_dict"):
        other.load_state_dict(state)
    assert torch.equal(other.weight, before)
    assert spconv.load_spconv_state_dict(other, state, layout).layouts == {"weight": layout}
    assert torch.equal(other.weight, conv.weight)


@pytest.mark.parametrize("layout", ["KRSC", "RSKC"])
def test_the_other_layers_decide_for_a_network(layout: str) -> None:
    """The last weight, (3, 3, 3, 3, 16), fits both layouts, so the other layers decide."""
    network, other = (spconv.SparseSequential(spconv.SubMConv3d(4, 16, 3), spconv.SubMConv3d(16, 3, 3)) for _ in "12")
    spconv.load_spconv_state_dict(other, saved(network, layout))
    assert all(map(torch.equal, other.state_dict().values(), network.state_dict().values()))


@pytest.mark.parametrize("shape", [(16, 3, 3), (16, 16, 3), (3, 3, 3), (1, 1, 1), (4, 1, 1)])
def test_what_this_library_saved_loads_as_it_is(shape: tuple[int, int, int], tmp_path: Path) -> None:
    """The file records which library saved it. Files load as they are also within another module, and through
    `load_spconv_state_dict`."""
    conv, other = (nn.ModuleDict({"last": spconv.SubMConv3d(*shape)}) for _ in range(2))
    torch.save(conv.state_dict(), tmp_path / "last.pt")
    state = torch.load(tmp_path / "last.pt")
    other.load_state_dict(state)
    assert torch.equal(other["last"].weight, conv["last"].weight)
    nn.init.zeros_(other["last"].weight)
    assert not spconv.load_spconv_state_dict(other, state).converted
    assert torch.equal(other["last"].weight, conv["last"].weight)


def test_kernels_of_one_site_are_the_same_in_all_layouts() -> None:
    conv, other = spconv.SubMConv3d(5, 1, 1), spconv.SubMConv3d(5, 1, 1)
    other.load_state_dict(saved(conv, "KRSC"))
    assert torch.equal(other.weight, conv.weight)


def test_load_state_dict_itself_converts_what_shapes_settle() -> None:
    network = spconv.SparseSequential(spconv.SubMConv3d(4, 16, 3), spconv.SparseConv3d(16, 8, 2, 2))
    for layout in LAYOUTS:
        other = spconv.SparseSequential(spconv.SubMConv3d(4, 16, 3), spconv.SparseConv3d(16, 8, 2, 2))
        state = saved(network, layout)
        shapes = {key: value.shape for key, value in state.items()}
        other.load_state_dict(state)
        assert all(map(torch.equal, other.state_dict().values(), network.state_dict().values()))
        assert {key: value.shape for key, value in state.items()} == shapes  # the given dict stays unchanged


def test_wrong_checkpoints() -> None:
    network = a_network()
    state = saved(network, "RSCK")
    wrong: list[tuple[dict[str, Tensor], Any, str]] = [
        (state, "HWIO", "layout must be one of KRSC, RSKC, RSCK or None, got 'HWIO'"),
        (state, "KRSC", r"first.weight has shape \(3, 3, 3, 4, 16\).*the layout KRSC does not turn"),
        ({**state, "down.weight": torch.zeros(3, 3, 3, 16, 24)}, None, r"down.weight has shape .* no layout of spconv"),
        ({**state, "down.weight": torch.zeros(24, 3)}, None, r"down.weight has shape \(24, 3\).* no layout of spconv"),
    ]
    for given, layout, message in wrong:
        with pytest.raises(ValueError, match=message):
            spconv.load_spconv_state_dict(network, given, layout)
    without = {key: value for key, value in state.items() if key != "up.weight"}
    with pytest.raises(RuntimeError, match=r"up\.weight"):
        spconv.load_spconv_state_dict(network, without)
    report = spconv.load_spconv_state_dict(network, without | {"other": torch.ones(1)}, strict=False)
    assert (report.missing_keys, report.unexpected_keys) == (("up.weight",), ("other",))
    assert "up.weight" not in report.layouts
    assert str(report).endswith("1 missing: up.weight; 1 left out: other")
    for nothing in (None, [1.0]):
        with pytest.raises(TypeError, match=r"first\.weight must be a tensor, got (NoneType|list)"):
            spconv.load_spconv_state_dict(a_network(), {"first.weight": nothing})


def test_layouts_are_views() -> None:
    weight = torch.randn(3, 3, 3, 4, 5)
    assert fitting(weight, (4, 3, 3, 3, 5)) == ["RSKC"]
    assert fitting(weight, (5, 3, 3, 3, 4)) == ["RSCK"]
    assert fitting(weight, (3, 3, 3, 4, 5)) == ["KRSC"]
    assert as_krsc(weight, "RSCK").data_ptr() == weight.data_ptr()
