"""Training in one process: it learns, bfloat16 keeps float32 weights, saved files are complete, and the roof is a
bound."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Collection
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from rooftop.cli import train as command
from rooftop.cli.main import main
from rooftop.cli.train_texts import advice
from rooftop.cost.roofs import roof
from rooftop.errors import InputError, ModelRunError
from rooftop.hardware import ceilings_of
from rooftop.models import GptConfig, gpt_config
from rooftop.parallel import Layout
from rooftop.testing import no_waiting_for_gpu
from rooftop.train import (
    GptTrainer,
    GptTraining,
    MainWeights,
    Replayed,
    StepReport,
    Tokens,
    find_training,
    load_training,
    nothing_saved,
    other_data,
    run_steps,
    save_training,
    step_cost,
    step_roof,
)
from rooftop.train.checkpoints import folders as checkpoint_folders
from rooftop.train.checkpoints import writing as checkpoint_writing

CONFIG = GptConfig(vocabulary=11, layers=2, width=16, heads=2, kv_heads=2, hidden=32, positions=8, dropout=0.1)
TRAINING = GptTraining(config=CONFIG, length=8, global_batch=4, micro_batch=2, learning_rate=0.01)
COUNTING = Tokens([np.arange(500) % 11], "counting")
CPU = torch.device("cpu")


def trainer(training: GptTraining = TRAINING, device: torch.device = CPU) -> GptTrainer:
    layout = Layout()
    return GptTrainer(training, COUNTING, layout, layout.process_groups(), device)


def losses(of: GptTrainer, steps: int) -> list[float]:
    return [float(of.advance()[0]) for _ in range(steps)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_learns_to_count(dtype: torch.dtype) -> None:
    quick = replace(TRAINING, micro_batch=4, learning_rate=0.03, config=replace(CONFIG, layers=1, dropout=0.0))
    found = losses(trainer(replace(quick, dtype=dtype)), 40)
    assert found[0] == pytest.approx(np.log(11), abs=0.1)
    assert found[-1] < 0.5


def test_the_size_of_micro_batches_changes_rounding_only() -> None:
    exact = replace(TRAINING, dtype=torch.float64)
    expected = losses(trainer(exact), 4)
    for size in (1, 4):
        np.testing.assert_allclose(losses(trainer(replace(exact, micro_batch=size)), 4), expected, rtol=0, atol=1e-12)
    np.testing.assert_allclose(losses(trainer(replace(exact, recompute=True)), 4), expected, rtol=0, atol=1e-12)


def test_without_clipping_the_norm_is_the_same_and_training_another() -> None:
    clipped, free = (trainer(replace(TRAINING, clip=clip)) for clip in (0.01, 0.0))
    assert torch.equal(clipped.advance()[1], free.advance()[1])
    assert all(group["weight_decay"] == 0 for group in free.optimizer.param_groups[1:])


SCHEDULED = replace(TRAINING, learning_rate=0.5, warmup=4, decay="cosine", decay_steps=12, least_rate=0.1)


@pytest.mark.parametrize("decay", ["linear", "cosine"])
def test_the_rate_is_that_of_torchs_schedulers(decay: str) -> None:
    ours = replace(SCHEDULED, decay=decay)
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.5)
    warm = torch.optim.lr_scheduler.LinearLR(optimizer, 1 / 4, 1.0, total_iters=3)
    falling = (
        torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=8, eta_min=0.1)
        if decay == "cosine"
        else torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1 / 0.5, total_iters=8)
    )
    schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm, falling], milestones=[3])
    expected = []
    for _ in range(12):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert [ours.rate_at(step) for step in range(1, 13)] == pytest.approx(expected)
    assert [ours.rate_at(step) for step in (4, 12, 13, 1000)] == pytest.approx([0.5, 0.1, 0.1, 0.1])


def test_a_constant_rate_may_warm_up() -> None:
    assert [replace(TRAINING, learning_rate=1.0, warmup=2).rate_at(step) for step in (1, 2, 3)] == [0.5, 1.0, 1.0]
    assert TRAINING.rate_at(1) == TRAINING.rate_at(10**6) == 0.01


def test_each_step_is_made_with_its_rate_also_after_loading(tmp_path: Path) -> None:
    one = trainer(SCHEDULED)
    (reports,) = run_steps(one, 1)
    assert reports[0].learning_rate == 0.125
    assert {group["lr"] for group in one.optimizer.param_groups} == {0.125}
    expected = losses(one, 4)
    first = trainer(SCHEDULED)
    losses(first, 3)
    save_training(tmp_path, first)
    second = trainer(SCHEDULED)
    load_training(find_training(tmp_path, SCHEDULED)[0], second)
    assert losses(second, 2) == expected[2:]
    assert second.optimizer.param_groups[0]["lr"] == SCHEDULED.rate_at(5)


# ---- main weights ------------------------------------------------------------------------------------------------


def test_steps_too_small_for_bfloat16_add_up() -> None:
    model = nn.Linear(4, 1, bias=False)
    nn.init.ones_(model.weight)
    weights = MainWeights(model, torch.bfloat16)
    optimizer = torch.optim.SGD(weights.named.values(), lr=1e-3)
    for _ in range(8):
        model(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
        assert model.weight.grad is None
        optimizer.step()
        optimizer.zero_grad()
        weights.publish()
    torch.testing.assert_close(weights.named["weight"].detach(), torch.full((1, 4), 0.992))
    # starting at 1, it ends below 0.996
    assert torch.equal(model.weight, torch.full((1, 4), 0.992, dtype=torch.bfloat16))


def test_gradients_of_micro_batches_add_up_in_float32() -> None:
    model = nn.Linear(1, 1, bias=False)
    weights = MainWeights(model, torch.bfloat16)
    for value in (1.0, *[2**-9] * 8):
        model(torch.full((1, 1), value, dtype=torch.bfloat16)).sum().backward()
    gradient = weights.named["weight"].grad
    assert gradient is not None
    assert gradient.item() == 1 + 8 * 2**-9  # in bfloat16, each of the eight additions would be lost


def test_a_wide_model_is_stepped_itself() -> None:
    model = nn.Linear(2, 2)
    weights = MainWeights(model, torch.float32)
    assert weights.named["weight"] is model.weight
    weights.publish()


def test_the_loss_of_a_bfloat16_model_is_not_rounded_to_its_three_digits() -> None:
    for loss in losses(trainer(replace(TRAINING, dtype=torch.bfloat16)), 3):
        assert loss != torch.tensor(loss).bfloat16().item()


# ---- on disk -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_what_is_loaded_goes_on_bit_for_bit(dtype: torch.dtype, tmp_path: Path) -> None:
    training = replace(TRAINING, dtype=dtype)
    expected = losses(trainer(training), 6)
    first = trainer(training)
    assert losses(first, 3) == expected[:3]
    assert save_training(tmp_path, first) == tmp_path / "step-00000003"
    found, step = find_training(tmp_path, training)
    second = trainer(training)
    load_training(found, second)
    assert (step, second.step) == (3, 3)
    assert losses(second, 3) == expected[3:]


def test_other_data_are_noticed(tmp_path: Path) -> None:
    one = trainer()
    one.advance()
    found, tokens = save_training(tmp_path, one), one.batches.tokens
    assert other_data(found, tokens) is None
    whole = tokens.read(0, len(tokens)).numpy()
    assert other_data(found, Tokens([whole[:7], whole[7:]], "the same in two files")) is None
    for changed in (whole[:-1], whole[::-1].copy(), (whole + 1) % 3):
        assert "its sequences differ" in (other_data(found, Tokens([changed], "other")) or "")
    described = json.loads((found / "training.json").read_text())
    del described["data"]
    (found / "training.json").write_text(json.dumps(described))  # older files do not describe the data
    assert other_data(found, Tokens([whole[:-1]], "other")) is None


def test_a_save_that_fails_leaves_the_last_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = trainer()
    one.advance()
    save_training(tmp_path, one)
    one.advance()

    def torn(path: Path, *_: object) -> None:
        path.write_bytes(b"half")
        raise OSError("no space left")

    with monkeypatch.context() as patched:
        patched.setattr(checkpoint_writing, "write_file", torn)
        with pytest.raises(
            OSError,
            match=r"could not be written to .* \(no space left\)\. Is there enough room\? Earlier",
        ):
            save_training(tmp_path, one)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-00000001"]
    found, step = find_training(tmp_path, TRAINING)
    assert step == 1
    load_training(found, trainer())
    save_training(tmp_path, one)  # leftover files cause no problem
    assert find_training(tmp_path, TRAINING)[1] == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-00000001", "step-00000002"]


@pytest.mark.parametrize("done", range(4))
def test_a_step_that_is_saved_again_is_there_all_the_time(
    done: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process may end after any renaming."""
    one = trainer()
    one.advance()
    save_training(tmp_path, one)
    replace_, left = checkpoint_folders.os.replace, iter(range(done))

    def replaced(*names: Path) -> None:
        if next(left, None) is None:
            raise OSError("the machine is gone")
        replace_(*names)

    with monkeypatch.context() as patched:
        patched.setattr(checkpoint_folders.os, "replace", replaced)
        with nullcontext() if done == 3 else pytest.raises(OSError, match="gone"):
            save_training(tmp_path, one)
    found, step = find_training(tmp_path, TRAINING)
    assert step == 1
    load_training(found, trainer())
    unfinished = tmp_path / ".step-00000001.unfinished"
    unfinished.write_text("in the way")
    again = save_training(tmp_path, one)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", again.name]


