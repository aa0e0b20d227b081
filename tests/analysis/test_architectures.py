"""Architectures of all kinds are analyzed, forward and in training: every operator has a cost rule, and none costs
nothing by mistake.

The architectures' totals agree with published figures or counts by hand. Totals are counted in bfloat16 on fake or meta
tensors: matrix products count as bf16 flops there; biases, softmax and norms count as fp32.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import rooftop
from rooftop.cli.main import main
from rooftop.cost import CountingMode, Record
from rooftop.cost.formulas import metadata
from rooftop.hardware.ceilings import Ceilings

pytestmark = [
    pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta state"),
    pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled"),
]

TOUCH_NOTHING = {
    *(
        f"aten::{name}"
        for names in (metadata.VIEWS, metadata.ALLOCATIONS, metadata.QUESTIONS)
        for name in names.split()
    ),
    *metadata.OUTSIDE_ATEN.split(),
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """These models are too small to need threads, which would wait for each other while other programs use the
    cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class FourierMixer(nn.Module):
    """A block of FNet (Lee-Thorp et al. 2021): a Fourier transform over features and positions mixes the tokens."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, hidden: Tensor) -> Tensor:
        mixed = torch.fft.fft(torch.fft.fft(hidden, dim=-1), dim=-2).real  # (B, T, D)
        hidden = self.norm_1(hidden + mixed)
        return self.norm_2(hidden + self.mlp(hidden))


class BagOfWords(nn.Module):
    """The mean of the words of a text, and a linear layer."""

    def __init__(self, vocabulary: int = 100, width: int = 16, *, sparse: bool = False) -> None:
        super().__init__()
        self.words = nn.EmbeddingBag(vocabulary, width, mode="sum", sparse=sparse)
        self.head = nn.Linear(width, 4)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.words(words))


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        context.save_for_backward(x)
        return x * x * x

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = context.saved_tensors
        return 3 * gradient * x * x


class Cubic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(Cube.apply(self.first(x)))


class GraphConvolution(nn.Module):
    """Two layers of a graph convolutional network (Kipf & Welling 2017): neighbours by a sparse product."""

    def __init__(self, adjacency: Tensor, widths: tuple[int, int, int] = (16, 32, 4)) -> None:
        super().__init__()
        self.adjacency = adjacency
        self.first, self.second = nn.Linear(widths[0], widths[1]), nn.Linear(widths[1], widths[2])

    def forward(self, nodes: Tensor) -> Tensor:
        hidden = torch.relu(self.adjacency @ self.first(nodes))
        return self.adjacency @ self.second(hidden)


def ring(nodes: int) -> Tensor:
    """Each node is connected to two others and itself, so each row has three elements."""
    node = torch.arange(nodes)
    rows = node.repeat(3)
    columns = torch.cat([node, (node + 1) % nodes, (node - 1) % nodes])
    return torch.sparse_coo_tensor(torch.stack([rows, columns]), torch.full((3 * nodes,), 1 / 3)).coalesce()


def swin(request: pytest.FixtureRequest) -> tuple[nn.Module, Tensor]:
    """The blocks of the first two stages of Swin-T, a quarter as wide."""
    library = request.getfixturevalue("torchvision_models")
    sizes = {"patch_size": [4, 4], "depths": [2, 2], "num_heads": [3, 6], "window_size": [7, 7]}
    return library.SwinTransformer(embed_dim=24, num_classes=10, **sizes), torch.randn(1, 3, 56, 56)


def gpt2(request: pytest.FixtureRequest) -> tuple[nn.Module, Tensor]:
    library = request.getfixturevalue("transformers")
    configuration = library.GPT2Config(n_layer=1, n_embd=64, n_head=4, vocab_size=500, n_positions=32, use_cache=False)
    return library.GPT2LMHeadModel(configuration), torch.randint(500, (2, 32))


def detr_configuration(library: ModuleType, backbone: dict[str, Any], **sizes: int) -> Any:
    return library.DetrConfig(
        use_timm_backbone=False,
        use_pretrained_backbone=False,
        backbone=None,
        backbone_config=library.ResNetConfig(out_features=["stage4"], **backbone),
        **sizes,
    )


def detr(request: pytest.FixtureRequest) -> tuple[nn.Module, Tensor]:
    library = request.getfixturevalue("transformers")
    backbone = {"embedding_size": 16, "hidden_sizes": [16, 32, 32, 64], "depths": [1, 1, 1, 1]}
    sizes = {"d_model": 32, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "encoder_layers": 1, "decoder_layers": 2}
    configuration = detr_configuration(library, backbone, **sizes, num_queries=10)
    return library.DetrForObjectDetection(configuration), torch.randn(2, 3, 96, 128)


ARCHITECTURES: dict[str, Callable[[pytest.FixtureRequest], tuple[nn.Module, Tensor]]] = {
    "Swin-T": swin,
    "GPT-2": gpt2,
    "DETR": detr,
    "GRU": lambda request: (nn.GRU(16, 32), torch.randn(10, 4, 16)),
    "FNet": lambda request: (FourierMixer(32), torch.randn(4, 16, 32)),
    "EmbeddingBag": lambda request: (BagOfWords(), torch.randint(100, (8, 5))),
    "EmbeddingBag, sparse": lambda request: (BagOfWords(sparse=True), torch.randint(100, (8, 5))),
    "custom function": lambda request: (Cubic(), torch.randn(8, 16)),
    "graph convolution": lambda request: (GraphConvolution(ring(64)), torch.randn(64, 16)),
    "graph convolution, rows": lambda request: (GraphConvolution(ring(64).to_sparse_csr()), torch.randn(64, 16)),
}


@pytest.mark.parametrize("train", [False, True], ids=["forward", "train"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_operator_is_counted(name: str, train: bool, ceilings: Ceilings, request: pytest.FixtureRequest) -> None:
    model, inputs = ARCHITECTURES[name](request)
    report = rooftop.analyze(model, inputs, train=train, ceilings=ceilings)
    assert {(row.name, row.uncovered) for row in report.ops if row.bound == "uncovered"} == set()
    assert report.coverage >= 0.95
    silent = {row.name for row in report.ops if row.bound == "none"}
    # An in-place operator (detach_) on a view is still a view.
    assert {operator for operator in silent if operator.removesuffix("_") not in TOUCH_NOTHING} == set()
    assert {row.phase for row in report.ops} == ({"forward", "backward"} if train else {"forward"})


PROGRAM = '''
"""A graph convolution with its input, as a user would write it."""

import torch
from torch import nn


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.adjacency = torch.eye(64).to_sparse()
        self.layer = nn.Linear(16, 8)

    def forward(self, nodes):
        return self.adjacency @ self.layer(nodes)


def build():
    return Network(), torch.randn(64, 16)
'''


@pytest.mark.parametrize("words", [[], ["--train"]], ids=["forward", "train"])
def test_the_command_line_takes_any_callable(
    words: list[str], ceilings: Ceilings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    name = f"graph_{'_'.join(tmp_path.parts[-2:]).replace('-', '_')}"
    Path(f"{name}.py").write_text(PROGRAM)
    ceilings.save(tmp_path / "ceilings.json")
    options = ["--device", "cpu", "--ceilings", "ceilings.json", "--no-html", "--json", "report.json"]
    assert main(["analyze", f"{name}:build", *words, *options]) == 0
    report = json.loads(Path("report.json").read_text())
    assert report["coverage"] == 1
    (product,) = [op for op in report["ops"] if op["phase"] == "forward" and op["name"] == "aten::mm"]
    assert product["flops"] == 2 * 64 * 8


def count(run: Callable[[], object]) -> list[Record]:
    with torch.no_grad(), CountingMode() as counted:
        run()
    assert {(record.name, record.uncovered) for record in counted.records if record.cost is None} == set()
    return counted.records


def products(records: list[Record]) -> int:
    """Flops of matrix products, convolutions and attention of a model in bfloat16."""
    return sum(record.cost.flops.get("bf16", 0) for record in records if record.cost is not None)


def test_swin_t_costs_what_torchvision_publishes(torchvision_models: ModuleType) -> None:
    with torch.device("meta"):
        model, image = torchvision_models.swin_t().eval().bfloat16(), torch.empty(1, 3, 224, 224, dtype=torch.bfloat16)
    records = count(lambda: model(image))
    published = torchvision_models.Swin_T_Weights.DEFAULT.meta["_ops"]  # 4.491 billion multiply-adds
    assert round(products(records) / 2e9, 3) == published
    # Adding the biases is no product; it costs another 0.15 %.
    matrix_operators = {"aten::addmm", "aten::mm", "aten::bmm", "aten::convolution"}
    total = sum(r.cost.total_flops for r in records if r.cost is not None and r.name in matrix_operators)
    assert products(records) == sum(
        r.cost.flops.get("bf16", 0) for r in records if r.cost is not None and r.name in matrix_operators
    )
    assert total / products(records) == pytest.approx(1.0015, abs=1e-4)


def test_gpt2_costs_what_the_formula_says(transformers: ModuleType) -> None:
    layers, width, vocabulary, length = 12, 768, 50257, 1024
    with FakeTensorMode():
        configuration = transformers.GPT2Config()
        model = transformers.AutoModelForCausalLM.from_config(configuration, dtype=torch.bfloat16).eval()
        records = count(lambda: model(torch.zeros(1, length, dtype=torch.int64)))
    # Projections to q, k, v (3 d²), from the heads (d²), to the hidden layer and back (8 d²), and to the vocabulary.
    matrices = 2 * (12 * layers * width**2 + vocabulary * width) * length
    # Scores and weighted values, for the pairs that a causal mask keeps.
    attention = layers * 2 * 2 * width * (length * (length + 1) // 2)
    assert products(records) == matrices + attention == 272_339_828_736
    assert sum(parameter.numel() for parameter in model.parameters()) == 124_439_808


def test_a_small_gpt2_costs_what_the_formula_says_forward_and_three_times_it_in_training(
    transformers: ModuleType,
) -> None:
    layers, width, vocabulary, length, batch = 2, 64, 500, 32, 2
    configuration = transformers.GPT2Config(
        n_layer=layers, n_embd=width, n_head=4, vocab_size=vocabulary, n_positions=length, use_cache=False
    )
    model = transformers.GPT2LMHeadModel(configuration).eval().bfloat16()
    tokens = torch.randint(vocabulary, (batch, length))
    matrices = 2 * (12 * layers * width**2 + vocabulary * width) * length * batch
    attention = layers * 2 * 2 * width * (length * (length + 1) // 2) * batch
    assert products(count(lambda: model(tokens))) == matrices + attention
    with CountingMode() as counted:
        model(tokens).logits.float().sum().backward()
    # The backward pass has two products for each, but five for attention, which recomputes the scores.
    assert products(counted.records) == 3 * matrices + attention + attention * 5 // 2


def test_detr_costs_what_the_paper_says(transformers: ModuleType) -> None:
    """Carion et al. 2020, table 1: 86 "GFLOPS" (multiply-adds) with ResNet-50, the mean over 100 images of COCO.

    COCO's images are mostly 640x480 or 640x427, resized to a shorter side of 800: the mean lies between the two.
    """
    with FakeTensorMode():
        model = transformers.DetrForObjectDetection(detr_configuration(transformers, {})).eval()
        sizes = [(800, 1066), (800, 1199)]
        counts = [_multiply_adds(count(lambda size=size: model(torch.empty(1, 3, *size)))) for size in sizes]
    assert counts[0] < 86e9 < counts[1]
    assert sum(counts) / 2 == pytest.approx(86e9, rel=0.01)
    assert counts[0] == pytest.approx(86e9, rel=0.06)
    # The paper's 41 M parameters include the backbone's 23.5 M.
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(41.3e6, rel=0.01)


def _multiply_adds(records: list[Record]) -> float:
    names = ("aten::convolution", "aten::addmm", "aten::mm", "aten::bmm")
    return (
        sum(
            record.cost.total_flops
            for record in records
            if record.cost is not None and (record.name in names or "attention" in record.name)
        )
        / 2
    )


def test_a_gru_costs_three_gates_of_two_products_each() -> None:
    inputs, hidden, steps, batch = 16, 32, 10, 4
    model, sequence = nn.GRU(inputs, hidden).bfloat16(), torch.randn(steps, batch, inputs, dtype=torch.bfloat16)
    assert products(count(lambda: model(sequence))) == 2 * 3 * (inputs * hidden + hidden * hidden) * steps * batch


def test_an_embedding_bag_costs_its_rows() -> None:
    vocabulary, width, texts, words = 100, 16, 8, 5
    model, inputs = BagOfWords(vocabulary, width), torch.randint(vocabulary, (texts, words))
    records = {record.name: record.cost for record in count(lambda: model(inputs))}
    bag = records["aten::_embedding_bag"]
    assert bag is not None
    assert bag.total_flops == texts * words * width  # an addition for each element of each row
    assert bag.read_bytes == texts * words * width * 4 + texts * words * 8 + texts * 8  # table rows, words, offsets
    head = records["aten::addmm"]
    assert head is not None
    assert head.total_flops == 2 * texts * width * 4 + texts * 4


def test_a_fourier_mixer_costs_split_radix_transforms() -> None:
    batch, length, width = 4, 16, 32
    records = count(lambda: FourierMixer(width)(torch.randn(batch, length, width)))
    costs = {record.name: record.cost for record in records if "fft" in record.name}
    # 4 n log₂ n - 6 n + 8: 456 for 32 features, half of it since they are real; 168 for 16 positions.
    real, complex_ = costs["aten::_fft_r2c"], costs["aten::_fft_c2c"]
    assert real is not None
    assert complex_ is not None
    assert (real.total_flops, complex_.total_flops) == (batch * length * 456 // 2, batch * width * 168)


def test_a_graph_convolution_costs_its_edges() -> None:
    nodes, edges = 64, 3 * 64
    model, features = GraphConvolution(ring(nodes), (16, 32, 4)), torch.randn(nodes, 16)
    sparse = [record.cost for record in count(lambda: model(features)) if record.name == "aten::mm"]
    assert [cost.total_flops for cost in sparse if cost is not None] == [2 * edges * 32, 2 * edges * 4]
    # Two int64 and a value for each edge, and the features of every node.
    assert [cost.read_bytes for cost in sparse if cost is not None] == [
        edges * 20 + nodes * width * 4 for width in (32, 4)
    ]
