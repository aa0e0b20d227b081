"""Training continues from whatever a program writes into a model, in any way, and the float32 copies of its weights
follow."""

from __future__ import annotations

import copy as copy_module
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from rooftop.cli.main import main
from rooftop.errors import WeightsError
from rooftop.launch import INTERPRETED
from rooftop.models import Gpt, GptConfig
from rooftop.models.gpt.weights import load_gpt, save_gpt
from rooftop.parallel import Layout, ModelGradients
from rooftop.train import (
    AdamW,
    GptTrainer,
    GptTraining,
    MainWeights,
    Tokens,
    find_training,
    load_training,
    save_training,
)
from rooftop.train.checkpoints.trained_models import load_trained_gpt

NARROW = torch.float16 if INTERPRETED else torch.bfloat16
CONFIG = GptConfig(vocabulary=11, layers=2, width=16, heads=2, kv_heads=2, hidden=32, positions=8)
TRAINING = GptTraining(config=CONFIG, length=8, global_batch=4, micro_batch=2, learning_rate=0.01)
COUNTING = Tokens([np.arange(500) % 11], "counting")
Weights = dict[str, Tensor]


def load(model: nn.Module, values: Weights) -> None:
    model.load_state_dict(values)


def assign(model: nn.Module, values: Weights) -> None:
    model.load_state_dict({name: value.clone() for name, value in values.items()}, assign=True)


@torch.no_grad()
def copy(model: nn.Module, values: Weights) -> None:
    for name, parameter in model.named_parameters():
        parameter.copy_(values[name])


def copy_data(model: nn.Module, values: Weights) -> None:
    for name, parameter in model.named_parameters():
        parameter.data.copy_(values[name])


def set_data(model: nn.Module, values: Weights) -> None:
    for name, parameter in model.named_parameters():
        parameter.data = values[name].to(parameter.dtype, copy=True)


def put(model: nn.Module, values: Weights) -> None:
    for name, parameter in [*model.named_parameters()]:
        *path, last = name.split(".")
        setattr(model.get_submodule(".".join(path)), last, nn.Parameter(values[name].to(parameter.dtype, copy=True)))
    if isinstance(model, Gpt) and model.config.tied:
        model.tie()


DOORS = [load, assign, copy, copy_data, set_data, put]


def trainer(training: GptTraining = TRAINING, device: str = "cpu", **options: Any) -> GptTrainer:
    layout = Layout()
    return GptTrainer(training, COUNTING, layout, layout.process_groups(), torch.device(device), **options)


def others(of: GptTrainer) -> Weights:
    """Values of another seed in the model's dtype."""
    state = trainer(replace(of.training, seed=5, cuda_graph=False)).model.state_dict()
    return {name: value.to(of.device) for name, value in state.items()}


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("steps", [0, 2])
def test_whatever_is_loaded_is_trained(
    door: Callable[[nn.Module, Weights], None], dtype: torch.dtype, steps: int
) -> None:
    """Weights differ from the loaded ones by at most a step, and the optimizer changes the model's weights."""
    one = trainer(replace(TRAINING, dtype=dtype))
    for _ in range(steps):
        one.advance()
    loaded = others(one)
    door(one.model, loaded)
    one.advance()
    for name, own in one.model.named_parameters():
        main = one.weights.named[name]
        least = 1e-4 if own.dim() > 1 else 0.0
        moved = (main - loaded[name].float()).abs()
        assert least < moved.max() <= 0.02, name  # by Adam with rate 0.01
        assert torch.equal(main.to(dtype), own)
    before = [each.clone() for each in one.model.parameters()]
    one.advance()
    assert not any(torch.equal(*pair) for pair in zip(before, one.model.parameters(), strict=True))


@pytest.mark.parametrize("door", DOORS)
def test_what_is_saved_is_what_was_loaded(door: Callable[[nn.Module, Weights], None], tmp_path: Path) -> None:
    one = trainer(replace(TRAINING, dtype=torch.bfloat16))
    one.advance()
    loaded = others(one)
    door(one.model, loaded)
    save_training(tmp_path, one)
    second = trainer(one.training)
    copy(second.model, {name: value + 1 for name, value in loaded.items()})
    load_training(find_training(tmp_path, one.training)[0], second)
    assert all(torch.equal(own, loaded[name]) for name, own in second.model.named_parameters())


def test_only_what_was_written_loses_its_float32_digits() -> None:
    """A trained weight keeps its digits, and the other one takes the model's value."""
    model = nn.Linear(2, 1, bias=False)
    weights = MainWeights(model, torch.bfloat16)
    fine = weights.named["weight"].detach().clone()
    model.weight.data[0, 1] = 3.0
    weights.adopt()
    assert weights.named["weight"].tolist() == [[fine[0, 0].item(), 3.0]]


