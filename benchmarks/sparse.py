"""Sparse convolutions and networks, compared with spconv and the roof, in ms.

    python benchmarks/sparse.py [--out benchmarks/results/h200/sparse.json] [--only wavy-100k-64 unet]

A submanifold convolution of 3 x 3 x 3 in float16, with its sites in random order, runs on a wavy surface and on a
room's floor, ceiling and walls. Four things are timed: the convolution including the build of its rulebook, the
convolution with a ready rulebook (shared by an indice_key), its backward, and the build alone. The networks are a U-Net
of four levels, MinkUNet18 and the backbone of SECOND, which build all their rulebooks. Each network runs inference with
float16 weights, inference under autocast, and a training step under autocast with SGD.

Variants of a case are interleaved, and figures are medians. Several sets of features alternate, so that they do not
come from L2. Rulebook and weights stay the same, as in a network. Calls that do not wait for the GPU are also replayed
from a CUDA graph. For this, networks need upper bounds on the numbers of outputs (`num_out_act_bound`). spconv has the
same weights. The row has the distance between spconv's results and ours, max |theirs - ours| / max |ours|, the distance
between a replay and its call, and the peak memory of a call. If a replay was expected, the row says why a call cannot
be captured. Roofs use the ceilings measured in the same run, and count only existing pairs. Rows are written after each
case. If a case fails, the others still run, and the run fails at the end. If spconv is not installed, the rows say so.
`--quick` tests the script on a CPU, with small inputs, and compares with the convolution on the dense grid.
"""

from __future__ import annotations

import argparse
import copy
import gc
import importlib
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import sparse_surfaces
import torch
import torch.nn.functional as F
from programs import imported
from sparse_networks import bounded, in_spconv, network_cost, settle
from torch import Tensor, nn

from rooftop import models, sparse
from rooftop.cost import Cost, CountingMode, roof
from rooftop.hardware import Ceilings, ceilings_of, compare, measure_ceilings, track
from rooftop.hardware.graphs import captured, waits_for_gpu
from rooftop.hardware.timing import rotated, rotated_copies
from rooftop.kernels import sparse_conv
from rooftop.models.point_clouds import sparse_unet
from rooftop.whole_files import write_json

Call = Callable[[], Any]
# tolerance of results: float16 changes them by less in about forty layers; different work changes them by about 1
FARTHEST = 0.1
FARTHEST_GRADIENT = 0.5  # tolerance of all parameters' gradients together; small gradients are only float16 noise
REPLAYED = ", replayed"
LOSS_SCALE = 2.0**14
SPCONV = "spconv"
# autograd runs a backward on the stream of its forward
STREAM = torch.cuda.Stream() if torch.cuda.is_available() else None


@dataclass(frozen=True)
class Scale:
    """The sizes of a run.

    Attributes:
        device: the device of the run.
        dtype: dtype of features.
        sites, channels: maximum sizes of a convolution.
        cloud: maximum number of sites of a network.
        small: whether networks have only a few levels, and a convolution is compared with the dense grid.
    """

    device: str = "cuda"
    dtype: torch.dtype = torch.float16
    sites: int = 1 << 31
    channels: int = 1 << 31
    cloud: int = 1 << 31
    small: bool = False


QUICK = Scale("cpu", torch.float32, sites=2000, channels=8, cloud=200, small=True)


@dataclass
class Work:
    """What one row measures.

    Attributes:
        what: the row's name, such as "conv".
        costs: the costs of the kernels that every variant has to run.
        goal_ms: the time that Rooftop should reach.
        calls: for each variant, one call per set of inputs.
        replayable: variants that are also replayed from a graph.
        apart: for each peer, the distance of its results from ours; for each replay, the distance from its call's
            results.
        farthest: the limit of `apart`.
        absent: variants that cannot be measured, and why.
    """

    what: str
    costs: list[Cost]
    goal_ms: float | None = None
    calls: dict[str, list[Call]] = field(default_factory=dict)
    replayable: set[str] = field(default_factory=set)
    apart: dict[str, float] = field(default_factory=dict)
    farthest: float = FARTHEST
    absent: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class ConvCase:
    """A convolution with as many input as output channels.

    Attributes:
        goals: times in ms with the build of the rulebook, without the build, and of backward.
    """

    surface: str
    sites: int
    channels: int
    goals: tuple[float, float, float]

    @property
    def names(self) -> set[str]:
        return {"conv", self.surface, f"{self.surface}-{thousands(self.sites)}-{self.channels}"}

    def works(self, scale: Scale) -> tuple[dict[str, Any], Iterator[Work]]:
        sites, channels = min(self.sites, scale.sites), min(self.channels, scale.channels)
        indices, shape = getattr(sparse_surfaces, self.surface)(sites, scale.device)
        geometry = sparse.geometry(1, shape, 3, subm=True)
        pairs = int((sparse.build_rulebook(indices, geometry).neighbours >= 0).sum())
        known = {"surface": self.surface, "sites": sites, "channels": channels}
        known["neighbours"] = round(pairs / sites, 2)
        goals = self.goals if sites == self.sites else (None, None, None)
        return known, conv_works(indices, shape, channels, pairs, goals, scale)


