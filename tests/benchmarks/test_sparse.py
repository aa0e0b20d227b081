"""The benchmark of sparse convolutions runs in a small size on a CPU, next to its peer, and survives failures."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import runpy
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from rooftop import sparse

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "benchmarks" / "sparse.py"
TABLES = runpy.run_path(str(ROOT / "benchmarks" / "kernels" / "tables.py"))
WORKS = ["rulebook+conv", "conv", "backward", "rulebook"]
NETWORK_WORKS = ["inference", "training step"]
Run = Callable[..., tuple[int | str | None, dict[str, Any]]]


@pytest.fixture(autouse=True)
def no_spconv(monkeypatch: pytest.MonkeyPatch) -> None:
    """spconv counts as not installed, unless a test provides a replacement."""
    monkeypatch.delitem(sys.modules, "spconv.pytorch", raising=False)
    monkeypatch.setitem(sys.modules, "spconv", None)


class Foreign:
    """A tensor with spconv's names that is not Rooftop's tensor class."""

    def __init__(
        self, features: Tensor, indices: Tensor, spatial_shape: Sequence[int], batch_size: int,
        grid: Tensor | None = None, voxel_num: Tensor | None = None, indice_dict: dict[str, Any] | None = None,
    ) -> None:  # fmt: skip
        self.features, self.indices = features, indices
        self.spatial_shape, self.batch_size = list(spatial_shape), batch_size
        self.indice_dict = {} if indice_dict is None else indice_dict

    def replace_feature(self, features: Tensor) -> Foreign:
        return type(self)(features, self.indices, self.spatial_shape, self.batch_size, None, None, self.indice_dict)

    def dense(self) -> Tensor:
        return ours(self).dense()


def ours(x: Foreign) -> sparse.SparseConvTensor:
    assert type(x) is Foreign, "spconv got a tensor of Rooftop's class"
    return sparse.SparseConvTensor(x.features, x.indices, x.spatial_shape, x.batch_size, indice_dict=x.indice_dict)


class ForeignConvolution(torch.nn.Module):
    """Turn a convolution of Rooftop's into one for foreign tensors."""

    def forward(self, x: Foreign) -> Foreign:
        y = super().forward(ours(x))
        return Foreign(y.features, y.indices, y.spatial_shape, y.batch_size, None, None, y.indice_dict)


class ForeignSequential(torch.nn.Sequential):
    """Like spconv's class: sparse modules get the tensor, others its features."""

    def forward(self, x: Any) -> Any:
        for module in self:
            if isinstance(module, (ForeignConvolution, ForeignSequential)):
                x = module(x)
            else:
                x = x.replace_feature(module(x.features))
        return x


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Modules with spconv's names that compute like Rooftop's, but with another tensor class."""
    module = ModuleType("spconv.pytorch")
    for name in ("SubMConv3d", "SparseConv3d", "SparseInverseConv3d"):
        setattr(module, name, type(name, (ForeignConvolution, getattr(sparse, name)), {}))
    module.SparseSequential = ForeignSequential  # type: ignore[attr-defined]
    module.SparseConvTensor = Foreign  # type: ignore[attr-defined]
    module.ConvAlgo = sparse.ConvAlgo  # type: ignore[attr-defined]
    module.ops = SimpleNamespace(  # type: ignore[attr-defined]
        get_indice_pairs_implicit_gemm=lambda indices, batch, shape, algo, *sizes, subm, transpose, is_train: (
            sparse.get_indice_pairs(indices, batch, shape, *sizes, subm, transpose)
        )
    )
    package = ModuleType("spconv")
    package.pytorch = module  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "spconv", package)
    monkeypatch.setitem(sys.modules, "spconv.pytorch", module)
    monkeypatch.setattr("importlib.metadata.packages_distributions", lambda: {"spconv": ["torch"]})
    return module


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The folder in which the script finds its neighbouring files."""
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    yield
    for name in ("sparse_surfaces", "sparse_networks"):
        sys.modules.pop(name, None)


