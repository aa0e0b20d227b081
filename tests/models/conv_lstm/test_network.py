"""ConvLSTM2D and the next-frame networks agree with Keras (on its torch back end): results, states, gradients, masks,
dropout and saved weights."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
import tempfile
import zipfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any

os.environ["KERAS_BACKEND"] = "torch"  # Keras decides at import
os.environ.setdefault("KERAS_HOME", tempfile.mkdtemp())

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from rooftop.errors import InputError, MissingExtraError, WeightsError
from rooftop.inference import Engine
from rooftop.models import (
    ConvLSTM2D,
    NextFrameNetwork,
    colour_next_frame_network,
    load_keras_weights,
    next_frame_network,
    predict_frames,
)
from rooftop.models.conv_lstm import layer as conv_lstm
from rooftop.models.conv_lstm.network import FramesConvolution

keras = pytest.importorskip("keras")
pytest.importorskip("h5py")

# Keras 3.15 saves tensors in a way that NumPy 2 rejects.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
Options = dict[str, Any]


def as_ours(kernel: Tensor) -> Tensor:
    return kernel.permute(3, 2, 0, 1)


def values_of(layer: Any) -> list[Tensor]:
    return [weight.value for weight in layer.weights]


def frames(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def pair(x: Tensor, filters: int, kernel_size: Any, **options: Any) -> tuple[ConvLSTM2D, Any]:
    """Rooftop's layer and Keras's, built for x, with the same random weights."""
    theirs = keras.layers.ConvLSTM2D(filters, kernel_size, **options)
    theirs.build(tuple(x.shape))
    channels = x.shape[2] if options.get("data_format") == "channels_first" else x.shape[-1]
    ours = ConvLSTM2D(channels, filters, kernel_size, **options)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for mine, weight in zip(ours.parameters(), values_of(theirs), strict=False):
            weight.copy_(0.4 * torch.randn(weight.shape, generator=generator))
            mine.copy_(as_ours(weight) if weight.dim() == 4 else weight)
    return ours, theirs


def assert_equal(ours: Any, theirs: Any) -> None:
    torch.testing.assert_close(
        list(ours) if isinstance(ours, tuple) else ours,
        list(theirs) if isinstance(theirs, (tuple, list)) else theirs,
        rtol=1e-6,
        atol=1e-6,
    )


CASES: list[Options] = [
    {},
    {"padding": "same", "return_sequences": True},
    {"padding": "same", "kernel_size": (2, 4), "return_sequences": True},
    {"padding": "same", "strides": 2},
    {"padding": "same", "strides": (2, 3), "kernel_size": (4, 3), "return_sequences": True},
    {"strides": (3, 1)},
    {"dilation_rate": 2, "kernel_size": 2},
    {"padding": "same", "dilation_rate": (1, 2), "kernel_size": (2, 3)},
    {"recurrent_activation": "hard_sigmoid", "return_sequences": True},
    {"activation": "relu", "recurrent_activation": "sigmoid", "padding": "same"},
    {"activation": "linear", "recurrent_activation": "tanh"},
    {"use_bias": False, "kernel_size": 1},
    {"return_state": True},
    {"return_state": True, "return_sequences": True, "go_backwards": True},
]


@pytest.mark.parametrize("options", CASES, ids=lambda o: ", ".join(f"{k}={v}" for k, v in o.items()) or "defaults")
def test_results_are_keras(options: Options) -> None:
    for data_format in ("channels_last", "channels_first"):
        x = frames(2, 3, 7, 8, 2) if data_format == "channels_last" else frames(2, 3, 2, 7, 8)
        ours, theirs = pair(x, 3, **{"kernel_size": 3, "data_format": data_format, **options})
        assert_equal(ours(x), theirs(x))


def test_hard_sigmoid_of_keras_2_is_the_steeper_one() -> None:
    x = 3 * frames(2, 3, 5, 5, 2)
    old = lambda z: keras.ops.clip(0.2 * z + 0.5, 0, 1)  # noqa: E731 (what Keras 2 calls hard_sigmoid)
    ours, theirs = pair(x, 3, 3, recurrent_activation="hard_sigmoid")
    ours.recurrent_activation, theirs.cell.recurrent_activation = "hard_sigmoid_keras2", old
    assert_equal(ours(x), theirs(x))


@given(
    st.tuples(*[st.integers(1, 3)] * 2, *[st.integers(4, 7)] * 2, st.integers(1, 3)),
    st.tuples(*[st.integers(1, 4)] * 2),
    st.sampled_from(["same", "valid"]),
    st.tuples(*[st.integers(1, 3)] * 2),
    st.booleans(),
    st.booleans(),
)
@example((2, 1, 4, 4, 1), (3, 3), "valid", (1, 2), False, False)
@settings(max_examples=10, deadline=None)
def test_any_sizes(
    shape: tuple[int, ...], kernel: tuple[int, int], padding: str, strides: tuple[int, int], dilate: bool, back: bool
) -> None:
    x = frames(*shape)
    rates = {"dilation_rate" if dilate and padding == "same" else "strides": strides}
    ours, theirs = pair(x, 2, kernel, padding=padding, go_backwards=back, return_sequences=True, **rates)
    # oneDNN's results for one column are wrong if there is a single channel, stored last
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.backends.mkldnn, "enabled", False)
        expected = theirs(x)
    assert_equal(ours(x), expected)


def test_one_channel_and_results_of_one_column() -> None:
    layer, x = ConvLSTM2D(1, 2, (9, 8), strides=(1, 2)), frames(2, 2, 11, 8, 1)
    expected = copy.deepcopy(layer).double()(x.double())
    torch.testing.assert_close(layer(x).double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("options", [{}, {"go_backwards": True, "padding": "same", "activation": "relu"}], ids=str)
def test_gradients_through_time_are_keras(options: Options) -> None:
    x = frames(2, 4, 5, 6, 2)
    ours, theirs = pair(x, 3, 3, return_sequences=True, **options)
    mine, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    found = torch.autograd.grad(ours(mine).square().sum(), [mine, *ours.parameters()])
    expected = list(torch.autograd.grad(theirs(other).square().sum(), [other, *values_of(theirs)]))
    expected[1:3] = [as_ours(each) for each in expected[1:3]]
    torch.testing.assert_close(list(found), expected, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("steps", [1, 2])
def test_gradients_against_finite_differences(steps: int) -> None:
    layer = ConvLSTM2D(1, 1, 2, return_sequences=True).double()
    x = frames(1, steps, 3, 3, 1).double().requires_grad_()
    names, parameters = zip(*layer.named_parameters(), strict=True)

    def call(x: Tensor, *values: Tensor) -> Tensor:
        return torch.func.functional_call(layer, dict(zip(names, values, strict=True)), (x,))

    assert torch.autograd.gradcheck(call, (x, *parameters))


@pytest.mark.parametrize(
    "options", [{}, {"go_backwards": True}, {"return_sequences": True, "return_state": True}], ids=str
)
def test_masks_of_steps_are_keras(options: Options) -> None:
    x = frames(4, 5, 4, 4, 2)
    mask = torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 0], [1, 0, 1, 0, 1], [0, 0, 0, 0, 0]]).bool()
    state = [frames(4, 4, 4, 3, seed=seed) for seed in (5, 6)]
    ours, theirs = pair(x, 3, 3, padding="same", **options)
    assert_equal(ours(x, mask=mask), theirs(x, mask=mask))
    assert_equal(ours(x, state, mask), theirs(x, initial_state=state, mask=mask))


def test_an_initial_state_is_keras() -> None:
    x, state = frames(2, 3, 5, 5, 2), [frames(2, 3, 3, 4, seed=seed) for seed in (5, 6)]
    ours, theirs = pair(x, 4, 3, return_state=True)
    assert_equal(ours(x, state), theirs(x, initial_state=state))


def test_the_state_of_a_call_is_where_the_next_begins() -> None:
    x = frames(2, 6, 5, 5, 2)
    ours, theirs = pair(x, 3, 3, stateful=True, return_sequences=True)
    for part in x.split(2, 1):
        y = ours(part)
        assert_equal(y, theirs(part))
    y.sum().backward()  # no graph of earlier calls remains
    whole = ConvLSTM2D(2, 3, 3, return_sequences=True)
    whole.load_state_dict(ours.state_dict(), strict=True)
    assert_equal(whole(x)[:, -2:], y)
    with pytest.raises(ValueError, match=r"call reset_state\(\) before you change the batch size"):
        ours(x[:1])
    ours.reset_state(), theirs.reset_state()
    assert_equal(ours(x[:, :2]), theirs(x[:, :2]))
    ours.reset_state()
    assert ours(x[:1]).shape == (1, 6, 3, 3, 3)


@pytest.mark.parametrize("data_format", ["channels_last", "channels_first"])
def test_dropout_with_the_same_masks_is_keras(data_format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = frames(2, 3, 5, 5, 2) if data_format == "channels_last" else frames(2, 3, 2, 5, 5)
    options: Options = {"padding": "same", "data_format": data_format, "dropout": 0.3, "recurrent_dropout": 0.5}
    ours, theirs = pair(x, 3, 3, **options)
    masks = {0.3: (frames(2, 4, 2, 5, 5, seed=8) > 0) / 0.7, 0.5: (frames(2, 4, 3, 5, 5, seed=9) > 0) / 0.5}
    monkeypatch.setattr(conv_lstm, "_masks", lambda like, rate: masks[rate])
    last = data_format == "channels_last"
    of_gates = [[m.permute(0, 2, 3, 1) if last else m for m in each.unbind(1)] for each in masks.values()]
    theirs.cell._dropout_mask, theirs.cell._recurrent_dropout_mask = of_gates
    assert_equal(ours(x), theirs(x, training=True))
    ours.eval()
    assert_equal(ours(x), theirs(x, training=False))


def test_dropout_drops_the_share_it_says_and_keeps_the_mean() -> None:
    torch.manual_seed(0)
    masks = conv_lstm._masks(torch.empty(8, 16, 20, 20), 0.3)  # 4 * 51200 elements
    assert masks.shape == (8, 4, 16, 20, 20)
    assert masks.unique().tolist() == pytest.approx([0, 1 / 0.7])
    assert abs((masks == 0).float().mean() - 0.3) < 0.005
    agreement = (masks[:, 0] == masks[:, 1]).float().mean()
    assert abs(agreement - (0.3**2 + 0.7**2)) < 0.01, "each gate has a separate mask"
    layer = ConvLSTM2D(2, 3, 1, dropout=0.5)
    gates = layer._input_gates(torch.ones(1, 5, 9, 9, 2))
    assert all(torch.equal(step, gates[0]) for step in gates), "all steps have one mask"
    assert not torch.equal(layer._input_gates(torch.ones(1, 5, 9, 9, 2)), gates), "each call has another mask"


@pytest.mark.parametrize("data_format", ["channels_last", "channels_first"])
def test_between_layers_and_norms_nothing_is_copied(data_format: str) -> None:
    network = NextFrameNetwork(2, 3, data_format=data_format).eval()
    x = torch.rand(2, 3, 5, 4, 2) if data_format == "channels_last" else torch.rand(2, 3, 2, 5, 4)
    hidden, _ = network.layers[0].unrolled(x)
    assert hidden.transpose(0, 1).is_contiguous()
    assert network._normalized(hidden, network.norms[0]).transpose(0, 1).is_contiguous()


def test_compiled_whole_it_gives_the_same() -> None:
    layer, x = ConvLSTM2D(2, 3, 3, padding="same", return_state=True), frames(2, 3, 5, 5, 2)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert_equal(compiled(x), layer(x))
    compiled(x)[0].sum().backward()
    assert layer.recurrent_kernel.grad is not None


def test_initial_values_are_distributed_as_keras() -> None:
    torch.manual_seed(0)
    layer = ConvLSTM2D(3, 16, 3)
    limit = (6 / (9 * 3 + 9 * 64)) ** 0.5
    assert 0.97 * limit < layer.kernel.abs().max() <= limit
    rows = layer.recurrent_kernel.flatten(1)
    torch.testing.assert_close(rows @ rows.T, torch.eye(64), rtol=0, atol=1e-5)
    assert layer.bias is not None
    assert layer.bias.reshape(4, 16).unique(dim=1).flatten().tolist() == [0, 1, 0, 0]
    without = ConvLSTM2D(3, 16, 3, unit_forget_bias=False).bias
    assert without is not None
    assert not without.any()


def test_autocast_keeps_the_cell_in_float32() -> None:
    layer, x = ConvLSTM2D(2, 4, 3, return_state=True, padding="same"), frames(1, 6, 6, 6, 2)
    with torch.autocast("cpu", torch.bfloat16):
        output, hidden, cell = layer(x)
    assert (output.dtype, hidden.dtype, cell.dtype) == (torch.bfloat16, torch.bfloat16, torch.float32)
    torch.testing.assert_close(cell, layer(x)[2], rtol=0.05, atol=0.05)
    cell.sum().backward()
    assert layer.recurrent_kernel.grad is not None
    assert layer(x, (hidden, cell))[0].dtype == torch.float32, (
        "outside of autocast, a state from autocast gives float32"
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strides": 2, "dilation_rate": 2}, "strides > 1 and dilation_rate > 1 cannot be combined:"),
        ({"kernel_size": (3, 3, 3)}, "kernel_size must be a positive integer or a pair of them"),
        ({"kernel_size": 0}, "kernel_size must be"),
        ({"kernel_size": 3.0}, "kernel_size must be a positive integer or a pair of them, got 3.0"),
        ({"filters": 0}, "filters must be a positive integer"),
        ({"padding": "full"}, "padding must be one of valid, same"),
        ({"data_format": "NCHW"}, "data_format must be one of"),
        ({"activation": "gelu"}, "activation must be one of tanh"),
        ({"dropout": 1.0}, "dropout must be at least 0 and below 1"),
    ],
)
def test_wrong_options(options: Options, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ConvLSTM2D(**{"in_channels": 2, "filters": 3, "kernel_size": 3, **options})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((frames(2, 5, 5, 2),), r"frames must be \(N, T, H, W, C\), got"),
        ((frames(1, 2, 5, 5, 3),), "with C = 2 and at least one time step"),
        ((frames(1, 0, 5, 5, 2),), "at least one time step"),
        ((frames(1, 2, 2, 5, 2),), r"frames of \(2, 5\) are smaller than the kernel, which spans \(3, 3\)"),
        (
            (frames(1, 2, 5, 5, 2), [frames(1, 3, 3, 4)] * 2),
            r"expected an initial hidden state of shape \(1, 3, 3, 3\)",
        ),
        ((frames(1, 2, 5, 5, 2), [frames(1, 3, 3, 3)]), "must be .hidden, cell., got 1"),
        ((frames(1, 2, 5, 5, 2), None, torch.ones(2, 2) > 0), r"mask must be \(N, T\) = \(1, 2\)"),
    ],
)
def test_wrong_inputs(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ConvLSTM2D(2, 3, 3)(*arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([1.0],), "frames must be a tensor, got list"),
        ((frames(1, 2, 5, 5, 2).byte(),), "frames must have a floating-point dtype, got torch.uint8"),
        ((frames(1, 2, 5, 5, 2), (frames(1, 3, 3, 3), None)), r"two tensors, .*, got Tensor, NoneType$"),
        ((frames(1, 2, 5, 5, 2), 3), "initial_state must be None or two tensors, .*, got int"),
        ((frames(1, 2, 5, 5, 2), torch.zeros(2)), "initial_state must be None or two tensors, .*, got Tensor$"),
        ((frames(1, 2, 5, 5, 2), None, [[True, False]]), "mask must be a tensor, got list"),
        ((frames(1, 2, 5, 5, 2), None, torch.ones(1, 2)), "mask must be boolean, got torch.float32"),
    ],
)
def test_inputs_of_wrong_types(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        ConvLSTM2D(2, 3, 3)(*arguments)


# ---- the networks ----------------------------------------------------------------------------------------------


def keras_network(channels: int, filters: int, every_frame: bool) -> Any:
    """The network of Keras's example, as written there; without every_frame the variant for colour."""
    layers = keras.layers
    inputs = layers.Input((None, 6, 7, channels))
    x = layers.ConvLSTM2D(filters, (5, 5), padding="same", return_sequences=True, activation="relu")(inputs)
    x = layers.BatchNormalization()(x)
    x = layers.ConvLSTM2D(filters, (3, 3), padding="same", return_sequences=True, activation="relu", name="mine")(x)
    x = layers.BatchNormalization()(x)
    x = layers.ConvLSTM2D(filters, (1, 1), padding="same", return_sequences=every_frame, activation="relu")(x)
    head = layers.Conv3D if every_frame else layers.Conv2D
    kernel = (3, 3, 3) if every_frame else (3, 3)
    return keras.Model(inputs, head(channels, kernel, activation="sigmoid", padding="same")(x))