def test_assigned_float32_weights_keep_their_digits() -> None:
    model = nn.Linear(2, 1, bias=False)
    weights = MainWeights(model, torch.bfloat16)
    known, fine = model.weight, torch.tensor([[1 + 2**-12, 2.0]])
    model.load_state_dict({"weight": fine}, assign=True)
    weights.adopt()
    assert model.weight is known
    assert (known.tolist(), weights.named["weight"].tolist()) == ([[1.0, 2.0]], fine.tolist())


def loop(optimizer: Callable[..., Any], door: Callable[[nn.Module, Weights], None] | None) -> tuple[Tensor, Tensor]:
    """(copy, model's weight) after a load and a step written by the program, at rate 0.5 and with a gradient of 1."""
    model = nn.Linear(2, 1, bias=False)
    weights = MainWeights(model, NARROW)
    made = optimizer(weights)
    for step in range(2):
        if step and door is not None:
            door(model, {"weight": torch.tensor([[8.0, 4.0]], dtype=NARROW)})
        model(torch.ones(1, 2, dtype=NARROW)).sum().backward()
        made.step()
        made.zero_grad()
        weights.publish()
    return weights.named["weight"].detach(), model.weight.detach()


def sgd(weights: MainWeights) -> torch.optim.Optimizer:
    return torch.optim.SGD(weights.named.values(), lr=0.5)


def adamw(weights: MainWeights) -> torch.optim.Optimizer:
    return AdamW(weights.named.values(), lr=0.5, weight_decay=0, weights=weights)


@pytest.mark.parametrize("optimizer", [sgd, adamw])
@pytest.mark.parametrize("door", [load, copy, copy_data, set_data])
def test_a_loop_of_ones_own_steps_from_what_was_loaded(
    optimizer: Callable[..., Any], door: Callable[[nn.Module, Weights], None]
) -> None:
    main, own = loop(optimizer, door)
    torch.testing.assert_close(main, torch.tensor([[7.5, 3.5]]), rtol=0, atol=1e-5)
    assert own.tolist() == [[7.5, 3.5]]


@pytest.mark.parametrize("optimizer", [sgd, adamw])
@pytest.mark.parametrize("door", [assign, put])
def test_replaced_parameters_are_refused_where_it_is_too_late(
    optimizer: Callable[..., Any], door: Callable[[nn.Module, Weights], None]
) -> None:
    with pytest.raises(RuntimeError, match=r"another tensor in place of the parameter weight.* assign=True"):
        loop(optimizer, door)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_a_replaced_model_are_refused(dtype: torch.dtype) -> None:
    """Without this error, PyTorch's optimizer would change tensors that the model no longer uses."""
    model = nn.Linear(2, 1).to(dtype)
    gradients = ModelGradients(model)
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    model(torch.ones(1, 2, dtype=dtype)).sum().backward()
    with pytest.raises(RuntimeError, match=r"ModelGradients\.sum_: .* another tensor in place of .*weight"):
        gradients.sum_()
    del model.bias
    with pytest.raises(RuntimeError, match="ModelGradients"):
        gradients.sum_()


def test_tied_parameters_stay_tied() -> None:
    one = trainer(replace(TRAINING, dtype=torch.bfloat16, config=replace(CONFIG, tied=True)))
    assert one.model.head is not None
    assert one.model.embedding is not None
    loaded = others(one)
    assign(one.model, loaded)
    one.advance()
    assert one.model.head.output.weight is one.model.embedding.tokens.weight
    wrong = {name: value.clone() for name, value in loaded.items()}
    wrong["head.output.weight"] += 1
    with pytest.raises(WeightsError, match="but the model ties them: build it with tied=False"):
        one.model.load_state_dict(wrong, assign=True)
    one.model.head.output.weight = nn.Parameter(wrong["head.output.weight"])
    one.model.embedding.tokens.weight = nn.Parameter(wrong["embedding.tokens.weight"])
    with pytest.raises(RuntimeError, match="has different values under its names"):
        one.advance()


def test_copies_that_were_written_are_published() -> None:
    one = trainer(replace(TRAINING, dtype=torch.bfloat16, learning_rate=0.0, weight_decay=0.0))
    main = one.weights.named["head.norm.weight"]
    with torch.no_grad():
        main.fill_(1 + 2**-12)
    one.advance()
    assert main.unique().tolist() == [1 + 2**-12]
    assert one.model.get_parameter("head.norm.weight").unique().tolist() == [1.0]