@pytest.fixture
def short_road(monkeypatch: pytest.MonkeyPatch, folder: None) -> None:
    """The near part of a scan, because a detector's dense map takes most of the time on KITTI's whole grid."""
    import sparse_surfaces

    whole = sparse_surfaces.road

    def near(scans: int, device: str) -> tuple[Tensor, list[int]]:
        voxels, (z, _, _) = whole(scans, device)
        inside = (voxels[:, 2] >= 600) & (voxels[:, 2] < 1000) & (voxels[:, 3] < 352)
        return voxels[inside] - torch.tensor([0, 0, 600, 0], dtype=torch.int32), [z, 400, 352]

    monkeypatch.setattr(sparse_surfaces, "road", near)


@pytest.fixture
def benchmark_module(monkeypatch: pytest.MonkeyPatch, folder: None) -> ModuleType:
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("sparse_benchmark", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, short_road: None) -> Run:
    """Run the script for a moment; return its exit status and its file."""

    def script(*words: str) -> tuple[int | str | None, dict[str, Any]]:
        out = tmp_path / "folder" / "sparse.json"
        command = [SCRIPT.name, "--quick", "--seconds", "0.0005", "--out", str(out), *words]
        monkeypatch.setattr(sys, "argv", command)
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(SCRIPT), run_name="__main__")
        return ended.value.code, json.loads(out.read_text())

    return script


def test_a_convolution_beside_the_dense_grid_and_its_table(run: Run, tmp_path: Path) -> None:
    status, found = run("--only", "room-149k-64")
    assert (status, found["failed"]) == (0, {})
    assert [row["work"] for row in found["rows"]] == WORKS
    for row in found["rows"]:
        assert (row["surface"], row["sites"], row["channels"], row["goal_ms"]) == ("room", 2000, 8, None)
        assert 8.5 < row["neighbours"] < 9.5
        assert row["roof"] > 0
        assert set(row["rates"]) == ({"rooftop", "dense grid"} if row["work"] == "conv" else {"rooftop"})
        assert row["absent"]["spconv"].startswith("not installed: spconv")
    assert found["rows"][1]["apart"]["dense grid"] < 1e-5
    assert found["rows"][0]["roof"] == pytest.approx(found["rows"][1]["roof"] + found["rows"][3]["roof"])
    page = "<!-- figures: sparse.json -->\n<!-- end of figures -->\n"
    lines = TABLES["with_figures"](page, tmp_path / "folder").splitlines()
    assert "| surface | sites | channels | neighbours | work | roof | rooftop | dense grid |" in lines
    assert sum(line.startswith("| room | 2000 | 8 |") for line in lines) == len(WORKS)


@pytest.mark.parametrize("name", ["unet-149k", "minkunet18-400k", "second-125k", "wavy-100k-64"])
def test_a_peer_stands_in_every_row_and_does_the_same(name: str, run: Run, stand_in: ModuleType) -> None:
    status, found = run("--only", name)
    assert (status, found["failed"]) == (0, {})
    assert [row["work"] for row in found["rows"]] == (WORKS if name == "wavy-100k-64" else NETWORK_WORKS)
    for row in found["rows"]:
        assert {"rooftop", "spconv"} <= set(row["rates"])
        assert row["absent"] == {}
        assert row["apart"].get("spconv", 0) < 1e-5
        assert row["peak_mib"]["spconv"] > 0


def test_a_peer_that_does_something_else_fails_its_case_and_leaves_the_others(run: Run, stand_in: ModuleType) -> None:
    class Shifted(stand_in.SparseInverseConv3d):  # type: ignore[name-defined,misc]
        def forward(self, x: Foreign) -> Foreign:
            y: Foreign = super().forward(x)
            return y.replace_feature(y.features + 1)

    stand_in.SparseInverseConv3d = Shifted  # type: ignore[attr-defined]
    status, found = run("--only", "wavy-100k-64", "unet-149k")
    assert status == 1
    assert list(found["failed"]) == ["unet-149k"]
    assert "expected results within 0.1 of ours" in found["failed"]["unet-149k"]
    assert "inference, spconv" in found["failed"]["unet-149k"]
    assert len(found["rows"]) == len(WORKS) + 2  # what was measured is kept