def randomized(model: Any) -> Any:
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for weight in model.weights:
            value = 0.3 * torch.randn(weight.value.shape, generator=generator)
            weight.value.copy_(value.abs() + 0.5 if "variance" in weight.path else value)
    return model


@pytest.fixture(scope="module")
def keras_models() -> dict[bool, Any]:
    return {every: randomized(keras_network(1 if every else 3, 4, every)) for every in (True, False)}


def ours_of(every_frame: bool) -> NextFrameNetwork:
    return (next_frame_network if every_frame else colour_next_frame_network)(filters=4)


@pytest.mark.parametrize(
    ("suffix", "every_frame"), [(".keras", True), (".keras", False), (".weights.h5", False), (".h5", True)]
)
def test_saved_weights_give_the_same_frames(
    suffix: str, every_frame: bool, keras_models: dict[bool, Any], tmp_path: Path
) -> None:
    theirs, path = keras_models[every_frame], tmp_path / f"network{suffix}"
    if suffix == ".keras":
        theirs.compile(keras.optimizers.Adam(), "binary_crossentropy")  # the optimizer's state is saved, too
    with pytest.warns() if suffix == ".h5" else nullcontext():  # a warning that the format is old
        theirs.save_weights(path) if suffix == ".weights.h5" else theirs.save(path)
    ours = ours_of(every_frame)
    load_keras_weights(ours, path)
    x = torch.rand(2, 4, 6, 7, 1 if every_frame else 3)
    assert_equal(ours.eval()(x), theirs(x, training=False))