@pytest.mark.parametrize("damage", ['{"format": 1, "training": [1]}', '{"format": 1}', "[]", "{"])
def test_a_folder_that_holds_no_training_says_so(damage: str, tmp_path: Path) -> None:
    found = save_training(tmp_path, trainer())
    (found / "training.json").write_text(damage)
    with pytest.raises(InputError, match="is not a file of rooftop train gpt --save"):
        find_training(tmp_path, TRAINING)
    (tmp_path / "latest").write_text("\0")
    with pytest.raises(InputError, match="but this step does not exist; complete steps are step-"):
        find_training(tmp_path, TRAINING)


def test_only_what_changes_no_number_may_change(tmp_path: Path) -> None:
    save_training(tmp_path, trainer())
    find_training(tmp_path, replace(TRAINING, micro_batch=1, learning_rate=0.1, recompute=True, cuda_graph=True))
    other = replace(TRAINING, seed=7, config=replace(CONFIG, layers=3))
    with pytest.raises(
        InputError,
        match=r"--num-layers is 2 in the checkpoint and 3 now; --seed is 0 in the checkpoint and 7 now\. Resume with",
    ):
        find_training(tmp_path, other)


def test_a_damaged_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no training was saved"):
        find_training(tmp_path, TRAINING)
    folder = save_training(tmp_path, trainer())
    (folder / "rank-00000.safetensors").write_bytes(b"nothing")
    with pytest.raises(InputError, match=r"rank-00000\.safetensors, which has the tensor .*, has 7 bytes, expected"):
        load_training(find_training(tmp_path, TRAINING)[0], trainer())
    (folder / "training.json").write_text("{}")
    with pytest.raises(InputError, match="is not a file of rooftop train gpt --save"):
        find_training(tmp_path, TRAINING)