def test_what_a_peer_cannot_do_is_said(run: Run, stand_in: ModuleType) -> None:
    def refuses(*words: Any, **options: Any) -> None:
        raise RuntimeError("no suitable algorithm\nat all")

    stand_in.SparseConvTensor = refuses  # type: ignore[attr-defined]
    status, found = run("--only", "wavy-100k-64")
    assert (status, found["failed"]) == (0, {})
    assert {row["absent"]["spconv"] for row in found["rows"]} == {"fails: RuntimeError: no suitable algorithm"}


@pytest.mark.parametrize("model", ["unet", "minkunet18", "second"])
@pytest.mark.usefixtures("short_road")
def test_networks_in_float32_on_features_in_float16(model: str, benchmark_module: Any, stand_in: ModuleType) -> None:
    """Dtypes are those of a GPU: features and the network for inference are float16, the trained network is float32."""
    case = next(case for case in benchmark_module.CASES if case.names >= {"networks", model})
    scale = dataclasses.replace(benchmark_module.QUICK, dtype=torch.float16)
    _, works = case.works(scale)
    for work in works:
        assert {"rooftop", "rooftop, bounded", "spconv"} <= set(work.calls)
        assert work.absent == {}
        assert all(value <= work.farthest for value in work.apart.values())
        assert list(work.costs[0].flops) == ["fp16"]


