"""Each example runs unchanged and prints what it should.

Examples run in this process, like `python examples/NAME.py` but without the seconds for importing torch again. Links
between the pages must have a target.
"""

from __future__ import annotations

import importlib
import re
import runpy
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy
import pytest
import torch
from PIL import Image

from rooftop.hardware import Ceilings, ceilings_of
from rooftop.models import CocoDataset
from rooftop.models.detr.losses import corners
from rooftop.models.images import MEAN, STD
from rooftop.testing import no_waiting_for_gpu

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "examples"
TESTED_ELSEWHERE = {"classify", "data_parallel"}  # tests/models/vision/test_classification.py, tests/parallel
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
Run = Callable[..., str]

on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs an example with these words on its command line; returns what it printed."""
    monkeypatch.syspath_prepend(FOLDER)  # an example may import its neighbour

    def run_example(name: str, *words: object) -> str:
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *map(str, words)])
        runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")
        return capsys.readouterr().out

    return run_example


def test_every_example_is_tested_and_teaches() -> None:
    names = {path.stem for path in FOLDER.glob("*.py")}
    source = Path(__file__).read_text(encoding="utf-8")
    assert names - TESTED_ELSEWHERE == set(re.findall(r'run\(\s*"(\w+)"', source))
    for name in names:
        text = (FOLDER / f"{name}.py").read_text(encoding="utf-8")
        assert f"python examples/{name}.py" in text.split('"""')[1], f"{name} does not say how to run it"


def line_of(name: str, text: str) -> int:
    """The number of the line of an example that contains a text."""
    lines = (FOLDER / f"{name}.py").read_text(encoding="utf-8").splitlines()
    return 1 + next(number for number, line in enumerate(lines) if text in line)


def mebibytes(printed: str, what: str) -> float:
    return float(re.search(rf"^{what} +([\d,.]+) MiB", printed, re.MULTILINE)[1].replace(",", ""))  # type: ignore[index]


def test_memory_shows_what_makes_a_step_need_less(run: Run) -> None:
    out = run("memory", "--depth", 6, "--width", 64, "--batch", 512)
    training, halved = mebibytes(out, "training step"), mebibytes(out, "training step, half the batch")
    assert mebibytes(out, "forward without gradients") < mebibytes(out, "training step, checkpointed") < training
    assert halved == pytest.approx(training / 2, rel=0.2)
    assert re.search(r"^cpu +- +- +- +[\d,]+", out, re.MULTILINE)
    if not torch.cuda.is_available():
        assert "needs an NVIDIA GPU" in out


