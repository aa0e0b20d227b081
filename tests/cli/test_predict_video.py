"""`rooftop predict-video`: the files that it writes are opened again, and the figures that it prints are recomputed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from rooftop.cli.main import main
from rooftop.media import VideoReader, VideoWriter
from rooftop.models import NextFrameNetwork, colour_next_frame_network, next_frame_network, predict_frames
from rooftop.models.conv_lstm.video import load_next_frame_network

pytest.importorskip("av")

Run = Callable[..., tuple[int, str, str]]
FRAMES, HEIGHT, WIDTH, FPS = 16, 18, 24, 10
HALF = 0.002  # limit of the change of an error by bfloat16
GREY = torch.tensor([0.299, 0.587, 0.114])[:, None, None]


def randomized(network: NextFrameNetwork) -> NextFrameNetwork:
    """A different value for every weight, including the norms' statistics, so that an omitted weight is noticed. Values
    are so small that predictions stay bounded; otherwise rounding errors would grow with them."""
    generator = torch.Generator().manual_seed(0)
    for name, value in network.state_dict().items():
        if value.is_floating_point():
            noise = torch.rand(value.shape, generator=generator)
            value.copy_(1 + noise if "running_var" in name else 0.5 * noise - 0.2)
    return network


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clip of a red square that moves to the right, and small networks."""
    folder = tmp_path_factory.mktemp("clips")
    frames = torch.full((FRAMES, 3, HEIGHT, WIDTH), 0.2)
    for number in range(FRAMES):
        frames[number, 0, 6:12, number : number + 6] = 0.9
    with VideoWriter(folder / "walk.mkv", FPS, options={"qp": "0"}) as writer:
        writer.write(frames)
    torch.save(randomized(next_frame_network(filters=2)).state_dict(), folder / "grey.pth")
    torch.save(randomized(colour_next_frame_network(filters=3, kernel_sizes=(3, 3, 1))).state_dict(), folder / "c.pth")
    return folder


