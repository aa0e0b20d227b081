"""Values are split with a batch, passed on, or refused before anything is copied."""

from __future__ import annotations

import functools
import types
from collections import ChainMap, OrderedDict, UserDict, UserList, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence

from rooftop.parallel.containers import holds_tensors, leaves
from rooftop.parallel.data_parallel import DataParallel, gather, replicate, scatter

TWO, THREE = ["cpu"] * 2, ["cpu"] * 3


class ItsOwnAttributes(dict[str, Any]):
    """A dict whose items can also be read as attributes, like EasyDict and argparse-like configurations."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.__dict__ = self


class WithAttributes(dict[str, Any]):
    pass


class Frozen(Mapping[str, Any]):
    """A user-defined Mapping."""

    def __init__(self, items: Mapping[str, Any], version: int = 1) -> None:
        self._items, self._count, self.version = dict(items), len(items), version

    def __getitem__(self, key: str) -> Any:
        return self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)


class Encoded(UserDict[str, Any]):
    """Built like transformers' BatchEncoding: items, and an attribute with an entry for each sample."""

    def __init__(self, data: dict[str, Any], encodings: list[str]) -> None:
        super().__init__(data)
        self._encodings = encodings


@pytest.mark.parametrize(
    "kind", [dict, OrderedDict, UserDict, ChainMap, types.MappingProxyType, ItsOwnAttributes, Frozen, defaultdict]
)
@given(batch=st.integers(0, 9), count=st.integers(1, 4))
def test_every_mapping_is_opened(kind: Callable[..., Any], batch: int, count: int) -> None:
    items = {"x": torch.randn(batch, 2), "y": {"z": torch.arange(batch)}}
    mapping = defaultdict(list, items) if kind is defaultdict else kind(items)
    shares = scatter(mapping, ["cpu"] * count)
    assert all(type(share) is type(mapping) and list(share) == list(mapping) for share in shares)
    assert [len(share["x"]) for share in shares] == [len(share["y"]["z"]) for share in shares]
    assert torch.equal(torch.cat([share["x"] for share in shares]), items["x"])
    assert torch.equal(gather(shares, "cpu")["y"]["z"], items["y"]["z"])


def test_attributes_of_mappings_are_cut_with_their_items() -> None:
    both = ItsOwnAttributes(x=torch.arange(5))
    beside = WithAttributes(x=torch.arange(5))
    beside.mask, beside.names, beside.scale = torch.arange(5), list("abcde"), 2.0  # type: ignore[attr-defined]
    encoded = Encoded({"ids": torch.arange(5)}, list("abcde"))
    shares = scatter((both, beside, encoded), TWO)
    assert [share[0].x.tolist() for share in shares] == [[0, 1, 2], [3, 4]]
    assert [share[1].mask.tolist() for share in shares] == [[0, 1, 2], [3, 4]]
    assert [(share[1].names, share[1].scale) for share in shares] == [(["a", "b", "c"], 2.0), (["d", "e"], 2.0)]
    assert [(share[2]["ids"].tolist(), share[2]._encodings) for share in shares] == [
        ([0, 1, 2], ["a", "b", "c"]),
        ([3, 4], ["d", "e"]),
    ]
    assert len(both.x) == len(beside.mask) == len(encoded._encodings) == 5  # type: ignore[attr-defined]


def test_a_mapping_that_cannot_be_made_anew_is_refused() -> None:
    with pytest.raises(
        TypeError, match="Frozen has attributes besides its items, which a new one would lose: use a dict"
    ):
        scatter(Frozen({"x": torch.ones(4)}, version=7), TWO)
    settings = Frozen({"a": 1}, version=7)  # no item of this mapping is split
    assert all(share[1] is settings for share in scatter((torch.ones(4), settings), TWO))


# Lists and arrays beside tensors


@given(batch=st.integers(0, 9), count=st.integers(1, 4), dim=st.sampled_from([0, 1, -1]))
def test_what_is_as_long_as_the_batch_is_cut_with_it(batch: int, count: int, dim: int) -> None:
    x = torch.arange(batch).expand(batch, batch) if dim else torch.arange(batch)
    names = [f"name {number}" for number in range(batch)]
    longer = [*names, "another"]
    given = (
        x, names, tuple(names), UserList(names), deque(names), range(batch), np.arange(batch),
        [names, longer], longer, 7, "text", (3,) * batch,
    )  # fmt: skip
    given = (*given[:6], np.asarray(x), *given[7:])
    for share in scatter(given, ["cpu"] * count, dim):
        rows = share[0].select(0, 0).tolist() if dim and batch else share[0].reshape(-1).tolist()
        mine = [f"name {number}" for number in rows]
        assert [list(part) for part in share[1:5]] == [mine] * 4
        assert [type(part) for part in share[1:5]] == [list, tuple, UserList, deque]
        assert list(share[5]) == rows
        assert share[6].shape == tuple(share[0].shape)
        assert share[7] == ([mine, longer] if batch != 2 else share[7])
        assert share[8:] == (longer, 7, "text", (3,) * batch)


