"""Public functions take paths as users write them: "~" is the home folder."""

from __future__ import annotations

import json
import tarfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import rooftop
from rooftop import models
from rooftop.analysis import Report
from rooftop.analysis.instruments import require_folder_of
from rooftop.analysis.scripts import run_script
from rooftop.cluster import map_items
from rooftop.cluster.items import find_inputs
from rooftop.data import ImageFolder, TarShards
from rooftop.errors import InputError, WeightsError
from rooftop.hardware import Ceilings, ceilings_of
from rooftop.hardware.traces import Trace
from rooftop.media import images
from rooftop.models import GptConfig
from rooftop.models.detr import load_detr_weights
from rooftop.optimization.optimized import PLAN_VERSION
from rooftop.parallel import Layout
from rooftop.train import (
    GptTrainer,
    GptTraining,
    Mixture,
    find_training,
    load_training,
    nothing_saved,
    open_mixture,
    open_tokens,
    save_training,
)
from rooftop.train.checkpoints.conversions import convert
from rooftop.train.checkpoints.distributed_reader import CheckpointReader
from rooftop.train.checkpoints.trained_models import load_trained_gpt, saved_training
from rooftop.train.checkpoints.training_records import holds_training, read_record
from rooftop.train.fitting import fit
from rooftop.train.gpt.initial_weights import check_no_training
from rooftop.train.recipes import Recipe
from rooftop.train.tasks.finding import find_task
from rooftop.train.tasks.task import Task
from rooftop.train.tokens.mixtures import paths_of
from rooftop.user_paths import user_path

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The home folder, which is not the current folder."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "home").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def photographs(home: Path) -> Path:
    """A folder of photographs for each of two classes."""
    for number, name in enumerate(("cats", "dogs")):
        (home / "photos" / name).mkdir(parents=True)
        for index in range(4):
            Image.new("RGB", (32, 32), (60 * index, 99, 99 * number)).save(home / "photos" / name / f"{index}.png")
    return home / "photos"


def test_a_name_of_no_user_stays(home: Path) -> None:
    assert user_path("~/a.mp4") == home / "a.mp4"
    assert user_path("~nobody-of-this-name.mp4") == Path("~nobody-of-this-name.mp4")


def test_reports_and_ceilings(home: Path) -> None:
    ceilings = ceilings_of("h200")
    report = rooftop.predict(nn.Linear(8, 8), torch.randn(8, 8), ceilings=ceilings)
    report.to_json("~/report.json")
    report.to_html("~/report.html")
    ceilings.save("~/ceilings.json")
    assert {path.name for path in home.iterdir()} == {"report.json", "report.html", "ceilings.json"}
    assert Report.from_json("~/report.json").to_dict() == report.to_dict()
    assert Ceilings.load("~/ceilings.json") == ceilings_of("~/ceilings.json") == ceilings


def test_traces(home: Path) -> None:
    require_folder_of("~/trace.json")
    with Trace(CPU, save_to="~/trace.json"):
        torch.ones(8) + 1
    assert json.loads((home / "trace.json").read_text())["traceEvents"]


def test_scripts(home: Path) -> None:
    (home / "script.py").write_text("raise SystemExit(7)")
    assert run_script("~/script.py", device="cpu", ceilings=replace(ceilings_of("h200"), kind="cpu")).status == 7


def test_plans(home: Path) -> None:
    (home / "plan.json").write_text(json.dumps({"version": PLAN_VERSION, "rules": []}))
    rooftop.optimize(nn.Linear(8, 8), torch.randn(2, 8), plan="~/plan.json").save("~/again.json")
    assert json.loads((home / "again.json").read_text())["rules"] == []


def test_photographs(photographs: Path) -> None:
    path, found = "~/photos/cats/1.png", photographs / "cats" / "1.png"
    assert images.find_images([path]) == [found]
    images.check_images([path])
    expected = images.read_image(found)
    assert torch.equal(images.read_image(path), expected)
    assert [each.path for each in images.read_images(["~/photos/cats"])] == sorted((photographs / "cats").iterdir())
    assert images.ImageFile.of(path).content == found.read_bytes()
    assert np.array_equal(np.asarray(images.rgb_pixels(path)), expected.permute(1, 2, 0))
    assert models.read_image(path) == Image.open(found)
    assert torch.equal(models.load_images([path]), models.load_images([found]))
    assert ImageFolder("~/photos").root == photographs


def test_jpegs(home: Path) -> None:
    Image.new("RGB", (64, 48), (9, 99, 199)).save(home / "a.jpg")
    assert torch.equal(images.read_image("~/a.jpg"), images.read_image(home / "a.jpg"))