def test_gradients_of_the_network_are_keras(keras_models: dict[bool, Any], tmp_path: Path) -> None:
    theirs, path = keras_models[True], tmp_path / "network.keras"
    theirs.save(path)
    ours = ours_of(True)
    load_keras_weights(ours, path)
    x, target = torch.rand(2, 4, 6, 7, 1), torch.rand(2, 4, 6, 7, 1).round()
    loss = nn.functional.binary_cross_entropy_with_logits(ours.logits(x), target)
    expected = keras.losses.BinaryCrossentropy()(target, theirs(x, training=True))
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    found = torch.autograd.grad(loss, [layer.kernel for layer in ours.layers])
    kernels = [layer.cell.kernel.value for layer in theirs.layers if hasattr(layer, "cell")]
    for mine, other in zip(found, torch.autograd.grad(expected, kernels), strict=True):
        torch.testing.assert_close(mine, as_ours(other), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("build", "count"), [(next_frame_network, 746_689), (colour_next_frame_network, 759_491)])
def test_parameters_are_as_many_as_keras_counts(build: Any, count: int) -> None:
    with torch.device("meta"):
        network = build()
    statistics = sum(b.numel() for n, b in network.named_buffers() if "running" in n)
    assert sum(p.numel() for p in network.parameters()) + statistics == count
    assert f"{count:,} parameters" in build.__doc__