@pytest.mark.gpu
def test_a_gpu_trains_as_the_cpu_and_goes_on(tmp_path: Path) -> None:
    gpu, exact = torch.device("cuda"), replace(TRAINING, dtype=torch.float64)
    np.testing.assert_allclose(losses(trainer(exact, gpu), 4), losses(trainer(exact), 4), rtol=0, atol=1e-9)
    narrow = replace(TRAINING, dtype=torch.bfloat16)
    expected, first = losses(trainer(narrow, gpu), 6), trainer(narrow, gpu)
    losses(first, 3)
    save_training(tmp_path, first)
    second = trainer(narrow, gpu)
    load_training(find_training(tmp_path, narrow)[0], second)
    # The sums of attention's gradient come in any order; a lost state of the optimizer would change far more.
    assert losses(second, 3) == pytest.approx(expected[3:], rel=1e-3)


# ---- from a CUDA graph -------------------------------------------------------------------------------------------

GRAPHED = replace(TRAINING, cuda_graph=True)
CLOSE = {torch.float64: 1e-9, torch.float32: 1e-3, torch.bfloat16: 3e-2}  # attention's sums come in any order


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", CLOSE, ids=str)
@pytest.mark.parametrize(
    "change", [{}, {"micro_batch": 4}, {"recompute": True}, {"clip": 0.0}, {"clip": 0.01}], ids=str
)
def test_replayed_steps_are_those_that_are_launched(change: dict[str, Any], dtype: torch.dtype) -> None:
    """Each replay has its own sequences, masks and step of the optimizer."""
    gpu = torch.device("cuda")
    plain, replayed = (trainer(replace(each, dtype=dtype, **change), gpu) for each in (TRAINING, GRAPHED))
    expected, found = ([each.advance() for _ in range(9)] for each in (plain, replayed))
    assert replayed._replayed is not None
    assert replayed._replayed.captured
    torch.testing.assert_close(found, expected, rtol=0, atol=CLOSE[dtype])
    for name, weight in plain.weights.named.items():
        torch.testing.assert_close(replayed.weights.named[name], weight, rtol=0, atol=CLOSE[dtype])