@pytest.fixture
def run(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs `rooftop predict-video ...` in a folder with the clip and the weights; returns (status, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)
    for file in folder.iterdir():
        os.link(file, file.name)

    def call(*words: str) -> tuple[int, str, str]:
        status = main(["predict-video", *words, "--device", "cpu"])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return call


def seen(colour: bool, size: tuple[int, int] = (HEIGHT, WIDTH)) -> torch.Tensor:
    """The clip in the form that the network gets, (T, C, H, W)."""
    frames = VideoReader("walk.mkv", dtype=torch.float32, resize=size)[:]
    return frames if colour else (frames * GREY).sum(1, keepdim=True)


def predicted(network: NextFrameNetwork, context: torch.Tensor, count: int) -> torch.Tensor:
    return predict_frames(network, context.permute(0, 2, 3, 1)[None], count)[0].permute(0, 3, 1, 2)


@pytest.mark.parametrize("colour", [False, True])
def test_what_is_written_and_printed(run: Run, colour: bool) -> None:
    weights = "c.pth" if colour else "grey.pth"
    status, out, err = run("walk.mkv", "--weights", weights, "--frames", "5")
    assert (status, err) == (0, "")
    clip = seen(colour)
    context, real = clip[1:11], clip[11:]
    network = colour_next_frame_network(filters=3, kernel_sizes=(3, 3, 1)) if colour else next_frame_network(filters=2)
    network.load_state_dict(torch.load(weights))
    future = predicted(network, context, 5)
    error, repeating = (float((each - real).abs().mean()) for each in (future, context[-1:]))
    assert out.splitlines() == [
        f"walk.mkv: 5 frames predicted after 1.100 s, from the 10 before; {WIDTH} x {HEIGHT}, "
        f"{'colour' if colour else 'grey'}",
        f"weights: {weights}",
        f"mean absolute error, 0 to 1, of 5 frames: predicted {error:.4f}, last frame repeated {repeating:.4f}",
        "video: walk-predicted.mp4",
        "picture: walk-predicted.png",
    ]
    video = VideoReader("walk-predicted.mp4", dtype=torch.float32)
    assert (len(video), video.height, video.width, video.fps) == (5, HEIGHT, 2 * WIDTH, FPS)
    expected = torch.cat((real, future), 3).expand(5, 3, HEIGHT, 2 * WIDTH)
    brightness = ((video[:] - expected) * GREY).sum(1)  # yuv420p keeps colours at half the size only
    assert brightness.abs().mean() < 0.02
    picture = torch.from_numpy(np.array(Image.open("walk-predicted.png"))).permute(2, 0, 1) / 255
    assert picture.shape == (3, 2 * HEIGHT, 5 * WIDTH)
    for number in range(5):
        column = picture[:, :, number * WIDTH : (number + 1) * WIDTH]
        assert (column - torch.cat((real[number], future[number]), 1)).abs().max() < 0.51 / 255
    assert set(os.listdir()) == {"walk.mkv", "grey.pth", "c.pth", "walk-predicted.mp4", "walk-predicted.png"}


def test_where_the_clip_ends_the_real_frames_are_black(run: Run) -> None:
    words = ["--weights", "grey.pth", "--after", "1.2", "--context", "3", "--frames", "7", "--size", "11x9"]
    status, out, err = run("walk.mkv", *words, "-o", "a.mkv", "--picture", "b.png", "--json")
    assert (status, err) == (0, "")
    told = json.loads(out)
    clip = seen(False, (9, 11))
    future = predicted(load_next_frame_network("grey.pth"), clip[9:12], 7)
    assert told["errors"] == pytest.approx((future[:4] - clip[12:]).abs().mean((1, 2, 3)).tolist(), rel=1e-4)
    assert told["errors_of_repeating"] == pytest.approx((clip[11] - clip[12:]).abs().mean((1, 2, 3)).tolist())
    assert told["error"] == pytest.approx(np.mean(told["errors"]), rel=1e-4)
    assert told["error_of_repeating"] == pytest.approx(np.mean(told["errors_of_repeating"]), rel=1e-4)
    assert (told["frames"], told["real_frames"], told["context"], told["size"]) == (7, 4, 3, [9, 11])
    assert (told["after_s"], told["weights"], told["random_seed"]) == (pytest.approx(1.2), "grey.pth", None)
    video = VideoReader("a.mkv", dtype=torch.float32)
    assert (len(video), video.height, video.width) == (7, 10, 22)  # an even number of rows, as yuv420p needs
    assert video[3][:, :9, :10].mean() > 0.1
    assert video[4:][:, :, :9, :10].max() < 0.02
    picture = np.array(Image.open("b.png"))
    assert picture.shape == (18, 77, 3)
    assert picture[:9, 33:44].min() > 0
    assert picture[:9, 44:].max() == 0
    below = torch.from_numpy(picture[9:, :, 0]) / 255  # (9, 77): all seven
    assert (below - torch.cat(list(future), 2)[0]).abs().max() < 0.51 / 255


def test_from_the_end_of_the_clip_on_there_is_nothing_to_compare(run: Run) -> None:
    words = ("walk.mkv", "--weights", "c.pth", "--after", "1.6", "--frames", "2")
    status, out, _ = run(*words)
    assert status == 0
    assert "error" not in out
    assert "the clip ends after 0 of these 2 frames: the real frames after that are black" in out
    told = json.loads(run(*words, "--json")[1])
    assert (told["error"], told["errors"], told["real_frames"], told["context"]) == (None, [], 0, 10)


def test_random_weights_are_said_to_be_random_and_are_those_of_their_seed(run: Run) -> None:
    words = ("walk.mkv", "--frames", "2", "--context", "2", "--size", "6x6")
    status, out, err = run(*words, "--random-weights", "3")
    assert (status, err) == (0, "")
    assert "weights: random, seed 3: the network is untrained, so its prediction means nothing" in out
    assert ", grey\n" in out
    first, again, other = (json.loads(run(*words, "--random-weights", seed, "--json")[1]) for seed in "334")
    assert (first["random_seed"], first["weights"]) == (3, None)
    assert first["errors"] == again["errors"] != other["errors"]
    assert json.loads(run(*words, "--random-weights", "3", "--json", "--colour")[1])["colours"] == "colour"


def test_any_precision_predicts_nearly_the_same(run: Run) -> None:
    words = ("walk.mkv", "--weights", "c.pth", "--frames", "4", "--json")
    whole, half, double = (json.loads(run(*words, "--dtype", dtype)[1])["errors"] for dtype in ("fp32", "bf16", "fp64"))
    assert half != whole
    assert half == pytest.approx(whole, abs=HALF)
    assert double == pytest.approx(whole, abs=1e-5)


def test_weights_of_keras(run: Run) -> None:
    h5py = pytest.importorskip("h5py")
    ours = load_next_frame_network("c.pth").state_dict()
    kernels = {key: value.permute(*range(2, value.dim()), 1, 0) for key, value in ours.items() if value.dim() > 1}
    with h5py.File("network.weights.h5", "w") as file:
        for number in range(3):
            layer = f"layers.{number}."
            tensors = (kernels[layer + "kernel"], kernels[layer + "recurrent_kernel"], ours[layer + "bias"])
            _keras_layer(file, "conv_lstm2d", number, "/cell", *tensors)
        for number in range(2):
            names = ("weight", "bias", "running_mean", "running_var")
            _keras_layer(file, "batch_normalization", number, "", *(ours[f"norms.{number}.{name}"] for name in names))
        _keras_layer(file, "conv2d", 0, "", kernels["head.weight"], ours["head.bias"])
    words = ("walk.mkv", "--frames", "2", "--json")
    mine, keras = (json.loads(run(*words, "--weights", path)[1]) for path in ("c.pth", "network.weights.h5"))
    assert mine["errors"] == keras["errors"]


def _keras_layer(file: object, kind: str, number: int, inner: str, *tensors: torch.Tensor) -> None:
    for place, tensor in enumerate(tensors):
        file[f"layers/{kind}{f'_{number}' if number else ''}{inner}/vars/{place}"] = tensor.numpy()  # type: ignore[index]


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        ([], 2, "CLIP"),
        (["walk.mkv"], 2, "expected exactly one of --weights FILE and --random-weights SEED"),
        (["walk.mkv", "--weights", "c.pth", "--random-weights", "0"], 2, "expected exactly one of"),
        (["missing.mp4", "--weights", "c.pth"], 2, "missing.mp4 does not exist"),
        (["text.mp4", "--weights", "c.pth"], 2, "text.mp4 is not a video that FFmpeg can read"),
        (["walk.mkv", "--weights", "missing.pth"], 2, "'missing.pth' is neither a file"),
        (["walk.mkv", "--weights", "text.mp4"], 1, "text.mp4 is damaged or not a file of weights"),
        (["walk.mkv", "--weights", "other.pth"], 1, "other.pth: no weights of a next-frame network"),
        (["walk.mkv", "--weights", "part.pth"], 1, "part.pth is not from a network that predicts the next frame"),
        (
            ["walk.mkv", "--weights", "bias.pth"],
            1,
            "bias.pth (its keys are named as in rooftop) does not fit next_frame",
        ),
        (["walk.mkv", "--weights", "nan.pth"], 1, "the weights are damaged"),
        (
            ["walk.mkv", "--weights", "c.pth", "--grey"],
            2,
            "c.pth belongs to a network for colour frames: leave out --grey",
        ),
        (["walk.mkv", "--weights", "c.pth", "--frames", "16"], 2, "walk.mkv is too short: it has 16 frames"),
        (["walk.mkv", "--weights", "c.pth", "--context", "7"], 2, "walk.mkv is too short: 6 of its 16 frames come"),
        (["walk.mkv", "--weights", "c.pth", "--after", "0"], 2, "walk.mkv is too short: 0 of its 16 frames come"),
        (["walk.mkv", "--weights", "c.pth", "--after", "1.7"], 2, "expected seconds from 0 to 1.600"),
        (["walk.mkv", "--weights", "c.pth", "--after", "nan"], 2, "--after nan"),
        (["walk.mkv", "--weights", "c.pth", "--frames", "0"], 2, "--frames"),
        (["walk.mkv", "--weights", "c.pth", "--size", "4x0"], 2, "--size"),
        (["walk.mkv", "--weights", "c.pth", "--size", "8193x4"], 2, "Give a smaller --size"),
        (["walk.mkv", "--weights", "c.pth", "-o", "no/such.mp4"], 2, "there is no folder no"),
        (["walk.mkv", "--weights", "c.pth", "-o", "a.webm"], 2, "a.webm: expected a name with .mp4 or .mkv or .mov"),
        (["walk.mkv", "--weights", "c.pth", "-o", "walk.mkv"], 2, "walk.mkv is an input: give another name"),
        (["walk.mkv", "--weights", "c.pth", "--picture", "a.jpg"], 2, "a.jpg: expected a name with .png"),
        (["walk.mkv", "--weights", "c.pth", "--picture", "folder.png"], 2, "folder.png is a folder"),
    ],
)
def test_what_goes_wrong_is_one_line(run: Run, words: list[str], status: int, message: str) -> None:
    Path("text.mp4").write_text("no video")
    Path("folder.png").mkdir()
    torch.save({"fc.weight": torch.zeros(2, 2)}, "other.pth")
    state = torch.load("grey.pth")
    torch.save({key: value for key, value in state.items() if not key.startswith("layers.2")}, "part.pth")
    torch.save({key: value for key, value in state.items() if key != "head.bias"}, "bias.pth")
    torch.save({**state, "head.bias": torch.tensor([float("nan")])}, "nan.pth")
    before = set(os.listdir())
    got, out, err = run(*words)
    assert got == status, err
    assert message in err
    assert err.startswith("rooftop: error: ")
    assert len(err.splitlines()) == 1
    assert out == ""
    assert set(os.listdir()) == before