@pytest.mark.parametrize("data_format", ["channels_last", "channels_first"])
@pytest.mark.parametrize("every_frame", [True, False])
def test_predicting_on_is_running_the_network_on_the_longer_video(every_frame: bool, data_format: str) -> None:
    torch.manual_seed(0)
    network = NextFrameNetwork(2, 3, every_frame=every_frame, data_format=data_format)
    for parameter in network.parameters():
        nn.init.normal_(parameter, std=0.4)
    for norm in network.norms:
        norm.running_mean.uniform_(), norm.running_var.uniform_(0.5, 2)
    video = torch.rand(2, 3, 5, 4, 2) if data_format == "channels_last" else torch.rand(2, 3, 2, 5, 4)
    found = predict_frames(network, video, 4)
    assert network.training
    assert not found.requires_grad
    network.eval()
    for frame in found.unbind(1):
        y = network(video)
        torch.testing.assert_close(frame, y[:, -1] if every_frame else y, rtol=1e-5, atol=1e-6)
        video = torch.cat((video, frame[:, None]), 1)
    assert predict_frames(network, video[:, :1], 1).shape == (2, 1, *video.shape[2:])
    with pytest.raises(ValueError, match="count must be a positive integer, got 0"):
        predict_frames(network, video, 0)


# ---- files that do not fit -------------------------------------------------------------------------------------