@pytest.mark.gpu
def test_the_comparison_sees_masks_that_stand_still(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, exact = torch.device("cuda"), replace(GRAPHED, dtype=torch.float64)
    expected, wrong = losses(trainer(exact, gpu), 8), trainer(exact, gpu)
    found, sent = losses(wrong, 4), wrong._sent
    monkeypatch.setattr(wrong, "_sent", lambda numbers: sent(numbers if numbers.dim() else torch.tensor(3)))
    found += losses(wrong, 4)
    assert found[:4] == pytest.approx(expected[:4], abs=1e-9)
    assert abs(np.array(found[4:]) - expected[4:]).max() > 1e-4


@pytest.mark.gpu
def test_the_host_waits_for_no_replay() -> None:
    one = trainer(GRAPHED, torch.device("cuda"))
    losses(one, 5)
    with no_waiting_for_gpu():
        for _ in range(3):
            one.advance()


@pytest.mark.gpu
def test_what_others_do_with_gradients_does_not_reach_replays() -> None:
    gpu, exact = torch.device("cuda"), replace(GRAPHED, dtype=torch.float64)
    expected, one = losses(trainer(exact, gpu), 9), trainer(exact, gpu)
    tokens, found = torch.zeros(1, 4, dtype=torch.int64, device=gpu), losses(one, 3)
    for number in range(6):
        one.model(tokens, tokens).backward()
        if number % 2:
            one.optimizer.zero_grad()
        found += losses(one, 1)
    assert found == pytest.approx(expected, abs=1e-9)


@pytest.mark.gpu
def test_replays_go_on_with_what_is_loaded(tmp_path: Path) -> None:
    gpu, exact = torch.device("cuda"), replace(GRAPHED, dtype=torch.float64)
    expected, one = losses(trainer(exact, gpu), 8), trainer(exact, gpu)
    losses(one, 5)
    save_training(tmp_path, one)
    losses(one, 2)
    for again in (one, trainer(exact, gpu), trainer(replace(exact, cuda_graph=False), gpu)):
        load_training(find_training(tmp_path, again.training)[0], again)
        assert losses(again, 3) == pytest.approx(expected[5:], abs=1e-9)


@pytest.mark.gpu
def test_a_replay_refuses_other_shapes() -> None:
    doubled = Replayed(lambda x: (x * 2,), torch.device("cuda"), warm_up=1)
    for number in range(4):
        assert doubled(torch.full((3,), number))[0].tolist() == [2 * number] * 3
        assert doubled.captured == (number > 0)
    with pytest.raises(ValueError, match=r"captured with \(3,\) torch.int64, got \(1,\) torch.int64"):
        doubled(torch.ones(1, dtype=torch.int64))
    for wrong, words in (([torch.ones(3)], r"got \(3,\) torch.float32:"), ([], "got nothing: give inputs with")):
        with pytest.raises(ValueError, match=words):
            doubled(*wrong)
    leaf = torch.ones(3, requires_grad=True)
    of_leaf = Replayed(lambda x: (x * 2,), torch.device("cuda"), warm_up=0)
    assert not any(of_leaf(leaf)[0].requires_grad for _ in range(3))


@pytest.mark.gpu
def test_a_loop_of_ones_own() -> None:
    """The loop of docs/training.md."""

    def trained(with_graph: bool) -> list[float]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 4)).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

        def gradients_of(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            return (loss.detach(),)

        step = Replayed(gradients_of, torch.device("cuda")) if with_graph else gradients_of
        found = []
        for _ in range(9):
            x, y = torch.randn(16, 8), torch.randint(4, (16,))
            (loss,) = step(x, y) if with_graph else step(x.cuda(), y.cuda())
            optimizer.step()
            found.append(loss)
        return [float(loss) for loss in found]

    assert trained(True) == pytest.approx(trained(False), abs=1e-5)


@pytest.mark.gpu
def test_what_cannot_be_captured_is_said() -> None:
    """The capture runs in a separate process, because a failed capture affects later GPU work."""
    lines = [
        "import torch",
        "from rooftop.train import Replayed",
        "said = Replayed(lambda x: (x * float(x.sum()),), torch.device('cuda'), warm_up=1)",
        "said(torch.ones(3))",
        "said(torch.ones(3))",
    ]
    ended = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, timeout=100)
    assert ended.returncode == 1
    assert "RuntimeError: Replayed: the function cannot be captured in a CUDA graph: " in ended.stderr
    assert "operation not permitted" in ended.stderr