@dataclass(frozen=True)
class NetworkCase:
    """A network on a point cloud.

    Attributes:
        build: creates the network, in float32.
        cloud: function of (number of sites, device) that returns sites and grid.
        goals: ms of inference and of a training step, if there are goals.
    """

    model: str
    sites: int
    build: Callable[[Scale], nn.Module]
    cloud: Callable[[int, str], sparse_surfaces.Surface]
    goals: tuple[float | None, float | None] = (None, None)

    @property
    def names(self) -> set[str]:
        return {"networks", self.model, f"{self.model}-{thousands(self.sites)}"}

    def works(self, scale: Scale) -> tuple[dict[str, Any], Iterator[Work]]:
        indices, shape = self.cloud(min(self.sites, scale.cloud), scale.device)
        known = {"model": self.model, "sites": len(indices), "batch": int(indices[:, 0].max()) + 1}
        model = self.build(scale).to(scale.device)
        goals = self.goals if self.sites <= scale.cloud else (None, None)
        return known, network_works(model, indices, shape, known["batch"], goals, scale)


Case = ConvCase | NetworkCase


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = sorted(set().union(*(case.names for case in CASES)))
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--works", nargs="+", metavar="WORK", help='only these works of the cases, as "training step"')
    parser.add_argument("--seconds", type=float, default=0.1, help="seconds to measure each variant")
    parser.add_argument("--quick", action="store_true", help="a small run on the CPU, to test the script")
    options = parser.parse_args()
    if not options.quick and not torch.cuda.is_available():
        parser.error("needs an NVIDIA GPU; --quick tests the script on a CPU")
    scale = QUICK if options.quick else Scale()
    ceilings = ceilings_of("h200") if options.quick else measure_ceilings("cuda")
    spconv = imported("spconv.pytorch")
    versions = {**ceilings.versions, SPCONV: spconv if isinstance(spconv, str) else version_of(SPCONV)}
    found: dict[str, Any] = {"environment": {"device": ceilings.device, "versions": versions}}
    found |= {"dtype": str(scale.dtype).removeprefix("torch."), "rows": [], "failed": {}}
    for case in CASES:
        if not case.names & set(options.only):
            continue
        try:
            with torch.cuda.stream(STREAM):
                for row in measure_case(case, scale, ceilings, options.seconds, options.works):
                    found["rows"].append(row)
                    if options.out:
                        write_json(options.out, found)
        except Exception as error:  # continue, because the other cases are still useful
            traceback.print_exc()
            found["failed"][max(case.names, key=len)] = f"{type(error).__name__}: {error}"
            if options.out:
                write_json(options.out, found)
    if found["failed"]:
        print("failed:", *found["failed"])
    return 1 if found["failed"] else 0


def version_of(package: str) -> str:
    """The version of the distribution that has a package. (spconv's distributions have the CUDA version in their
    names.)"""
    return metadata.version(metadata.packages_distributions()[package][0])


def thousands(sites: int) -> str:
    return f"{sites // 1000}k"


# ---- one case ----------------------------------------------------------------------------------------------------