def test_files_that_do_not_fit(keras_models: dict[bool, Any], tmp_path: Path) -> None:
    path = tmp_path / "network.keras"
    keras_models[True].save(path)
    with pytest.raises(
        WeightsError, match=r"the file has 2 batch_normalization, 1 conv3d, 3 .*needs .* 1 conv2d, 3 conv_lstm2d"
    ):
        load_keras_weights(ours_of(False), path)
    with pytest.raises(WeightsError, match=r"of another shape: layers.0.kernel \(file \(16, 1, 5, 5\), model \(32, 1"):
        load_keras_weights(next_frame_network(filters=8), path)
    with pytest.raises(WeightsError, match="needs 1 conv_lstm2d"):
        load_keras_weights(ConvLSTM2D(1, 4, 5), path)
    with pytest.raises(InputError, match="is not a file"):
        load_keras_weights(ours_of(True), tmp_path / "none.keras")
    (tmp_path / "bytes.h5").write_bytes(b"nothing of the kind")
    with zipfile.ZipFile(tmp_path / "empty.keras", "w") as archive:
        archive.writestr("config.json", "{}")
    (tmp_path / "cut.keras").write_bytes(path.read_bytes()[:5000])
    for name in ("bytes.h5", "empty.keras", "cut.keras"):
        with pytest.raises(WeightsError, match="is damaged or not a file of Keras weights"):
            load_keras_weights(ours_of(True), tmp_path / name)