@pytest.mark.parametrize(
    "paths", ["~/shards", "~/shards/{0..1}.tar", "~/shards/*.tar", ["~/shards/0.tar", Path("~/shards/1.tar")]]
)
def test_shards(paths: str | list[str | Path], photographs: Path, home: Path) -> None:
    (home / "shards").mkdir()
    (home / "label.cls").write_text("1")
    for number in range(2):
        with tarfile.open(home / "shards" / f"{number}.tar", "w") as shard:
            shard.add(photographs / "cats" / "0.png", "a.jpg")
            shard.add(home / "label.cls", "a.cls")
    assert TarShards(paths).paths == [home / "shards" / "0.tar", home / "shards" / "1.tar"]


def test_items(home: Path) -> None:
    (home / "out").mkdir()
    (home / "out" / "a.txt").write_text("one\n")
    assert find_inputs(["~/out/a.txt"]) == ("text", [home / "out" / "a.txt"])
    with pytest.raises(InputError, match=r"is in ~/out, the folder of the results"):
        map_items(len, [home / "out" / "a.txt"], "~/out")


def test_scenes(home: Path) -> None:
    pytest.importorskip("meshoptimizer")
    trimesh = pytest.importorskip("trimesh")
    scene = pytest.importorskip("rooftop.scene")
    from rooftop.scene.images import Texture

    ball = trimesh.creation.icosphere(2)
    ball.export(home / "ball.ply")
    scene.build(ball.vertices, ball.faces, "~/built.rtg")
    assert scene.build_file("~/ball.ply").path == home / "ball.rtg"
    assert scene.Geometry.open("~/built.rtg").path == home / "built.rtg"
    assert scene.Scene().add_mesh("~/ball.rtg") == 0
    scene.build_file(home / "ball.ply", "~/again.rtg")
    assert (home / "again.rtg").is_file()
    Image.new("RGB", (4, 4)).save(home / "texture.png")
    assert Texture.of("~/texture.png").name == str(home / "texture.png")


def test_weights_of_detr(home: Path) -> None:
    with pytest.raises(WeightsError, match=str(home / "detr.pth")):
        load_detr_weights(models.detr_small(num_classes=2), "~/detr.pth")


def test_tokens(home: Path) -> None:
    (home / "text.txt").write_text("ten tokens")
    assert len(open_tokens("~/text.txt")) == 10
    assert len(open_mixture(["~/text.txt"])) == 10
    assert paths_of(["~/text.txt"])[0] == home / "text.txt"
    mixture = open_mixture(["0.5", "~/text.txt", "0.5", str(home / "text.txt")])
    assert isinstance(mixture, Mixture)
    assert [row.source for row in mixture.rows] == [str(home / "text.txt")] * 2


def test_checkpoints(home: Path) -> None:
    config = GptConfig(vocabulary=256, layers=1, width=8, heads=2, kv_heads=2, hidden=8, positions=8)
    (home / "text.txt").write_text("some text " * 9)
    training = GptTraining(config=config, length=8, global_batch=1, micro_batch=1)
    trainer = GptTrainer(training, open_tokens("~/text.txt"), Layout(), Layout().process_groups(), CPU)
    check_no_training("~/run")
    assert nothing_saved("~/run")
    saved = save_training("~/run", trainer)
    assert saved.is_relative_to(home / "run")
    assert holds_training("~/run")
    assert not nothing_saved("~/run")
    assert find_training("~/run", training)[0] == read_record("~/run").folder == saved_training("~/run").folder == saved
    load_training("~/run", trainer)
    assert load_trained_gpt("~/run").config == config
    assert CheckpointReader.validate_checkpoint_id("~/run")
    assert CheckpointReader("~/run").read_metadata().state_dict_metadata
    assert convert(read_record("~/run"), "~/whole").is_relative_to(home / "whole")
    with pytest.raises(InputError, match="holds a training"):
        check_no_training("~/run")


def test_recipes_and_runs(home: Path) -> None:
    (home / "recipe.toml").write_text('[run]\nepochs = 1\nbatch = 2\n[loading]\nhow = "here"\n')
    recipe = Recipe.read("~/recipe.toml")
    assert (recipe.run.epochs, recipe.run.batch) == (1, 2)
    task = Task(nn.Linear(2, 1), [torch.ones(2)] * 4, lambda model, batch: model(batch).mean())
    fit(task, recipe, out="~/run", device="cpu")
    assert (home / "run").is_dir()


@pytest.mark.parametrize("name", ["resnet18", "conv_lstm", "detr"])
def test_data_of_tasks(name: str, photographs: Path) -> None:
    build, values = find_task(name, data="~/photos")
    recipe = Recipe.of(values)
    if name == "resnet18":
        assert len(build("~/photos", recipe).train) > 0
        return
    with pytest.raises(InputError, match=str(photographs)):  # the folder has neither videos nor annotations
        build("~/photos", recipe)