def test_what_was_there_is_as_it_was_after_a_failure(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    Path("walk-predicted.mp4").write_text("older")
    Path("walk-predicted.png").write_text("older")
    monkeypatch.setattr(Image.Image, "save", full)
    status, out, err = run("walk.mkv", "--weights", "grey.pth", "--frames", "2")
    assert (status, out) == (1, "")
    assert "No space left" in err
    assert Path("walk-predicted.mp4").read_text() == Path("walk-predicted.png").read_text() == "older"
    assert len(os.listdir()) == 5


def test_help_lists_the_verb_without_torch() -> None:
    code = "import sys; from rooftop.cli.main import main; main(['--help']); sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "predict-video Predict the next frames of a clip" in " ".join(done.stdout.split())


def test_its_own_help_has_examples(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["predict-video", "--help"]) == 0
    assert "rooftop predict-video walk.mp4 --weights next_frame.keras" in capsys.readouterr().out


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "tolerance"), [((), HALF), (("--dtype", "fp32"), 1e-3)])
def test_a_gpu_predicts_what_the_cpu_predicts(
    dtype: tuple[str, ...], tolerance: float, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["walk.mkv", "--weights", "c.pth", "--frames", "4", "--json"]
    status, out, err = run(*words)
    assert status == 0, err
    on_cpu = json.loads(out)
    status = main(["predict-video", *words, "--device", "cuda", *dtype])
    captured = capsys.readouterr()
    assert status == 0, captured.err
    assert json.loads(captured.out)["errors"] == pytest.approx(on_cpu["errors"], abs=tolerance)