@pytest.mark.gpu
def test_memory_on_a_gpu_runs_out_and_explains_it() -> None:
    # A separate process, because after a check of streams, running out of memory raises a SystemError.
    command = [sys.executable, str(FOLDER / "memory.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "cuda:0 is out of memory" in done.stdout
    assert "activations" in done.stdout
    assert "memory.py:" in done.stdout


@on_cpu
def test_streams_without_a_gpu_run_in_order(run: Run) -> None:
    out = run("streams", "--size", 32, "--steps", 3)
    assert "the same result" in out
    assert "need an NVIDIA GPU" in out


@pytest.mark.gpu
def test_streams_on_a_gpu_name_both_lines_of_the_mistake(run: Run) -> None:
    out = run("streams", "--size", 128, "--steps", 5)
    assert f"streams.py:{line_of('streams', 'values.normal_()')}\n" in out
    assert f"streams.py:{line_of('streams', 'values.sum()')}\n" in out


def test_an_ensemble_is_at_least_as_good_as_its_models_are_on_average(run: Run) -> None:
    out = run("ensemble", "--models", 3, "--epochs", 60)
    alone = [float(share) for share in re.findall(r"^model .*: ([\d.]+)% right", out, re.MULTILINE)]
    together = float(re.search(r"all together: ([\d.]+)%", out)[1])  # type: ignore[index]
    agreed = float(re.search(r"points; ([\d.]+)% of those", out)[1])  # type: ignore[index]
    assert len(alone) == 3
    assert sum(alone) / 3 <= together <= agreed


def test_occupancy_names_what_limits_and_what_would_help(run: Run) -> None:
    out = run("occupancy", "--threads", 256, "--registers", 128, "--shared", 49152)
    # By hand: 256 threads of 128 registers are half of the 65,536 registers, so 2 blocks of 8 warps of 64.
    assert out.startswith(
        "16 of 64 warps (25%), limited by registers: 80 registers per thread instead of 128 reach 38%"
    )
    assert re.search(r"registers +room for 2 blocks \(limits\)", out)
    assert re.search(r"shared memory +room for 4 blocks", out)
    refused = run("occupancy", "--shared", 120 << 10)
    assert re.search(r"8\.6 +cannot launch: more shared memory", refused)


def test_occupancy_refuses_what_no_launch_can_have(run: Run) -> None:
    with pytest.raises(SystemExit, match="error: a block of 2048 threads cannot be launched"):
        run("occupancy", "--threads", 2048)


@on_cpu
def test_crossover_without_a_gpu_says_what_it_needs(run: Run) -> None:
    with pytest.raises(SystemExit, match="error: a crossover needs an NVIDIA GPU"):
        run("crossover")


@pytest.mark.gpu
def test_crossover_on_a_gpu(run: Run) -> None:
    out = run("crossover", "--operations", "matmul", "--sizes", 16, 1024)
    assert out.count("rows and columns: CPU") == 2
    assert "the GPU is faster: from about" in out


@pytest.mark.usefixtures("measured")
def test_the_report_of_a_training_loop(run: Run, tmp_path: Path) -> None:
    out = run("training_loop", "--steps", 14, "--batch", 4, "-o", tmp_path / "report.html")
    assert "14 recorded steps" in out
    assert "convolution" in out
    assert "<html" in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_a_step_predicted_for_another_machine(run: Run, tmp_path: Path) -> None:
    small = ("--layers", 1, "--width", 64, "--tokens", 16, "--batches", 1)
    out = run("predict", *small)
    times = [float(ms.replace(",", "")) for ms in re.findall(r"([\d,.]+) ms a step", out)]
    assert len(times) == 2
    assert "NVIDIA H200" in out
    half = ceilings_of("h200").to_dict()
    slow = {**half, "launch_eager_ms": 2 * half["launch_eager_ms"], "device": "Slow"}  # launches limit so small a step
    Ceilings.from_dict(slow).save(tmp_path / "slow.json")
    out = run("predict", *small, "--machine", tmp_path / "slow.json")
    slower = [float(ms.replace(",", "")) for ms in re.findall(r"([\d,.]+) ms a step", out)]
    assert slower == pytest.approx([2 * ms for ms in times], rel=0.02)
    with pytest.raises(SystemExit, match="neither a known machine"):
        run("predict", "--machine", "abacus")


def test_blocks_of_rooftop_give_what_those_of_torch_give(run: Run) -> None:
    out = run("transformer_blocks", "--width", 48)
    apart = [float(each) for each in re.findall(r"results differ by (\S+)", out)]
    assert len(apart) == 3
    assert max(apart) < 1e-5
    assert "gpt.wte: Embedding" in out
    assert (" ms" in out) == torch.cuda.is_available()
    assert ("No times without a GPU" in out) == (not torch.cuda.is_available())


def test_a_fused_expression_moves_fewer_bytes(run: Run) -> None:
    out = run("fused_expression", "--rows", 8, "--columns", 40)
    assert "@triton.jit" in out
    assert "the same results and gradients" in out
    eager, fused = (int(count.replace(",", "")) for count in re.findall(r": ([\d,]+) bytes", out))
    # Fused: x, gate, bias, y; then dy, x, gate, bias, dx, dgate. Both sums add the fill of dy.
    assert fused == 4 * (3 * 320 + 40) + 4 * (5 * 320 + 40) + 4 * 320
    assert eager > 2.5 * fused


@pytest.mark.filterwarnings("ignore:Using `torch.compile")
def test_a_compiled_model_beside_the_same_one_uncompiled(run: Run) -> None:
    out = run("compiled", "--batch", 16, "--features", 32)
    line = line_of("compiled", "hidden.abs().max().item()")
    assert f"compiled.py:{line}: " in out.replace("\n", "")  # the graph break
    before, after = re.search(r"launches +(\d+) -> (\d+)", out).groups()  # type: ignore[union-attr]
    assert int(after) < int(before)


def test_an_engine_gives_what_the_model_gives_and_both_are_timed(run: Run) -> None:
    out = run("engine", "--model", "resnet18", "--batch", 2, "--size", 64, "--seconds", 0.01)
    assert "20 norms folded, 0 left" in out
    assert float(re.search(r"differ by (\S+) of", out)[1]) < (0.1 if torch.cuda.is_available() else 1e-5)  # type: ignore[index]
    assert [name for name, rate in re.findall(r"^(\w+) +([\d,.]+) images/s", out, re.MULTILINE)] == ["model", "engine"]


def test_photographs_are_written(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("skimage")
    assert run("photographs", tmp_path, "--count", 3) == f"3 photographs in {tmp_path}\n"
    assert len(list(tmp_path.glob("*.png"))) == 3


def test_shapes_fill_their_boxes(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = run("shapes", tmp_path, "--count", 5, "--side", 80, "--seed", 3)
    assert out == f"5 pictures in {tmp_path}, their boxes in {tmp_path / 'instances.json'}\n"
    mean, std = (torch.tensor(each)[:, None, None] for each in (MEAN, STD))
    data = CocoDataset(tmp_path, tmp_path / "instances.json", shorter=80, longer=80)
    shapes = importlib.import_module("rooftop.train.tasks.generated.shapes")
    drawn = shapes.draw(5, 80, 3)
    assert data.names == shapes.NAMES
    for (image, target), pixels, expected in zip(data, drawn.images, drawn.targets(), strict=True):
        assert target["labels"].tolist() == expected["labels"].tolist()
        torch.testing.assert_close(target["boxes"], expected["boxes"], rtol=0, atol=1e-5)
        torch.testing.assert_close(image, (pixels - mean) / std, rtol=0, atol=0.02)  # 8 bits
    many, other = shapes.draw(64, 80, 4), shapes.draw(64, 80, 5)
    assert torch.equal(shapes.draw(64, 80, 4).images, many.images)
    assert not torch.equal(other.images, many.images)
    assert set(many.counts) == {1, 2, 3, 4}
    assert set(many.labels.flatten().tolist()) == {0, 1, 2}
    # Without noise, what is not background spans the boxes; smooth outlines reach a pixel beyond.
    monkeypatch.setattr(shapes, "NOISE", 0.0)
    for picture, box, count in zip(*shapes.draw(64, 80, 4)[::2], many.counts, strict=True):
        if count > 2:
            continue  # if shapes cover more than half, the median is not the background
        edges = 80 * corners(box[:count])
        background = picture.flatten(1).median(1).values[:, None, None]
        rows, columns = ((picture - background).abs().sum(0) > 0.01).nonzero().unbind(1)
        found = torch.stack((columns.min(), rows.min(), columns.max() + 1, rows.max() + 1))
        expected = torch.cat((edges[:, :2].min(0).values, edges[:, 2:].max(0).values))
        torch.testing.assert_close(found.float(), expected, rtol=0, atol=1.3)


def test_a_detr_learns_shapes(run: Run, tmp_path: Path) -> None:
    out = run("train_detr", "--quick", "--pictures", 3, "--out", tmp_path)
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", out)]
    assert len(losses) == 10
    assert losses[-1] < losses[0] / 2
    assert float(re.search(r"mAP ([\d.]+) on 3 pictures learned by heart", out)[1]) > 0.2  # type: ignore[index]
    for name, size in (("found", (3 * 256, 2 * 256)), ("loss", (800, 400))):
        with Image.open(tmp_path / f"{name}.png") as picture:
            assert picture.size == size
    out = run("train_detr", "--quick", "--pictures", 0, "--steps", 2, "--out", tmp_path)
    assert re.search(r"mAP \S+ on 8 pictures never seen before", out)


@pytest.mark.parametrize("words", [("--steps", 0), ("--pictures", -1)])
def test_a_detr_that_cannot_be_trained(words: tuple[object, ...], run: Run, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="2"):
        run("train_detr", "--out", tmp_path / "detr", *words)
    assert not (tmp_path / "detr").exists()


def test_a_folder_that_is_a_file_is_found_before_the_training(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file"
    file.touch()
    for name in ("train_detr", "train_conv_lstm", "lidar_segmentation"):
        with pytest.raises(SystemExit, match="2"):
            run(name, "--out", file)
        assert "file is not a folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words", [("--steps", 0), ("--device", "meta"), pytest.param(("--device", "cuda"), marks=on_cpu)]
)
def test_a_conv_lstm_that_cannot_be_trained(words: tuple[object, ...], run: Run, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="2"):
        run("train_conv_lstm", "--out", tmp_path / "trained", *words)
    assert not (tmp_path / "trained").exists()


@pytest.mark.gpu
def test_no_step_of_training_a_detr_waits_for_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    example = importlib.import_module("train_detr")
    recipe = replace(example.RECIPES["cuda"], batch=8, steps=60, warm_up=10)
    device = torch.device("cuda")
    torch.manual_seed(0)
    training = example.Training(recipe, device)
    first = training.step(example.new_pictures(recipe, 1, device))
    with no_waiting_for_gpu():
        losses = [training.step(example.new_pictures(recipe, 1, device)) for _ in range(50)]
    assert losses[-1].item() < 0.7 * first.item()


def held_out(printed: str, measure: str) -> list[float]:
    """Errors of the network, and of copying the last frame."""
    return [float(each) for each in re.findall(rf"^held out, \w+: .*{measure} ([\d.]+)", printed, re.MULTILINE)]


def test_a_gpt_is_better_than_a_bigram_model(run: Run) -> None:
    out = run("gpt_against_bigram", 240)
    assert out.endswith("the GPT is better than the bigram model\n")
    bigram, *losses = map(float, re.findall(r": ([\d.]+) nats a byte", out))
    assert 2.2 < bigram < 2.8  # the standard library differs between versions of Python
    assert losses[-1] < bigram - 0.05
    assert "the GPT is not better" in run("gpt_against_bigram", 1)


def test_a_conv_lstm_learns_where_digits_move(run: Run, tmp_path: Path) -> None:
    out = run("train_conv_lstm", "--quick", "--out", tmp_path)
    network, copying = held_out(out, "BCE")
    assert network < copying
    with Image.open(tmp_path / "frames.png") as picture:
        columns = picture.convert("L").crop((80, 0, picture.width, picture.height))
        assert columns.getextrema() == (0, 255)
    weights = torch.load(tmp_path / "next_frame.pth", weights_only=True)
    assert weights["layers.0.kernel"].shape == (16, 1, 5, 5)


def test_a_conv_lstm_learns_from_a_clip(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("av")
    from rooftop.media import VideoWriter

    frames = torch.zeros(40, 3, 24, 32, dtype=torch.uint8)
    for number, frame in enumerate(frames):
        frame[0, 8:16, number % 24 : number % 24 + 8] = 255
    with VideoWriter(tmp_path / "clip.mp4", 25) as writer:
        writer.write(frames)
    out = run("train_conv_lstm", "--quick", "--clip", tmp_path / "clip.mp4", "--out", tmp_path, "--steps", 3)
    assert "videos of 6 x 16 x 21 x 3" in out
    assert len(held_out(out, "MAE")) == 2
    assert torch.load(tmp_path / "next_frame.pth", weights_only=True)["head.weight"].shape == (3, 4, 3, 3)
    with VideoWriter(tmp_path / "short.mp4", 25) as writer:
        writer.write(frames[:9])
    for clip, problem in (("short.mp4", "has 9 frames: expected at least 30"), ("no.mp4", "does not exist")):
        with pytest.raises(SystemExit, match=rf"error: .*{clip} {problem}"):
            run("train_conv_lstm", "--quick", "--clip", tmp_path / clip, "--out", tmp_path)


def test_scenes_follow_from_their_seed(run: Run) -> None:
    out = run("lidar_scenes", "--seed", 5)
    for name, what in (("street", "vehicle"), ("room", "chair")):
        assert re.search(rf"^{name}, scanned from \d places, (\d+) solids:\n.*{what} [1-9]", out, re.MULTILINE)
    assert run("lidar_scenes", "--seed", 5) == out != run("lidar_scenes", "--seed", 6)


def test_scans_are_written_and_drawn(run: Run, tmp_path: Path) -> None:
    out = run("lidar_scans", tmp_path, "--count", 1, "--seed", 7)
    count = int(re.search(r"street0007.ply: ([\d,]+) points", out)[1].replace(",", ""))  # type: ignore[index]
    assert 80_000 < count < 64 * 2048
    drawn = run("point_clouds", tmp_path / "street0007.ply", "--out", tmp_path / "again.png")
    assert drawn == f"{count:,} points of {tmp_path / 'street0007.ply'}, drawn in {tmp_path / 'again.png'}\n"
    for name in ("street0007", "again"):
        with Image.open(tmp_path / f"{name}.png") as picture:
            colours = picture.crop((0, 100, picture.width, picture.height - 100)).getcolors(1 << 24)
        assert len(colours) > 1000  # type: ignore[arg-type]
    with pytest.raises(SystemExit, match=r"error: .*no\.ply does not exist"):
        run("point_clouds", tmp_path / "no.ply")


def test_a_network_learns_to_label_scans(run: Run, tmp_path: Path) -> None:
    out = run("lidar_segmentation", "--quick", "--setting", "room", "--steps", 18, "--out", tmp_path)
    means = re.findall(r"^(network|by height|most frequent) .* ([\d.]+)$", out, re.MULTILINE)
    network, by_height, most_frequent = (float(mean) for _, mean in means)
    assert network > 1.15 * by_height > 2 * most_frequent
    with Image.open(tmp_path / "labels.png") as picture:
        width = picture.width // 3
        truth, said = (picture.crop((left, 60, left + width, picture.height - 60)) for left in (0, width))
        assert len(truth.getcolors(1 << 24)) > 100  # type: ignore[arg-type]
        assert truth.tobytes() != said.tobytes()
    # A floor and a ceiling, far from the origin and of unknown intensity.
    flat = torch.rand(3000, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 4 + 1e6
    flat[:, 2] = 70 + 2.6 * (flat[:, 0] > flat[:, 0].median())
    numpy.save(tmp_path / "flat.npy", flat.numpy())
    words = ("--points", tmp_path / "flat.npy", "--out", tmp_path, "--weights")
    out = run("lidar_segmentation", *words, tmp_path / "labels.pth")
    assert "step" not in out
    found = importlib.import_module("rooftop.models.point_clouds.clouds").read(tmp_path / "labelled.ply")
    assert torch.equal(found.xyz, flat)
    assert (found.labels[flat[:, 2] > 71] == 1).float().mean() > 0.9
    assert (found.labels[flat[:, 2] < 71] == 0).float().mean() > 0.9
    with Image.open(tmp_path / "labelled.png") as picture:
        assert picture.width > picture.height
    torch.save({"setting": "room"}, tmp_path / "other.pth")
    for name, problem in (
        ("flat.npy", "is not a checkpoint"),
        ("other.pth", "is not a checkpoint"),
        ("no.pth", "not exist"),
    ):
        with pytest.raises(SystemExit, match=rf"error: .*{name}.* {problem}"):
            run("lidar_segmentation", *words, tmp_path / name)
    numpy.save(tmp_path / "stray.npy", [[0, 0, 0], [0, 0, 1e5]])
    for name, problem in (("no.npy", "does not exist"), ("stray.npy", "spans 100,000 m")):
        with pytest.raises(SystemExit, match=f"error: .*{name} {problem}"):
            run("lidar_segmentation", "--points", tmp_path / name, "--out", tmp_path)


@pytest.mark.gpu
def test_a_network_learns_to_label_scans_on_a_gpu(run: Run, tmp_path: Path) -> None:
    out = run("lidar_segmentation", "--quick", "--setting", "room", "--device", "cuda", "--out", tmp_path)
    means = re.findall(r"^(?:network|by height|most frequent) .* ([\d.]+)$", out, re.MULTILINE)
    network, by_height, _ = map(float, means)
    assert network > 1.1 * by_height
    assert (tmp_path / "labels.png").exists()


@pytest.mark.parametrize("words", [("--steps", 0), ("--scans", 0), ("--weights", "labels.pth")])
def test_labels_that_cannot_be_learned(words: tuple[object, ...], run: Run, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="2"):
        run("lidar_segmentation", "--out", tmp_path / "lidar", *words)
    assert not (tmp_path / "lidar").exists()


def test_a_flight_over_mountains_has_no_holes(run: Run, tmp_path: Path) -> None:
    words = ("--size", "160x90", "--frames", 3, "--out", tmp_path, "--device", "cpu")
    out = run("terrain", "--triangles", 100_000, *words)
    assert re.search(r"^100,352 triangles in \d+ levels", out)
    frames = re.findall(r"^frame \d: ([\d,]+) triangles of levels (\d+) to (\d+), .* (\d+) holes", out, re.MULTILINE)
    assert len(frames) == 3
    for triangles, finest, coarsest, holes in frames:
        assert 1000 < int(triangles.replace(",", "")) < 50_000
        assert int(finest) < int(coarsest)
        assert holes == "0"
    changes = [float(change) for change in re.findall(r"([\d.]+) of 255 unlike", out)]
    assert max(changes) < 2 * min(changes)  # no frame is unlike its neighbours
    for show in ("color", "level"):
        with Image.open(tmp_path / f"{show}-002.png") as picture:
            assert picture.size == (160, 90)
            colours = picture.getcolors(1 << 16)
        assert len(colours) > (100 if show == "color" else 2)  # type: ignore[arg-type]
    for wrong in (("--size", "160"), ("--triangles", 1), ("--frames", 0), ("--ground", -1)):
        with pytest.raises(SystemExit, match="2"):
            run("terrain", *wrong, "--out", tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_mountains_have_grass_and_snow(run: Run, tmp_path: Path) -> None:
    """The texture decides the colours, not the few triangles."""
    words = ("--size", "160x90", "--frames", 1, "--out", tmp_path, "--device", "cpu", "--ground", 256)
    run("terrain", "--triangles", 5_000, *words)
    with Image.open(tmp_path / "color-000.png") as picture:
        red, green, blue = numpy.asarray(picture, int).reshape(-1, 3).T
    lit = red + green + blue > 120  # neither sky nor shade
    assert (lit & (green > blue * 1.5)).sum() > 200
    assert (lit & (abs(red - blue) < 25) & (red + green + blue > 330)).sum() > 200


def test_holes_are_found() -> None:
    depth = torch.ones(6, 8)
    depth[0] = torch.inf  # the sky
    holes = runpy.run_path(str(FOLDER / "terrain.py"))["holes"]
    assert holes(depth) == 0
    depth[1, 3] = torch.inf  # a part of the sky
    depth[3, 3] = depth[4, 6] = torch.inf
    assert holes(depth) == 2
    depth[4, 5] = torch.inf  # larger holes are not cracks
    assert holes(depth) == 1


def test_a_field_of_rocks_draws_few_of_its_triangles(run: Run, tmp_path: Path) -> None:
    words = ("--rocks", 400, "--detail", 5, "--size", "160x90", "--sun", "1,0.6,-0.7", "--device", "cpu")
    out = run("field", *words, "--out", tmp_path)
    drawn = re.findall(r"^drawn: ([\d,]+) of 8,322,050 triangles .* hidden: ([\d,]+); shadow", out, re.MULTILINE)
    assert re.findall(r"shadow maps: (\d)", out)[0] == "4"
    triangles, hidden = ([int(each.replace(",", "")) for each in column] for column in zip(*drawn, strict=True))
    assert len(drawn) == 2
    assert max(triangles) < 8_322_050 / 20
    assert hidden[0] == 0 < hidden[1]
    assert triangles[1] < triangles[0]
    shown = {"color", "instance", "cluster", "level", "overdraw", "shadow"}
    assert {path.stem for path in tmp_path.glob("*.png")} == shown
    with Image.open(tmp_path / "instance.png") as picture:
        assert len(picture.getcolors(1 << 16)) > 100  # type: ignore[arg-type]


def test_a_network_learns_from_rendered_points(run: Run, tmp_path: Path) -> None:
    words = ("--views", 3, "--size", 64, "--steps", 32, "--device", "cpu", "--out", tmp_path / "points.npy")
    out = run("mesh_to_points", *words)
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", out)]
    assert losses[-1] < losses[0] / 3
    assert float(re.search(r"^floor +([\d.]+)%", out, re.MULTILINE)[1]) > 80  # type: ignore[index]
    points = numpy.load(tmp_path / "points.npy")
    assert points.shape[0] > 3000
    floor = numpy.abs(points[:, 2]) < 1e-3
    assert (points[floor, 3] == 0).mean() > 0.9
    assert (points[points[:, 2] > 0.6, 3] != 0).mean() > 0.9


def test_a_text_that_was_learned_by_heart_goes_on(run: Run, tmp_path: Path) -> None:
    line = "Under the roof a house is dry. "
    (tmp_path / "text").write_text(line * 3)
    words = ("--steps", 60, "--batch", 2, "--prompt", "Under the", "--new", 40)
    out = run("generate_text", "--text", tmp_path / "text", *words)
    assert float(re.search(r"loss ([\d.]+) nats a byte", out)[1]) < 0.5  # type: ignore[index]
    assert f"--- most probable\n{(line * 2)[:49]}\n---" in out
    assert "--- drawn\nUnder the roof" in out


def test_photographs_are_described_by_a_function_of_the_example(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    for name, grey in (("dark", 20), ("bright", 250), ("medium", 100)):
        Image.new("RGB", (8, 6), (grey, grey, grey)).save(tmp_path / f"{name}.png")
    (tmp_path / "torn.png").write_bytes((tmp_path / "dark.png").read_bytes()[:40])
    out = run("map_photographs", tmp_path, "--out", tmp_path / "out.parquet", "--workers", 1)
    assert "4 rows, 1 of them with an error" in out
    brightest = [line for line in out.splitlines() if " bright, 8 x 6: " in line]
    assert [Path(line.split(": ")[1]).stem for line in brightest] == ["bright", "medium", "dark"]
    assert re.search(r"^not described: .*torn\.png", out, re.MULTILINE)


def test_install_commands_work_in_a_clone() -> None:
    """Rooftop is on no package index: pages must install it from the folder, with extras that exist."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    assert 'install "rooftop' not in text
    assert "install rooftop" not in text
    named = re.findall(r'pip install "\.\[([\w,]+)\]"', text)
    assert len(named) > 10
    assert {extra for each in named for extra in each.split(",")} <= set(extras)


def without_code(page: Path) -> str:
    return re.sub(r"^ *```.*?^ *```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives the headings of a page."""
    found: Counter[str] = Counter()
    names = set()
    for heading in re.findall(r"^#+ (.*)", without_code(page), re.MULTILINE):
        words = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
        name = re.sub(r"[^\w\- ]", "", words).replace(" ", "-")
        names.add(f"{name}-{found[name]}" if found[name] else name)
        found[name] += 1
    return names


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_and_headings(page: Path) -> None:
    targets = re.findall(r"\]\(([^)\s]+)\)", without_code(page))
    for target in targets:
        if re.match(r"\w+:", target):
            continue  # another site
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), f"{page.name} links to {target}, which does not exist"
        if anchor:
            assert anchor in anchors(there), f"{page.name} links to {target}, which is no heading of that page"


def test_a_heading_has_the_name_that_github_gives_it(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# In C++, at `once`\n```\n# a comment\n```\n## A [link](x.md)\n## A link\n")
    assert anchors(page) == {"in-c-at-once", "a-link", "a-link-1"}


def test_what_moves_is_marked(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("av")
    from rooftop.media import VideoReader

    out = run("moving_things", "--out", tmp_path / "moving.mp4", "--device", "cpu")
    share = float(re.search(r"([\d.]+)% of the pixels moved", out)[1])  # type: ignore[index]
    ball = 100 * 3.1416 * 10**2 / (96 * 128)
    assert ball < share < 4 * ball  # the ball, and the background that it has uncovered
    red, green, _ = VideoReader(tmp_path / "moving.mp4")[30].int()
    assert (red - green)[44:52, 86:94].min() > 100  # pixels of the ball
    assert (red - green)[:30, :].abs().max() < 60  # pixels that the ball never reaches


def test_a_network_learns_directions_from_clips(run: Run) -> None:
    pytest.importorskip("av")
    out = run("train_on_clips", "--steps", 25, "--device", "cpu")
    assert int(re.search(r"other videos: (\d+)%", out)[1]) > 90  # type: ignore[index]


def test_a_task_of_ones_own_is_trained_and_resumed(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The task is trained from Python, and by name. A run that is stopped in the middle and resumed has the weights of
    a run without a stop."""
    pytest.importorskip("safetensors")
    from rooftop.train.fitting import fit
    from rooftop.train.recipes import Recipe
    from rooftop.train.stopping import Stop
    from rooftop.train.tasks import find_task

    share = float(re.search(r"^([\d.]+)% of other points after 600 steps", run("my_task"))[1])  # type: ignore[index]
    assert share > 95
    monkeypatch.chdir(ROOT)
    build, defaults = find_task("examples/my_task.py:build")
    recipe = Recipe.of(defaults).with_values(["run.epochs=2", "loading.how=here"])

    def trained(out: Path, **options: object) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        task = build(None, recipe)
        fit(task, recipe, device="cpu", out=out, save_every=7, **options)  # type: ignore[arg-type]
        return task.model.state_dict()

    class StopAfter:
        """Asks to stop after this number of steps."""

        def __init__(self, step: int) -> None:
            self.step, self.stop = step, Stop()

        def stepped(self, records: list[object]) -> None:
            if records[-1].step >= self.step:  # type: ignore[attr-defined]
                self.stop.requested = True

        def __getattr__(self, name: str) -> Callable[..., None]:
            return lambda *_: None

    whole = trained(tmp_path / "whole")
    stopping = StopAfter(23)
    part = trained(tmp_path / "parts", observers=[stopping], stop=stopping.stop)
    assert any(not torch.equal(part[key], whole[key]) for key in whole)
    resumed = trained(tmp_path / "parts", resume=True)
    assert all(torch.equal(resumed[key], whole[key]) for key in whole)