def test_a_layer_of_its_own_and_other_layers(tmp_path: Path) -> None:
    model = keras.Sequential([keras.layers.Input((2, 5, 5, 1)), keras.layers.ConvLSTM2D(2, 3, use_bias=False)])
    model.save_weights(tmp_path / "layer.weights.h5")
    layer = ConvLSTM2D(1, 2, 3, use_bias=False)
    load_keras_weights(layer, tmp_path / "layer.weights.h5")
    assert torch.equal(layer.kernel, as_ours(model.weights[0].value))
    with pytest.raises(WeightsError, match="1 missing: bias"):
        load_keras_weights(ConvLSTM2D(1, 2, 3), tmp_path / "layer.weights.h5")
    model.add(keras.layers.Dense(2))
    model.save_weights(tmp_path / "more.weights.h5")
    with pytest.raises(WeightsError, match="the file has 1 conv_lstm2d, 1 dense; the model needs 1 conv_lstm2d"):
        load_keras_weights(layer, tmp_path / "more.weights.h5")


def test_without_h5py_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(MissingExtraError, match=r'pip install "rooftop\[keras\]"'):
        load_keras_weights(ConvLSTM2D(1, 2, 3), tmp_path / "any.h5")


def test_all_steps_at_once_are_the_steps_one_by_one() -> None:
    """A mask of True values selects the loop over single steps, for comparison."""
    for options in ({"go_backwards": True}, {"data_format": "channels_first", "stateful": True, "return_state": True}):
        layer = ConvLSTM2D(2, 3, 3, padding="same", return_sequences=True, **options).double()  # type: ignore[arg-type]
        x = frames(2, 4, 5, 6, 2).double() if len(options) == 1 else frames(2, 4, 2, 5, 6).double()
        found = []
        for mask in (None, torch.ones(2, 4, dtype=torch.bool)):
            layer.reset_state()
            y = layer(x, mask=mask)
            outputs = y if isinstance(y, tuple) else (y,)
            loss = sum((each * torch.linspace(-1, 1, each.numel()).reshape(each.shape)).sum() for each in outputs)
            found.append([*(o.detach() for o in outputs), *torch.autograd.grad(loss, list(layer.parameters()))])
        torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_the_head_is_a_convolution_in_three_dimensions(steps: int) -> None:
    head = FramesConvolution(3, 2).double()
    x = frames(2, 3, steps, 5, 6).double().requires_grad_()
    inputs = [x, head.weight, head.bias]
    expected = nn.functional.conv3d(*inputs, padding=1)
    torch.testing.assert_close(head(x), expected, rtol=1e-12, atol=1e-12)
    weights = torch.linspace(-1, 1, expected.numel()).reshape(expected.shape)
    found, theirs = (torch.autograd.grad((y * weights).sum(), inputs) for y in (head(x), expected))
    torch.testing.assert_close(found, theirs, rtol=1e-12, atol=1e-12)


def test_without_looking_ahead_each_frame_is_that_of_a_video_which_ends_there() -> None:
    network, x = next_frame_network(filters=4).eval(), torch.rand(2, 5, 6, 7, 1)
    found = network.logits(x, ahead=False)
    for last in range(1, 6):
        torch.testing.assert_close(found[:, last - 1], network.logits(x[:, :last])[:, -1])
    assert not torch.allclose(found[:, 0], network.logits(x)[:, 0])