def measure_case(
    case: Case, scale: Scale, ceilings: Ceilings, seconds: float, wanted: Sequence[str] | None = None
) -> Iterator[dict[str, Any]]:
    """Measure and print a row for each `Work` of a case.

    Args:
        wanted: names of works; None: all.

    Raises:
        RuntimeError: a variant's results differ from ours, so the variant does different work.
    """
    gc.collect()
    if scale.device == "cuda":
        torch.cuda.empty_cache()  # free the memory of the previous case
    torch.manual_seed(0)
    known, works = case.works(scale)
    print(*(f"{key} {value}" for key, value in known.items()))
    far = {}
    for work in works:
        if wanted is not None and work.what not in wanted:
            continue
        yield measure_work(work, known, scale, ceilings, seconds)
        far |= {f"{work.what}, {name}": value for name, value in work.apart.items() if not value <= work.farthest}
    if far:
        raise RuntimeError(
            f"expected results within {FARTHEST} of ours, gradients within {FARTHEST_GRADIENT}; got {far}"
        )


def measure_work(work: Work, known: dict[str, Any], scale: Scale, ceilings: Ceilings, seconds: float) -> dict[str, Any]:
    roof_ms = sum(roof(cost, ceilings).ms for cost in work.costs)
    sets = {name: len(calls) for name, calls in work.calls.items()}
    peaks = {name: round(peak_mib(calls[0], scale.device), 1) for name, calls in work.calls.items()}
    calls = {name: rotated(lambda call: call(), [(call,) for call in each]) for name, each in work.calls.items()}
    calls |= replays_of(work) if scale.device == "cuda" else {}
    timings = compare(calls, device=scale.device, seconds=seconds, warm_up_seconds=seconds / 2)
    # A replay computes all sets, a call computes one set.
    done = {name: 1 if name in sets else sets[name.removesuffix(REPLAYED)] for name in timings}
    rates = {name: timing.median_ms / done[name] for name, timing in timings.items()}
    spread = {name: timing.spread for name, timing in timings.items()}
    print(f"  {work.what}: roof {roof_ms:.4f} ms" + ("" if work.goal_ms is None else f", goal {work.goal_ms:.2f} ms"))
    for name, ms in rates.items():
        apart = work.apart.get(name)
        far = "" if apart is None else f", {apart:.1e} from " + ("the call" if name.endswith(REPLAYED) else "ours")
        print(f"    {name:28}{ms:9.3f} ms{ms / rates['rooftop']:7.2f} of ours{100 * roof_ms / ms:7.1f}% of roof{far}")
    for name, why in work.absent.items():
        print(f"    {name:28}{why}")
    sys.stdout.flush()
    row = {**known, "work": work.what, "unit": "ms", "roof": roof_ms, "goal_ms": work.goal_ms, "rates": rates}
    row |= {"spread": spread, "peak_mib": peaks, "apart": work.apart, "absent": work.absent}
    return row


def peak_mib(call: Call, device: str) -> float:
    """Peak memory of a call, in addition to the memory in use before it."""
    call()  # compiles, tunes
    with track(device) as tracked:
        call()
    return tracked.peak_increase_bytes / 2**20


def replays_of(work: Work) -> dict[str, Call]:
    """For each variant, replay a CUDA graph with the calls of all sets, and compare the results with the calls'
    results. `work.absent` records calls that cannot be captured."""
    found = {}
    for name in [name for name in work.calls if name in work.replayable]:
        try:
            found[name + REPLAYED], work.apart[name + REPLAYED] = replayed(work.calls[name])
        except Exception as error:  # continue, since the eager calls can still be measured
            torch.cuda.synchronize()
            if not name.startswith(SPCONV):
                traceback.print_exc()
            first = str(error).splitlines()[0] if str(error) else ""
            work.absent[name + REPLAYED] = f"cannot be captured: {type(error).__name__}: {first}"
    return found


def replayed(calls: list[Call]) -> tuple[Call, float]:
    """Capture all calls in a graph, and return its replay and the distance of its results from the calls' results.

    Raises:
        RuntimeError: the host waits for the GPU, or the capture fails.
    """
    if waits_for_gpu(calls[0]):
        raise RuntimeError("the host waits for the GPU")
    held: list[Any] = []  # the results, at the addresses to which the graph writes

    def run() -> None:
        held[:] = [call() for call in calls]

    replay = captured(run, STREAM)
    expected = [tensor.clone() for call in calls for tensor in flat(call())]
    replay()
    torch.cuda.synchronize()
    return replay, apart([tensor for result in held for tensor in flat(result)], expected)


def apart(theirs: Sequence[Tensor], ours: Sequence[Tensor]) -> float:
    """max |theirs - ours| / max |ours|, the worst over these pairs of tensors."""
    pairs = [(a.double(), b.double()) for a, b in zip(theirs, ours, strict=True)]
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)