def test_a_graph_needs_a_gpu() -> None:
    with pytest.raises(ValueError, match="needs a GPU, but the training runs on cpu: leave the graph out"):
        trainer(GRAPHED)
    with pytest.raises(ValueError, match="Replayed: a CUDA graph needs a GPU, got cpu: call the function directly"):
        Replayed(lambda: (), CPU)
    with pytest.raises(ValueError, match="needs a GPU, but the training runs on cpu"):
        GRAPHED.check(Layout(), 1, "cpu")
    GRAPHED.check(Layout(), 1, "cuda:0")


def test_on_gpus_halves_need_a_graph() -> None:
    halves = replace(GRAPHED, cuda_graph=False, halves=True, micro_batch=2, global_batch=2)
    halves.check(Layout(tp=2), 2, "cpu")
    with pytest.raises(ValueError, match=r"halves \(--tp-comm-overlap\) double the launches.* also set cuda_graph"):
        halves.check(Layout(tp=2), 2, "cuda")
    replace(halves, cuda_graph=True).check(Layout(tp=2), 2, "cuda")


@pytest.mark.parametrize(("change", "device"), [({"cuda_graph": True}, "cuda"), ({"halves": True}, "cpu")])
def test_data_ranks_that_share_the_model_have_neither_graph_nor_halves(change: dict[str, Any], device: str) -> None:
    training, layout = replace(TRAINING, config=replace(CONFIG, vocabulary=12), **change), Layout(dp=2, tp=2)
    training.check(layout, 4, device)
    with pytest.raises(
        ValueError, match=r"fully_shard .* cannot be combined with (halves|a CUDA graph) .*: leave out one"
    ):
        training.check(layout, 4, device, fully_shard=True)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"decay": "steps"}, "decay must be one of constant, linear, cosine, got 'steps'"),
        ({"decay": "cosine"}, "decay_steps .* must be more than the 0 steps of the warm-up, got None"),
        ({"decay": "linear", "decay_steps": 5, "warmup": 5}, "must be more than the 5 steps of the warm-up, got 5"),
        ({"decay": "linear", "decay_steps": 5, "least_rate": 1.0}, "at most the learning_rate 0.01, got 1.0"),
        (
            {"least_rate": 1e-4},
            r"need a learning rate that falls: expected decay \(--lr-decay-style\) linear or cosine",
        ),
        ({"decay_steps": 7}, "need a learning rate that falls"),
        ({"warmup": -1}, "warmup must be finite and 0 or more"),
        ({"learning_rate": float("inf")}, "learning_rate must be finite and 0 or more, got inf"),
        ({"seed": 1 << 64}, "seed must be an int from 0"),
        ({"halves": True, "micro_batch": 1}, "a micro_batch of 1 cannot be halved"),
        ({"halves": True, "recompute": True}, "cannot be combined with recompute"),
        ({"length": 9}, "sequences of 9 tokens, but the model has 8 positions"),
        ({"micro_batch": 0}, "micro_batch must be positive"),
        ({"clip": -1.0}, "clip must be finite and 0 or more"),
        ({"dtype": torch.float16}, "dtype must be one of float64, float32, bfloat16"),
    ],
)
def test_what_cannot_be_trained_is_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        replace(TRAINING, **change)