def test_a_load_between_step_and_publish_is_refused() -> None:
    model = nn.Linear(2, 1)
    weights = MainWeights(model, torch.bfloat16)
    optimizer = sgd(weights)
    model(torch.ones(1, 2, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    load(model, model.state_dict())
    with pytest.raises(RuntimeError, match="weight was changed both in the model and in its copy:"):
        weights.publish()


@pytest.mark.gpu
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("graph", [False, True])
def test_a_gpu_takes_over_what_is_loaded(door: Callable[[nn.Module, Weights], None], graph: bool) -> None:
    """Loaded weights take effect even if steps are replayed from a CUDA graph, which reads the earlier memory."""
    one = trainer(replace(TRAINING, dtype=torch.bfloat16, cuda_graph=graph), "cuda")
    for _ in range(5):
        one.advance()
    loaded = others(one)
    door(one.model, loaded)
    found = float(one.advance()[0])
    expected = trainer(one.training, "cuda")
    copy(expected.model, loaded)
    expected.step = 5
    assert found == pytest.approx(float(expected.advance()[0]), abs=0.01)
    for name, own in one.model.named_parameters():
        main = one.weights.named[name]
        assert (main - loaded[name].float()).abs().max() <= 0.02
        assert torch.equal(main.bfloat16(), own)


# ---- from Hugging Face's weights -----------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model whose weights have more digits than bfloat16, as Hugging Face writes it."""
    torch.manual_seed(3)
    model = Gpt(CONFIG)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.1)
    save_gpt(model, tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_training_begins_from_weights_in_a_folder(dtype: torch.dtype, folder: Path) -> None:
    pytest.importorskip("safetensors")
    one = trainer(replace(TRAINING, dtype=dtype), initial=folder)
    for name, expected in load_gpt(folder).named_parameters():
        assert torch.equal(one.weights.named[name], expected)  # with all digits
        assert torch.equal(one.model.get_parameter(name), expected.to(dtype))


WORDS = [
    *("train", "gpt", "--device", "cpu", "--no-roof", "--seq-length", "8", "--lr", "0", "--weight-decay", "0"),
    *("--save", "run", "--train-iters", "1"),
]


def test_the_command_begins_from_a_folder(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("safetensors")
    monkeypatch.chdir(folder.parent)
    (COUNTING.read(0, 500).numpy().astype(np.uint16)).tofile("a.bin")
    words = [*WORDS, "--data-path", "a.bin", "--init-from", str(folder)]
    assert main(words) == 0
    saved = load_trained_gpt("run")
    for name, expected in load_gpt(folder).named_parameters():
        assert torch.equal(saved.get_parameter(name), expected)
    for more, said in (
        (["--preset", "gpt2", "--num-layers", "3"], "sets the sizes of the model: leave out --preset and --num-layers"),
        (["--vocab-size", "11"], "leave out --vocab-size"),
    ):
        capsys.readouterr()
        assert main([*words, *more]) == 2
        assert said in capsys.readouterr().err
    Path("a.txt").write_text("text " * 50)
    for change, said in (
        ({"a.bin": "a.txt"}, "a.txt is text, so its tokens would be bytes"),
        ({str(folder): "no"}, "does not exist"),
    ):
        assert main([change.get(word, word) for word in words]) == 2
        assert said in capsys.readouterr().err


def test_with_load_a_folder_gives_the_sizes_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("safetensors")
    monkeypatch.chdir(folder.parent)
    (COUNTING.read(0, 500).numpy().astype(np.uint16)).tofile("a.bin")
    words = [*WORDS[:-2], "--data-path", "a.bin", "--init-from", str(folder)]
    words[words.index("--lr") + 1] = "0.01"
    assert main([*words, "--train-iters", "1"]) == 0
    first = load_trained_gpt("run/step-00000001").state_dict()
    words[words.index("--lr") + 1] = "0"
    assert main([*words, "--train-iters", "2", "--load", "run"]) == 0
    second = load_trained_gpt("run/step-00000002").state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_copy_of_weights_knows_what_is_written_to_it() -> None:
    model = nn.Linear(2, 1)
    weights = MainWeights(model, torch.bfloat16)
    for _ in range(3):
        weights.publish()
    again = copy_module.deepcopy(weights)
    again.publish()
    assert again.named["weight"] is not weights.named["weight"]
    own = again.model_has(again.named["weight"])
    assert own is not None
    own.data.fill_(3.0)
    again.adopt()
    assert again.named["weight"].unique().tolist() == [3.0]
    assert 3.0 not in weights.named["weight"]


def test_a_fused_step_counts_as_written() -> None:
    model = nn.Linear(2, 1)
    weights = MainWeights(model, torch.bfloat16)
    main = weights.named["weight"]
    optimizer = torch.optim.SGD(weights.named.values(), lr=0.5, fused=True)
    model(torch.ones(1, 2, dtype=torch.bfloat16)).sum().backward()
    before = main.detach().clone()
    optimizer.step()
    weights.adopt()
    assert torch.equal(main, before - 0.5)
    own = weights.model_has(main)
    assert own is not None
    assert torch.equal(own, main.to(torch.bfloat16))