# ---- one convolution ---------------------------------------------------------------------------------------------


def conv_works(
    indices: Tensor, shape: list[int], channels: int, pairs: int, goals: Sequence[float | None], scale: Scale
) -> Iterator[Work]:
    """The measurements of a convolution: with and without the build of its rulebook, its backward, and the build
    alone."""
    conv = sparse.SubMConv3d(channels, channels, 3, bias=False, indice_key="sites")
    conv = conv.to(scale.device, scale.dtype)
    features = torch.randn(len(indices), channels, device=scale.device, dtype=scale.dtype)
    cache = torch.cuda.get_device_properties(0).L2_cache_size if scale.device == "cuda" else 0
    sets = [copies[0] for copies in rotated_copies([features], cache)]
    dy = torch.randn_like(features)
    spconv = imported("spconv.pytorch")
    absent = {SPCONV: spconv} if isinstance(spconv, str) else {}
    libraries: dict[str, tuple[Any, Any]] = {"rooftop": (sparse, conv)}
    if not absent:
        libraries[SPCONV] = (spconv, in_spconv(conv, spconv))
    rulebook, product, backward = conv_costs(indices, shape, conv, features, dy, pairs)
    works = [
        Work("rulebook+conv", [rulebook, product], goals[0], replayable={"rooftop"}),
        Work("conv", [product], goals[1], replayable={"rooftop", SPCONV}),
        Work("backward", [backward], goals[2], replayable={"rooftop", SPCONV}),
        Work("rulebook", [rulebook], replayable={"rooftop"}),
    ]
    results: dict[str, list[list[Tensor]]] = {}
    for name, (library, module) in libraries.items():
        builder = partial(built if name == "rooftop" else built_by_spconv, indices, shape)
        try:
            calls = [*conv_calls(library, module, indices, shape, sets, dy), [builder]]
            results[name] = [flat(each[0]()) for each in calls[:3]]
        except Exception as error:
            absent |= failed(name, error)
            continue
        for work, each in zip(works, calls, strict=True):
            work.calls[name] = each
    for work, theirs, ours in zip(works, results.get(SPCONV, []), results["rooftop"], strict=False):
        work.apart[SPCONV] = apart(theirs, ours)
    if scale.small:
        add_dense(works[1], conv, sparse.SparseConvTensor(features, indices, shape, 1), results["rooftop"][1][0])
    for work in works:
        work.absent |= absent
        yield work