# ---- reports -----------------------------------------------------------------------------------------------------


def test_reports_have_every_step_once_in_groups_of_the_interval(tmp_path: Path) -> None:
    groups = list(run_steps(trainer(), 8, interval=3, save=tmp_path, save_interval=5))
    assert [[report.step for report in group] for group in groups] == [[1], [2, 3], [4, 5], [6], [7, 8]]
    assert [report.loss for group in groups for report in group] == losses(trainer(), 8)
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-00000005", "step-00000008"]


@pytest.mark.parametrize("name", ["interval", "save_interval"])
def test_intervals_are_at_least_one_step(name: str, tmp_path: Path) -> None:
    one = trainer()
    with pytest.raises(ValueError, match=f"{name} is 0: expected 1 or more steps"):
        next(run_steps(one, 2, save=tmp_path / "run", **{name: 0}))
    assert one.step == 0
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("options", [{"save_interval": 2}, {"keep_last": 1}, {"async_save": False}])
def test_how_it_is_saved_needs_a_folder(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="need save, the folder of the checkpoints: give save"):
        next(run_steps(trainer(), 3, **options))


def test_folders_may_be_given_as_text(tmp_path: Path) -> None:
    one, folder = trainer(), str(tmp_path / "run")
    assert nothing_saved(folder)
    list(run_steps(one, 1, save=folder))
    one.advance()
    saved = save_training(folder, one)
    assert saved == tmp_path / "run" / "step-00000002"
    found, step = find_training(folder, TRAINING)
    assert (found, step) == (saved, 2)
    assert other_data(str(found), one.batches.tokens) is None
    again = trainer()
    load_training(str(found), again)
    assert losses(again, 2) == losses(one, 2)


def test_a_micro_batch_that_does_not_divide_the_batch_is_told_which_do() -> None:
    for layout, ranks in ((Layout(), 1), (Layout(dp=2), 2)):
        with pytest.raises(
            ValueError, match=r"global_batch=4 \(--global-batch-size\) is not divisible by micro_batch=3"
        ) as said:
            replace(TRAINING, micro_batch=3, global_batch=4).check(layout, ranks, "cpu")
        assert "use a micro-batch of 2 or 4, or another global batch" in str(said.value)
        assert "rank fits" not in str(said.value)


def test_a_model_begins_from_no_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = trainer()
    one.advance()
    save_training(tmp_path / "run", one)
    said = "holds a training of rooftop train gpt --save, not a model of Hugging Face: resume it with --load"
    (tmp_path / "book.txt").write_text("abc " * 200)
    for folder in ("run", "run/step-00000001"):
        assert called(tmp_path, "--init-from", str(tmp_path / folder)) == 2
        err = capsys.readouterr().err
        assert f"{tmp_path / folder} {said}" in err
        assert f"rooftop checkpoint export-hf {tmp_path / folder} -o FOLDER" in err
        with pytest.raises(InputError, match=said):
            GptTrainer(TRAINING, COUNTING, Layout(), Layout().process_groups(), CPU, initial=str(tmp_path / folder))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    with pytest.raises(InputError, match="belongs to a Hugging Face model: start a training from it with --init-from"):
        find_training(tmp_path / "model", TRAINING)