def test_one_item_for_each_sample_may_hold_tensors_of_any_size() -> None:
    images = torch.arange(3).view(3, 1)
    boxes = [{"boxes": torch.full((number, 4), float(number)), "name": f"{number}"} for number in (5, 0, 3)]
    crops = [torch.full((2, number), number) for number in (7, 8, 9)]
    scalars = [torch.tensor(float(number)) for number in range(3)]
    first, second = scatter((images, boxes, crops, scalars), TWO)
    assert [target["name"] for target in first[1]] == ["5", "0"]
    assert second[1][0]["boxes"].shape == (3, 4)
    assert [crop.shape for crop in (*first[2], *second[2])] == [(2, 7), (2, 8), (2, 9)]
    assert (first[3], second[3]) == (scalars[:2], scalars[2:])


def test_lists_of_tensors_that_could_be_read_both_ways_are_refused() -> None:
    x, states = torch.ones(2, 3), [torch.ones(2, 4), torch.zeros(2, 4)]
    with pytest.raises(
        ValueError,
        match=r"a list of 2 items is ambiguous with 2 samples .* To split each tensor, pass a tuple\. .* stack",
    ):
        scatter((x, states), TWO)
    with pytest.raises(ValueError, match="a list of 2 items is ambiguous with 2 samples"):
        scatter({"x": x, "targets": [{"boxes": torch.ones(2, 4)} for _ in range(2)]}, TWO)
    assert [len(share[1]) for share in scatter((x, tuple(states)), TWO)] == [2, 2]
    assert [[len(part) for part in share] for share in scatter([x, *states], TWO)] == [[1, 1, 1]] * 2
    # the form that loaders return
    assert [len(share["batch"]) for share in scatter({"batch": [x, x + 1]}, TWO)] == [2, 2]
    assert scatter((x, states), ["cpu"])[0][1][0].shape == (2, 4)


def test_tuples_of_settings_are_not_samples() -> None:
    x = torch.ones(2, 3)
    settings = ((224, 224), (True, False), (None, None), (torch.float32, torch.int64), ((2, 2), (1, 1)))
    assert all(share[1] == settings for share in scatter((x, settings), TWO))


class Echo(nn.Module):
    def forward(self, mode: Any, other: Any, x: Tensor, names: Any = None) -> tuple[Tensor, Any]:
        assert (mode, other) == ("a", "b")
        return x, len(x) if names is None else torch.tensor([int(name) for name in names])


def test_arguments_themselves_are_never_a_list_of_samples() -> None:
    parallel = DataParallel(Echo(), TWO)
    x = torch.arange(2)
    assert parallel("a", "b", x)[0].tolist() == [0, 1]
    assert parallel("a", other="b", x=x)[0].tolist() == [0, 1]
    out, names = parallel("a", "b", torch.arange(7), names=[str(number) for number in range(7)])
    assert torch.equal(out, names)


# Dataclasses


@dataclass(frozen=True, slots=True)
class Slotted:
    x: Tensor
    count: int = 0


@dataclass
class Counted:
    x: Tensor
    count: int = field(init=False)
    later: Tensor | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.count = len(self.x)


@dataclass
class Halved:
    x: Tensor

    def __post_init__(self) -> None:
        self.x = self.x / 2


def test_dataclasses_keep_what_stands_in_them() -> None:
    counted = Counted(torch.arange(5))
    counted.later = torch.arange(5)
    counted.mask, counted.label = torch.arange(5), "label"  # type: ignore[attr-defined]
    shares = scatter((Slotted(torch.arange(5), 3), counted), TWO)
    assert [(share[0].x.tolist(), share[0].count) for share in shares] == [([0, 1, 2], 3), ([3, 4], 3)]
    for share, rows in zip(shares, ([0, 1, 2], [3, 4]), strict=True):
        assert share[1].x.tolist() == share[1].later.tolist() == share[1].mask.tolist() == rows
        assert (share[1].count, share[1].label) == (len(rows), "label")
    whole = gather([share[1] for share in shares], "cpu")
    assert (whole.count, whole.later.tolist(), whole.label) == (5, [0, 1, 2, 3, 4], "label")
    with pytest.raises(
        TypeError, match="Halved cannot be rebuilt with other values: its __post_init__ would change x twice"
    ):
        scatter(Halved(torch.ones(4)), TWO)