@pytest.mark.gpu
@pytest.mark.parametrize("data_format", ["channels_last", "channels_first"])
def test_results_on_a_gpu_are_those_of_the_cpu(data_format: str) -> None:
    torch.manual_seed(0)
    network = NextFrameNetwork(1, 32, data_format=data_format).eval()
    x = torch.rand(2, 5, 33, 32, 1) if data_format == "channels_last" else torch.rand(2, 5, 1, 33, 32)
    expected = network(x)
    torch.testing.assert_close(network.cuda()(x.cuda()).cpu(), expected, rtol=1e-3, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("data_format", ["channels_last", "channels_first"])
@pytest.mark.parametrize("half", [False, True], ids=["float32", "autocast"])
def test_a_training_step_as_a_cuda_graph_is_the_step(data_format: str, half: bool) -> None:
    torch.manual_seed(0)
    network = NextFrameNetwork(1, 16, data_format=data_format).cuda()
    shape = (2, 4, 20, 17, 1) if data_format == "channels_last" else (2, 4, 1, 20, 17)
    x, other = torch.rand(shape, device="cuda"), torch.rand(shape, device="cuda")

    def step() -> Tensor:
        for parameter in network.parameters():
            parameter.grad = None
        with torch.autocast("cuda", torch.bfloat16, enabled=half):
            logits = network.logits(x)
        loss = nn.functional.binary_cross_entropy_with_logits(logits.float(), x)
        loss.backward()
        return loss.detach()  # if the graph lived on, the next step would sum gradients on this step's stream

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step()
    captured = [p.grad for p in network.parameters()]
    x.copy_(other)
    graph.replay()
    found = [loss.clone(), *(g.clone() for g in captured if g is not None)]
    expected = [step(), *(p.grad for p in network.parameters())]
    assert len(found) == len(expected)
    for mine, theirs in zip(found, expected, strict=True):
        assert theirs is not None
        scale = max(1e-3, float(theirs.abs().max()))
        torch.testing.assert_close(mine, theirs, rtol=0, atol=(0.05 if half else 5e-3) * scale)


@pytest.mark.gpu
def test_masks_of_dropout_differ_between_replays_of_a_cuda_graph() -> None:
    layer = ConvLSTM2D(2, 8, 3, padding="same", dropout=0.5, recurrent_dropout=0.5).cuda().train()
    x = torch.rand(2, 3, 8, 8, 2, device="cuda")
    with torch.no_grad():
        layer(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = layer(x)
    graph.replay()
    first = y.clone()
    graph.replay()
    assert bool(torch.isfinite(first).all())
    assert not torch.allclose(first, y)


@pytest.mark.gpu
def test_an_engine_runs_the_network_as_a_cuda_graph() -> None:
    torch.manual_seed(0)
    network, x = NextFrameNetwork(1, 16).eval().cuda(), torch.rand(2, 5, 20, 17, 1, device="cuda")
    engine = Engine(network, dtype=torch.float32)
    engine(x)
    found = engine(other := x.flip(1))
    assert engine.report.graphs is not None
    assert [graph.replays for graph in engine.report.graphs] == [2]
    assert not engine.report.refused
    with torch.no_grad():
        torch.testing.assert_close(found, network(other), rtol=1e-3, atol=1e-3)


KERNELS_OF_A_STEP = """
import torch
from rooftop.models import ConvLSTM2D

layer = ConvLSTM2D(3, 16, 3, padding="same", return_sequences=True).cuda()
x = torch.rand(2, 9, 16, 16, 3, device="cuda")

def launched(steps):
    with torch.no_grad(), torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        layer(x[:, :steps])
    return sum(event.device_type == torch.autograd.DeviceType.CUDA for event in profile.events())

launched(2)
print("kernels of a step:", (launched(9) - launched(4)) / 5)
"""


@pytest.mark.gpu
def test_on_a_gpu_a_step_is_one_convolution_and_one_kernel() -> None:
    """The program runs in a separate process, because the profiler has crashed a process that other tests had used."""
    done = subprocess.run([sys.executable, "-c", KERNELS_OF_A_STEP], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    of_a_step = float(done.stdout.rpartition(":")[2])
    assert 1 <= of_a_step <= 3  # cuDNN may run its convolution as two kernels