def conv_calls(
    library: Any, conv: Any, indices: Tensor, shape: list[int], sets: list[Tensor], dy: Tensor
) -> tuple[list[Call], list[Call], list[Call]]:
    """The calls of a convolution for each set of features: with the build of its rulebook, with a ready rulebook, and
    backward."""

    def whole(features: Tensor) -> Tensor:
        with torch.no_grad():
            found: Tensor = conv.eval()(library.SparseConvTensor(features, indices, shape, 1)).features
            return found

    def ready(features: Tensor) -> Tensor:
        with torch.no_grad():
            found: Tensor = conv.eval()(known.replace_feature(features)).features
            return found

    def back(y: Tensor, features: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(y, (features, conv.weight), dy, retain_graph=True)

    with torch.no_grad():
        known = conv.eval()(library.SparseConvTensor(sets[0], indices, shape, 1))
    tapes, trained = [], None
    for each in sets:
        features = each.detach().clone().requires_grad_()
        first = library.SparseConvTensor(features, indices, shape, 1)
        trained = conv.train()(first if trained is None else trained.replace_feature(features))
        tapes.append((trained.features, features))
    return (
        [partial(whole, each) for each in sets],
        [partial(ready, each) for each in sets],
        [partial(back, *tape) for tape in tapes],
    )


def built(indices: Tensor, shape: list[int]) -> Any:
    """Build a rulebook as a convolution uses it: with its table sorted into an order of rows, unless the plain table is
    as fast."""
    table = sparse.build_rulebook(indices, sparse.geometry(1, shape, 3, subm=True)).table
    return table.rows() if table.order is None else table.order


def built_by_spconv(indices: Tensor, shape: list[int]) -> Any:
    """Build spconv's rulebook as spconv's module does in inference."""
    spconv = importlib.import_module("spconv.pytorch")
    ones = [1] * 3
    return spconv.ops.get_indice_pairs_implicit_gemm(
        indices, 1, shape, spconv.ConvAlgo.MaskImplicitGemm, [3] * 3, ones, ones, ones, [0] * 3, subm=True,
        transpose=False, is_train=False,
    )  # fmt: skip


def conv_costs(
    indices: Tensor, shape: list[int], conv: Any, features: Tensor, dy: Tensor, pairs: int
) -> tuple[Cost, Cost, Cost]:
    """The costs of the rulebook, the convolution and its backward, by the operators' own formulas."""
    x = features.detach().clone().requires_grad_()
    with CountingMode() as mode:
        rulebook = sparse.build_rulebook(indices, sparse.geometry(1, shape, 3, subm=True))
        y = sparse_conv(x, conv.weight, None, rulebook.neighbours, pair_count=pairs)
        torch.autograd.grad(y, (x, conv.weight), dy)
    costs = {record.name.removeprefix("rooftop::"): record.cost for record in mode.records if record.cost}
    return costs["sparse_rulebook"], costs["sparse_conv"], costs["sparse_conv_backward"]


def add_dense(work: Work, conv: Any, x: sparse.SparseConvTensor, ours: Tensor) -> None:
    """Add the convolution on the whole dense grid. Creating the grid is not timed."""
    grid, weight = x.dense(), conv.weight.detach().permute(0, 4, 1, 2, 3).contiguous()
    work.calls["dense grid"] = [lambda: F.conv3d(grid, weight, padding=1)]
    found = F.conv3d(grid, weight, padding=1).movedim(1, -1)[tuple(x.indices.long().t())]
    work.apart["dense grid"] = apart([found], [ours])


def flat(result: Any) -> list[Tensor]:
    return [each for each in result if each is not None] if isinstance(result, tuple) else [result]


# ---- one network -------------------------------------------------------------------------------------------------


def network_works(
    model: nn.Module, indices: Tensor, shape: list[int], batch: int, goals: Sequence[float | None], scale: Scale
) -> Iterator[Work]:
    """The measurements of a network: inference and a training step. Both start from the sites, and include the build of
    all rulebooks."""
    features = torch.randn(len(indices), 4, device=scale.device)
    narrow = features.to(scale.dtype)
    x = sparse.SparseConvTensor(narrow, indices, shape, batch)
    settle(model, sparse.SparseConvTensor(features, indices, shape, batch))
    half = copy.deepcopy(model).to(scale.dtype).eval()
    with torch.no_grad():
        result = result_of(half(x))
    spconv = imported("spconv.pytorch")
    absent = {SPCONV: spconv} if isinstance(spconv, str) else {}

    def tensor(library: Any, features: Tensor) -> Any:
        return library.SparseConvTensor(features, indices, shape, batch)

    def plain(network: nn.Module, library: Any) -> Tensor:
        with torch.no_grad():
            return result_of(network(tensor(library, narrow)))

    def autocast(network: nn.Module, library: Any) -> Tensor:
        with torch.no_grad(), torch.autocast(scale.device, torch.float16, enabled=scale.device == "cuda"):
            return result_of(network(tensor(library, features)))

    wide = copy.deepcopy(model).eval()
    work = Work("inference", [network_cost(half, x, result, False)], goals[0], replayable={"rooftop, bounded"})
    work.calls["rooftop"] = [partial(plain, half, sparse)]
    work.calls["rooftop, bounded"] = [partial(plain, bounded(half, x), sparse)]
    work.calls["rooftop, autocast"] = [partial(autocast, wide, sparse)]
    if not absent:
        work.calls[SPCONV] = [partial(plain, in_spconv(half, spconv), spconv)]
        work.calls[f"{SPCONV}, autocast"] = [partial(autocast, in_spconv(wide, spconv), spconv)]
    work.absent |= absent
    compare_results(work, lambda call: apart([call()], [result]))
    yield work

    work = Work("training step", [network_cost(model, x, result, True)], goals[1], replayable={"rooftop, bounded"})
    networks: dict[str, tuple[nn.Module, Any]] = {"rooftop": (model, sparse)}
    networks["rooftop, bounded"] = (bounded(model, tensor(sparse, features)), sparse)
    if not absent:
        networks[SPCONV] = (in_spconv(model, spconv), spconv)
    work.absent |= absent
    work.farthest = FARTHEST_GRADIENT
    target = targets_of(result)
    for name, (network, library) in networks.items():
        work.calls[name] = [TrainingStep(network.train(), partial(tensor, library, features), target, scale)]
    ours = work.calls["rooftop"][0].gradient()
    compare_results(work, lambda step: float((step.gradient() - ours).norm() / ours.norm()))
    yield work


def compare_results(work: Work, how: Callable[[Any], float]) -> None:
    """The distance of each variant's results from ours. Peers that cannot run are recorded and left out."""
    for name in [name for name in work.calls if name != "rooftop"]:
        try:
            work.apart[name] = how(work.calls[name][0])
        except Exception as error:
            work.absent |= failed(name, error)
            del work.calls[name]


def failed(name: str, error: Exception) -> dict[str, str]:
    """Record that a peer cannot run, and why.

    Raises:
        Exception: the error, if it is not a peer's.
    """
    if not name.startswith(SPCONV):
        raise error
    return {name: f"fails: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"}


class TrainingStep:
    """A callable that makes a training step: forward under autocast, loss, backward, SGD with momentum."""

    def __init__(self, network: nn.Module, tensor: Callable[[], Any], target: Tensor | None, scale: Scale) -> None:
        self.network, self.tensor, self.target = network, tensor, target
        self.device = scale.device
        self.optimizer = torch.optim.SGD(network.parameters(), lr=1e-4 / LOSS_SCALE, momentum=0.9, fused=True)

    def __call__(self) -> Tensor:
        self.optimizer.zero_grad()
        with torch.autocast(self.device, torch.float16, enabled=self.device == "cuda"):
            found = result_of(self.network(self.tensor()))
            loss = found.float().square().mean() if self.target is None else F.cross_entropy(found, self.target)
        (loss * LOSS_SCALE).backward()  # gradients of a mean over 100 k sites are too small for float16
        self.optimizer.step()
        return loss.detach()

    def gradient(self) -> Tensor:
        """The gradients of all parameters in one tensor, (P,), after a step."""
        self()
        gradients = [p.grad.flatten().double() for p in self.network.parameters() if p.grad is not None]
        return torch.cat(gradients)


def result_of(found: Any) -> Tensor:
    """The part of the network's output for the loss: the logits of sites, or the dense map."""
    result: Tensor = found if isinstance(found, Tensor) else found.features
    return result


def targets_of(result: Tensor) -> Tensor | None:
    """Labels of the sites; None for networks that return a map."""
    return torch.randint(result.shape[1], (len(result),), device=result.device) if result.dim() == 2 else None


def unet(scale: Scale) -> nn.Module:
    return models.SparseUNet(4, 20, (4, 8) if scale.small else sparse_unet.PLANES)


def minkunet18(scale: Scale) -> nn.Module:
    return models.MinkUNet((1,) * 8, 4, 20, (4,) * 8) if scale.small else models.minkunet18(4, 20)


def second(scale: Scale) -> nn.Module:
    return models.second_backbone()


def scans(sites: int, device: str) -> sparse_surfaces.Surface:
    """At most this many voxels, from four scans, or from one scan for a small number."""
    voxels, shape = sparse_surfaces.road(4 if sites > 30_000 else 1, device)
    return voxels[:sites], shape


CASES: tuple[Case, ...] = (
    ConvCase("wavy", 100_000, 64, (0.30, 0.08, 0.25)),
    ConvCase("wavy", 400_000, 64, (0.45, 0.12, 0.40)),
    ConvCase("wavy", 400_000, 128, (0.45, 0.18, 0.60)),
    ConvCase("wavy", 1_000_000, 64, (0.70, 0.25, 0.90)),
    ConvCase("room", 149_000, 64, (0.30, 0.10, 0.30)),
    ConvCase("room", 549_000, 64, (0.45, 0.17, 0.55)),
    ConvCase("room", 549_000, 128, (0.90, 0.50, 1.30)),
    ConvCase("room", 1_120_000, 64, (0.85, 0.35, 1.10)),
    NetworkCase("unet", 149_000, unet, sparse_surfaces.room, (3.5, 10)),
    NetworkCase("unet", 549_000, unet, sparse_surfaces.room, (6.5, 15)),
    NetworkCase("minkunet18", 400_000, minkunet18, sparse_surfaces.wavy),
    NetworkCase("second", 125_000, second, scans),
)

if __name__ == "__main__":
    sys.exit(main())