def test_a_loss_that_is_not_finite_ends_it() -> None:
    one = trainer()
    with torch.no_grad():
        next(iter(one.model.parameters())).fill_(torch.nan)
    with pytest.raises(ModelRunError, match="the loss of step 1 is nan"):
        list(run_steps(one, 3))


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has"), "Tried to allocate 2.00"),
        (MemoryError("Unable to allocate 9 TiB for an array"), "Unable to allocate 9 TiB"),
        (None, "the CPU cannot allocate 4194304.00 GiB more"),
    ],
)
def test_out_of_memory_is_one_line_that_says_what_helps(
    error: Exception | None, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = trainer()

    def raises() -> None:
        if error is not None:
            raise error
        torch.empty(1 << 50)

    one.advance()
    monkeypatch.setattr(one, "advance", raises)
    with pytest.raises(
        ModelRunError, match=r"out of memory in step 2 \(.*\): use a smaller --micro-batch-size"
    ) as said:
        list(run_steps(one, 3))
    assert words in str(said.value)


def test_another_error_of_a_step_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    one = trainer()

    def raises() -> None:
        raise RuntimeError("shapes differ")

    monkeypatch.setattr(one, "advance", raises)
    with pytest.raises(RuntimeError, match=r"^shapes differ$"):
        list(run_steps(one, 3))


def test_the_cost_of_a_step_is_that_of_its_flops_and_weights() -> None:
    training = replace(TRAINING, config=replace(CONFIG, dropout=0.0))
    elements = training.config.parameters
    wide, narrow = (step_cost(trainer(replace(training, dtype=kind))) for kind in (torch.float32, torch.bfloat16))
    flops = 4 * 8 * training.config.flops_per_token(8)
    assert (dict(wide.flops), dict(narrow.flops)) == ({"fp32": flops}, {"bf16": flops})
    assert (wide.read_bytes, wide.write_bytes) == (elements * 4 * 6, elements * 4 * 4)
    assert (narrow.read_bytes, narrow.write_bytes) == (elements * (2 * 2 + 4 * 4), elements * (4 * 4 + 2))
    h200 = ceilings_of("h200")
    found = step_roof(trainer(training), h200)
    assert found.ms == roof(wide, h200).ms
    assert found.percent(2 * found.ms) == pytest.approx(50)
    assert found.mfu(1e3) == flops / h200.peak("fp32")


# ---- the command line --------------------------------------------------------------------------------------------


def called(folder: Path, *words: str) -> int:
    return main(["train", "gpt", "--device", "cpu", "--data-path", str(folder), "--train-iters", "3", *words])


def test_a_graph_is_advised_where_steps_are_far_from_the_roof() -> None:
    def said(
        step: int, percent: float | None, device: str = "cuda", graph: bool = False, shared: bool = False,
        end: int | None = None, cp: int = 1,
    ) -> bool:  # fmt: skip
        report = StepReport(step, 1.0, 1.0, 1e-3, 1e4, None, percent, 0)
        training, layout = SimpleNamespace(cuda_graph=graph, document_end=end), SimpleNamespace(cp=cp)
        of: Any = SimpleNamespace(device=torch.device(device), training=training, fully_shard=shared, layout=layout)
        words = advice(report, of)
        return words is not None and words.startswith("4.2% of roof") and "--enable-cuda-graph" in words

    assert said(10, 4.2)
    assert not any((said(1, 4.2), said(10, 40.0), said(10, None), said(10, 4.2, "cpu"), said(10, 4.2, graph=True)))
    assert not said(10, 4.2, shared=True)
    assert not said(10, 4.2, end=0), "documents cannot be combined with a graph"
    assert not said(10, 4.2, cp=2)


def test_a_graph_is_the_default_where_launches_limit_one_gpu() -> None:
    small, large = (
        GptTraining(config=gpt_config(name), length=1024, global_batch=8, micro_batch=8, dtype=torch.bfloat16)
        for name in ("gpt2", "llama-7b")
    )
    assert small.is_limited_by_launches(Layout(), "cuda")
    assert not small.is_limited_by_launches(Layout(), "cpu")
    assert not small.is_limited_by_launches(Layout(dp=2), "cuda")
    assert not replace(small, document_end=3).is_limited_by_launches(Layout(), "cuda")
    assert not large.is_limited_by_launches(Layout(), "cuda")
    # GPT-2 needs about 0.86 Gflop for a token of 1024, so a layer needs 1.2 Tflop for 16 sequences and 1.8 for 24
    assert replace(small, micro_batch=16, global_batch=16).is_limited_by_launches(Layout(), "cuda")
    assert not replace(small, micro_batch=24, global_batch=24).is_limited_by_launches(Layout(), "cuda")
    assert not replace(small, dtype=torch.float32).is_limited_by_launches(Layout(), "cuda")
    # 10.7 GiB were measured for 32 sequences, and the graph holds the activations once more
    assert 10.7 < replace(small, micro_batch=32, global_batch=32).graph_bytes / 2**30 < 2.5 * 10.7


def test_a_graph_is_the_default_only_where_memory_suffices(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("up and down and " * 40)
    made: list[GptTraining] = []
    real = command.training_of
    monkeypatch.setattr(
        command, "training_of", lambda *given, **options: made.append(real(*given, **options)) or made[-1]
    )
    sizes = ["--num-layers", "1", "--hidden-size", "16", "--seq-length", "16", "--device", "cuda", "--dry-run"]
    for memory in (1e3, 1e9):
        monkeypatch.setattr(command, "memory_bytes", lambda memory=memory: memory)
        for word in ([], ["--enable-cuda-graph"], ["--disable-cuda-graph"]):
            assert main(["train", "gpt", "--data-path", str(tmp_path), "--train-iters", "3", *sizes, *word]) == 0
    assert [each.cuda_graph for each in made] == [False, True, False, True, True, False]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("word", "replays"), [(None, True), ("--enable-cuda-graph", True), ("--disable-cuda-graph", False)]
)
def test_the_command_replays_small_layers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], word: str | None, replays: bool
) -> None:
    (tmp_path / "a.txt").write_text("up and down and " * 40)
    sizes = ["--num-layers", "1", "--hidden-size", "16", "--seq-length", "16", "--train-iters", "6"]
    words = ["train", "gpt", "--device", "cuda", "--data-path", str(tmp_path), *sizes, *([word] if word else [])]
    assert main(words) == 0
    assert ("a CUDA graph replays forward and backward from step 4 on" in capsys.readouterr().out) == replays