# Refusals


class Holder:
    def __init__(self, value: Any) -> None:
        self.value = [{"deep": value}]

    def method(self) -> None:
        pass


class Slots:
    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


@pytest.mark.parametrize("dim", [0, -1])
@pytest.mark.parametrize(
    ("made", "message"),
    [
        (Holder, r"Holder holds tensors and cannot be split: pass its tensors in tuples, lists, dicts or dataclasses"),
        (Slots, "Slots holds tensors"),
        (lambda x: Holder(Slots(x)), "Holder holds tensors"),
        (lambda x: {x}, "builtins.set holds tensors"),
        (lambda x: {"x": x}.values(), "dict_values holds tensors"),
        (lambda x: functools.partial(max, x), r"functools.partial holds tensors"),
        (lambda x: Holder(x).method, "builtins.method holds tensors"),
        (lambda x: x.add, "builtins.builtin_function_or_method holds tensors"),
        (lambda x: torch.distributions.Normal(x, 1), "Normal holds tensors"),
        (
            lambda x: (row for row in x),
            "builtins.generator cannot be split, because all replicas would read the same iterator: pass a l",
        ),
        (lambda x: zip(x, x, strict=True), "builtins.zip cannot be split"),
        (
            lambda x: pack_sequence([x]),
            r"PackedSequence cannot be split, since its rows are sorted by time\. Pass the pad",
        ),
        (lambda x: pack_sequence([x, x[:2]]), "PackedSequence cannot be split"),
        (lambda x: x.to_sparse(), r"a tensor of the layout torch\.sparse_coo cannot be split: pass a dense tensor"),
        (lambda x: torch.nested.nested_tensor([x, x[:2]], layout=torch.jagged), "a nested tensor cannot be split"),
    ],
)
def test_what_holds_tensors_and_cannot_be_cut_is_refused(made: Callable[[Tensor], Any], message: str, dim: int) -> None:
    x = torch.arange(4.0)
    for inputs in (made(x), (x, made(x)), {"x": x, "deep": [(made(x),)]}):
        with pytest.raises(TypeError, match=message):
            scatter(inputs, TWO, dim)


def test_objects_without_tensors_functions_and_modules_are_handed_on() -> None:
    handed = (Holder(3), len, nn.Linear(2, 2), torch.Generator(), Holder, {1, 2}, functools.partial(max, 1))
    assert all(share[1] == handed for share in scatter((torch.ones(3), handed), THREE))
    round_and_round = Holder(None)
    round_and_round.value.append({"self": round_and_round})
    assert not holds_tensors(round_and_round)


def test_sizes_are_compared_before_anything_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tensor, "narrow", lambda *args: pytest.fail("a share was made"))
    with pytest.raises(ValueError, match=r"have the same size there, got the shapes \(4,\), \(3, 2\)"):
        scatter((torch.ones(4), [torch.ones(3, 2)]), TWO)


# Outputs and attributes of modules


def test_what_operators_return_is_opened() -> None:
    x = torch.randn(5, 3)
    shares = scatter(x.max(1), TWO)
    assert [type(share) for share in shares] == [torch.return_types.max] * 2
    assert torch.equal(gather(shares, "cpu").indices, x.max(1).indices)


def test_outputs_that_cannot_be_joined_are_refused_by_name() -> None:
    packed = pack_sequence([torch.arange(3.0)])
    with pytest.raises(TypeError, match=r"PackedSequence cannot be gathered, .* Return the padded tensor"):
        gather([packed, packed], "cpu")
    with pytest.raises(TypeError, match=r"type .*Holder cannot be gathered: return tensors"):
        gather([Holder(torch.ones(1))] * 2, "cpu")
    assert gather([torch.Size([2])] * 2, "cpu") == (2,)


class InMappings(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tables = UserDict(scale=torch.ones(3))
        self.frozen = types.MappingProxyType({"shift": torch.ones(3)})


def test_tensors_in_mappings_of_a_module_go_along() -> None:
    module = InMappings()
    replica = replicate(module, TWO)[1]
    for name in ("tables", "frozen"):
        (theirs,) = leaves(getattr(module, name))
        (mine,) = leaves(getattr(replica, name))
        assert torch.equal(mine, theirs)
        assert mine is not theirs