def test_what_cannot_be_captured_is_in_the_row(benchmark_module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(call: Callable[[], None], stream: object) -> None:
        call()
        raise NotImplementedError("no capture\nhere")

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(benchmark_module, "waits_for_gpu", lambda call: call() is None)
    work = benchmark_module.Work("step", [], replayable={"rooftop", "waits", "not there"})
    work.calls = {"rooftop": [lambda: torch.ones(2)], "waits": [lambda: None], "other": [lambda: torch.ones(2)]}
    monkeypatch.setattr(benchmark_module, "captured", refused)
    assert benchmark_module.replays_of(work) == {}
    assert work.absent == {
        "rooftop, replayed": "cannot be captured: NotImplementedError: no capture",
        "waits, replayed": "cannot be captured: RuntimeError: the host waits for the GPU",
    }


@pytest.mark.parametrize(("moved", "apart"), [(0.0, 0.0), (0.25, 0.125)])
def test_a_replay_is_compared_with_its_call(
    moved: float, apart: float, benchmark_module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = torch.tensor([1.0, 2.0])

    def capture(call: Callable[[], None], stream: object) -> Callable[[], None]:
        def replay() -> None:
            call()
            held.add_(moved)

        return replay

    held = result.clone()
    results = iter([result, held])  # times of the call and of the replay
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(benchmark_module, "waits_for_gpu", lambda call: False)
    monkeypatch.setattr(benchmark_module, "captured", capture)
    work = benchmark_module.Work("step", [], replayable={"rooftop"})
    work.calls = {"rooftop": [lambda: (next(results), None)]}
    assert list(benchmark_module.replays_of(work)) == ["rooftop, replayed"]
    assert work.apart == {"rooftop, replayed": apart}


@pytest.mark.gpu
@pytest.mark.parametrize("model", ["unet", "second"])
def test_a_training_step_is_captured_and_trains(model: str, benchmark_module: Any) -> None:
    case = next(case for case in benchmark_module.CASES if case.names >= {"networks", model})
    scale = dataclasses.replace(benchmark_module.QUICK, device="cuda", dtype=torch.float16, cloud=5000)
    with torch.cuda.stream(benchmark_module.STREAM):
        _, (inference, step) = case.works(scale)
        for work in (inference, step):
            replays = benchmark_module.replays_of(work)
            assert "rooftop, bounded, replayed" not in work.absent, work.absent
            assert work.apart["rooftop, bounded, replayed"] <= work.farthest
        network = step.calls["rooftop, bounded"][0].network
        before = [p.detach().clone() for p in network.parameters()]
        replays["rooftop, bounded, replayed"]()
        torch.cuda.synchronize()
        assert any(not torch.equal(p, q) for p, q in zip(network.parameters(), before, strict=True))


@pytest.mark.parametrize(("surface", "sites"), [("wavy", 1500), ("room", 1500)])
def test_surfaces_have_so_many_different_sites_on_their_grid(surface: str, sites: int, folder: None) -> None:
    import sparse_surfaces

    indices, shape = getattr(sparse_surfaces, surface)(sites, "cpu")
    assert indices.dtype == torch.int32
    assert len(indices.unique(dim=0)) == len(indices) == sites
    assert (indices[:, 1:] < torch.tensor(shape)).all()
    assert (indices >= 0).all()
    assert all(size % 16 == 0 for size in shape)
    assert not torch.equal(indices, indices.unique(dim=0))  # in random order
    assert torch.equal(indices, getattr(sparse_surfaces, surface)(sites, "cpu")[0])


def test_products_are_counted_by_the_pairs_that_there_are(folder: None) -> None:
    from sparse_networks import bounded, network_cost, products_of

    sites = torch.tensor([[0, 1, 1, 1], [0, 1, 1, 2], [0, 5, 5, 5]], dtype=torch.int32)
    x = sparse.SparseConvTensor(torch.randn(3, 2), sites, [8, 8, 8], 1)
    model = sparse.SparseSequential(
        sparse.SubMConv3d(2, 4, 3, bias=False, indice_key="same"),
        sparse.SparseConv3d(4, 8, 2, 2, bias=False, indice_key="half"),
        torch.nn.Linear(8, 16, bias=False),
    )
    pairs = [5, 3]  # each site is paired with itself, two sites with each other; each site is in one cell
    flops = [2 * pairs[0] * 2 * 4, 2 * pairs[1] * 4 * 8, 2 * 3 * 8 * 16]
    result = model(x).features
    assert len(result) == 3
    assert products_of(model, x) == flops
    parameters, given = 27 * 8 + 8 * 32 + 128, x.features.nbytes + sites.nbytes
    inference, step = (network_cost(model, x, result, training) for training in (False, True))
    assert inference.flops == {"fp32": sum(flops)}
    assert inference.bytes == given + 4 * parameters + result.nbytes
    assert step.flops == {"fp32": 3 * sum(flops) - flops[0]}
    fixed = bounded(model, x)
    assert fixed[1].num_out_act_bound == 1024
    torch.testing.assert_close(fixed(x).features[:3], result)


def test_scans_of_a_road_lie_on_the_grid_of_kitti(folder: None) -> None:
    import sparse_surfaces

    indices, shape = sparse_surfaces.road(2, "cpu", azimuths=200)
    assert shape == [41, 1600, 1408]
    assert indices[:, 0].unique().tolist() == [0, 1]
    assert len(indices.unique(dim=0)) == len(indices) > 5000
    assert (indices[:, 1:] < torch.tensor(shape)).all()


@pytest.mark.parametrize("page", TABLES["PAGES"], ids=lambda page: page.relative_to(ROOT).as_posix())
def test_pages_are_up_to_date(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert TABLES["with_figures"](text, TABLES["RESULTS"]) == text, "run python benchmarks/kernels/tables.py"


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_without_a_gpu_one_line_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], folder: None
) -> None:
    monkeypatch.setattr(sys, "argv", [SCRIPT.name])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    assert ended.value.code == 2
    assert "error: needs an NVIDIA GPU" in capsys.readouterr().err