def test_the_command_trains_on_a_folder_of_text_and_shows_the_roof(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = tmp_path / "texts"
    texts.mkdir()
    (texts / "a.txt").write_text("up and down and " * 20)
    measured = []

    def measure(device: torch.device, *, precisions: Collection[str], transfers: bool, links: bool, **_: Any) -> Any:
        measured.append((set(precisions), transfers, links))
        return ceilings_of("h200")

    monkeypatch.setattr("rooftop.cli.train.measure_ceilings", measure)
    sizes = ["--num-layers", "1", "--hidden-size", "16", "--seq-length", "16", "--log-interval", "1"]
    assert called(texts, *sizes, "--metrics", str(tmp_path / "metrics.jsonl")) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert measured == [({"fp32"}, False, False)]  # other ceilings would only delay the first step
    assert "float32 on 1 x cpu: dp=1 tp=1 pp=1 cp=1" in out
    assert f"19 sequences of 16 tokens in {texts}, 1 a step" in out
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]
    for line in lines:
        assert 0 < line["mfu"] < 1
        assert 0 < line["percent_of_roof"] < 100
        assert line["peak_bytes"] > 1 << 20
        assert f"step {line['step']}/3  loss {line['loss']:.6f}  grad norm {line['grad_norm']:.4f}  lr 3.00e-04" in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--save-interval", "5"], "--save-interval needs a folder"),
        (["--preset", "gpt2", "--hidden-size", "8"], "--preset gpt2 sets --hidden-size"),
        (["--preset", "gpt2", "--seq-length", "2048"], "sequences of 2048 tokens, but the model has 1024 positions"),
        (["--tensor-parallel-size", "2"], "only this one: start them by torchrun --nproc-per-node 2 -m rooftop.train"),
        (["--num-attention-heads", "3"], "3 heads do not divide a width of 256"),
        (["--metrics", "no/such/folder/m"], "there is no folder no/such/folder"),
    ],
)
def test_a_wrong_call_is_one_line(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.txt").write_text("text " * 100)
    assert called(tmp_path, *words) == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1


def test_figures_are_not_written_over_the_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "a.txt"
    text.write_text("text " * 100)
    for data in (text, tmp_path):
        assert called(data, "--metrics", str(text)) == 2
        assert "is an input: give another name" in capsys.readouterr().err
    assert text.read_text() == "text " * 100


def test_tokens_without_a_vocabulary_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.save(tmp_path / "a.npy", np.arange(1000))
    assert called(tmp_path / "a.npy") == 2
    assert "expected --vocab-size" in capsys.readouterr().err


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "gpt", "--help"]) == 0
    out = capsys.readouterr().out
    assert "torchrun --nproc-per-node 4 -m rooftop.train gpt" in out
    assert "--tensor-parallel-size" in out
