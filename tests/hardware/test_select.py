"""GPUs are chosen from described machines; jobs and ensembles run on two devices, mostly the CPU twice."""

from __future__ import annotations

import copy
import io
import time
from threading import Barrier, Event, get_ident
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rooftop.errors import RooftopError
from rooftop.hardware import select
from rooftop.hardware.device import Cpu, Gpu, cpu
from rooftop.hardware.select import DeviceSelectionError, Ensemble, on_each, select_devices
from rooftop.hardware.timing import measure
from rooftop.hardware.topology import Peer

GIB = 2**30
TWO_CPUS = ["cpu", "cpu"]
CPU = torch.device("cpu")
PATIENCE_S = 20  # seconds after which a test fails if it waits for a missing thread

needs_two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


# Choosing


def gpu(index: int, free_gib: float | None, capability: tuple[int, int] = (9, 0), **paths: Peer) -> Gpu:
    return Gpu(
        index=index,
        name="NVIDIA Test",
        uuid=None,
        compute_capability=capability,
        sm_count=132,
        memory_bytes=80 * GIB,
        free_bytes=None if free_gib is None else int(free_gib * GIB),
        l2_bytes=50 << 20,
        shared_memory_per_sm_bytes=None,
        shared_memory_per_block_bytes=None,
        registers_per_sm=None,
        warp_size=32,
        max_threads_per_sm=None,
        max_threads_per_block=None,
        topology={name.replace("cuda", "cuda:"): peer for name, peer in paths.items()},
    )


def machine(monkeypatch: pytest.MonkeyPatch, *gpus: Gpu) -> None:
    everything: list[Gpu | Cpu] = [*gpus, cpu()]
    monkeypatch.setattr(select, "devices", lambda: everything)


def chosen(*args: Any, **kwargs: Any) -> list[str]:
    return [str(device) for device in select_devices(*args, **kwargs)]


def test_the_most_free_memory_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, gpu(0, 10), gpu(1, 70), gpu(2, 40), gpu(3, 40))
    assert chosen() == ["cuda:1"]
    assert chosen(4) == ["cuda:1", "cuda:2", "cuda:3", "cuda:0"]
    assert chosen(3, min_free_bytes=40 * GIB) == ["cuda:1", "cuda:2", "cuda:3"]


def test_an_older_gpu_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, gpu(0, 70, (8, 9)), gpu(1, 10, (9, 0)), gpu(2, 5, (10, 0)))
    assert chosen(2, min_capability=(9, 0)) == ["cuda:1", "cuda:2"]


def test_where_the_driver_does_not_say_cuda_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, gpu(0, 10), gpu(1, None))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: ({1: 20 * GIB}[index], 80 * GIB))
    assert chosen(2) == ["cuda:1", "cuda:0"]


def test_near_prefers_nvlink_then_direct_access_then_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    paths = {
        "cuda1": Peer("across sockets (SYS)", 0, False),
        "cuda2": Peer("one PCIe switch (PIX)", 0, True),
        "cuda3": Peer("NVLink", 4, True),
        "cuda4": Peer("NVLink switch", 18, True),
    }
    machine(monkeypatch, gpu(0, 80, **paths), gpu(1, 70), gpu(2, 60), gpu(3, 10), gpu(4, 20))
    expected = ["cuda:4", "cuda:3", "cuda:2", "cuda:1"]
    assert chosen(4, near="cuda:0") == chosen(4, near=0) == chosen(4, near=torch.device("cuda", 0)) == expected
    assert chosen(1, near=0, min_free_bytes=50 * GIB) == ["cuda:2"]
    with pytest.raises(DeviceSelectionError, match=r"cuda:0 .*: the GPU that the others should be near"):
        chosen(5, near=0)
    for wrong in ("cpu", "cuda:5", 7):
        with pytest.raises(ValueError, match="is not a GPU of this machine: torch can use 5"):
            chosen(near=wrong)


def test_the_refusal_says_of_each_gpu_why(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, gpu(0, 70, (8, 0)), gpu(1, 0.5), gpu(2, 60), gpu(3, 2.5, (7, 5)))
    with pytest.raises(DeviceSelectionError) as caught:
        select_devices(2, min_free_bytes=20 * GIB, min_capability=(9, 0))
    assert str(caught.value) == (
        "asked for 2 GPUs with at least 20 GiB free and compute capability 9.0, 1 of 4 qualify: "
        "cuda:0 (NVIDIA Test): compute capability 8.0; cuda:1 (NVIDIA Test): 512 MiB free of 80 GiB; "
        "cuda:2 (NVIDIA Test): qualifies; cuda:3 (NVIDIA Test): 2.5 GiB free of 80 GiB, compute capability 7.5"
    )
    assert isinstance(caught.value, (RooftopError, ValueError))


def test_without_gpus_the_refusal_names_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch)
    with pytest.raises(DeviceSelectionError, match=r"asked for 1 GPU, but torch can use no GPU.*nvidia-smi"):
        select_devices()
    with pytest.raises(ValueError, match="1 or more, got 0"):
        select_devices(0)


@pytest.mark.parametrize("near", ["gpu0", -1, "cuda:7", "cpu"])
def test_a_partner_that_does_not_exist_is_refused(near: str | int, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, gpu(0, 70))
    with pytest.raises(ValueError, match=r"is not a GPU of this machine: torch can use 1 GPU, from"):
        select_devices(near=near)


@pytest.mark.parametrize("wrong", [9.0, 9, [9, 0], (9,), ("9", "0")])
def test_a_capability_is_a_pair_of_integers(wrong: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, gpu(0, 70))
    with pytest.raises(ValueError, match=r"a compute capability like \(9, 0\), got"):
        select_devices(min_capability=wrong)


# Jobs


def test_results_come_in_the_order_of_the_jobs() -> None:
    def job(number: int) -> Any:
        def run(device: torch.device) -> tuple[int, Tensor]:
            time.sleep(0.01 * (number % 3))
            return number, torch.full((2,), float(number), device=device)

        return run

    results = on_each([job(number) for number in range(7)], TWO_CPUS)
    assert [number for number, _ in results] == list(range(7))
    assert all(torch.equal(tensor, torch.full((2,), float(number))) for number, tensor in results)
    assert on_each([], TWO_CPUS) == []
    assert on_each([lambda device: device.type], ["cpu"]) == ["cpu"]


def test_devices_run_at_the_same_time_and_not_in_the_calling_thread() -> None:
    both = Barrier(2)

    def job(device: torch.device) -> int:
        both.wait(PATIENCE_S)  # passes only if two jobs are at this point at once
        return get_ident()

    assert len({*on_each([job, job], TWO_CPUS), get_ident()}) == 3


def test_a_device_that_is_free_takes_the_next_job() -> None:
    last_began = Event()

    def long_job(device: torch.device) -> int:
        assert last_began.wait(PATIENCE_S)
        return get_ident()

    def short_job(device: torch.device) -> int:
        return get_ident()

    def last_job(device: torch.device) -> int:
        last_began.set()
        return get_ident()

    busy, *others = on_each([long_job, short_job, short_job, last_job], TWO_CPUS)
    assert len(set(others)) == 1
    assert busy not in others


def test_the_first_exception_is_raised_when_running_jobs_have_ended_and_no_job_follows() -> None:
    failed, ended, started = Event(), Event(), []

    def slow(device: torch.device) -> None:
        assert failed.wait(PATIENCE_S)
        time.sleep(0.05)
        ended.set()

    def failing(device: torch.device) -> None:
        failed.set()
        raise KeyError("of the job")

    with pytest.raises(KeyError, match="of the job") as caught:
        on_each([slow, failing, *[started.append] * 5], TWO_CPUS)
    assert caught.value.__notes__ == ["job 1 on cpu"]
    assert ended.is_set()
    assert started == []


def test_a_second_exception_does_not_hide_the_first() -> None:
    raised = Event()

    def early(device: torch.device) -> None:
        raised.set()
        raise ValueError("early")

    def late(device: torch.device) -> None:
        assert raised.wait(PATIENCE_S)
        time.sleep(0.05)
        raise ValueError("late")

    with pytest.raises(ValueError, match="early"):
        on_each([late, early], TWO_CPUS)


def state(device: torch.device | None = None) -> tuple[Any, ...]:
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None,
        torch.is_autocast_cache_enabled(),
    )


CONTEXTS = {
    "none": torch.enable_grad,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "bfloat16": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "float16": lambda: torch.autocast("cpu", dtype=torch.float16, cache_enabled=False),
}


@pytest.mark.parametrize("name", CONTEXTS)
def test_modes_of_the_calling_thread_hold_in_the_jobs(name: str) -> None:
    with CONTEXTS[name]():
        expected = state()
        assert on_each([state] * 3, TWO_CPUS) == [expected] * 3
    assert on_each([state] * 3, TWO_CPUS) == [state()] * 3


def test_no_devices_are_refused() -> None:
    with pytest.raises(ValueError, match="devices is empty"):
        on_each([state], [])


# Ensembles


def pair(device: str = "cpu") -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3)).to(device) for _ in range(2)]


class Meeting(nn.Module):
    """A model whose forward only returns while another one is in its forward too."""

    def __init__(self, both: Barrier) -> None:
        super().__init__()
        self.both = both

    def forward(self, x: Tensor) -> Tensor:
        self.both.wait(PATIENCE_S)
        return x


def test_an_ensemble_stacks_what_each_model_gives() -> None:
    models, x = pair(), torch.randn(5, 8)
    expected = torch.stack([model(x) for model in models])
    ensemble = Ensemble(models, TWO_CPUS)
    for _ in range(3):
        assert torch.equal(ensemble(x), expected)
    assert not torch.equal(expected[0], expected[1])
    assert len(list(ensemble.parameters())) == 8


def test_outputs_are_combined_in_the_order_of_the_models() -> None:
    models, x = pair(), torch.randn(5, 8)
    mean = Ensemble(models, TWO_CPUS, combine=lambda outputs: sum(outputs) / len(outputs))
    torch.testing.assert_close(mean(x), (models[0](x) + models[1](x)) / 2)
    first = Ensemble(models, TWO_CPUS, combine=lambda outputs: outputs[0])
    assert torch.equal(first(x), models[0](x))


def test_models_run_at_the_same_time() -> None:
    both = Barrier(2)
    ensemble = Ensemble([Meeting(both), Meeting(both)], TWO_CPUS)
    for _ in range(2):
        assert ensemble(torch.ones(1)).shape == (2, 1)


def test_arguments_of_any_structure_reach_each_model() -> None:
    class Model(nn.Module):
        def forward(self, pairs: list[tuple[Tensor, str]], *, scale: dict[str, Tensor]) -> dict[str, Tensor]:
            return {name: tensor * scale[name] for tensor, name in pairs}

    ensemble = Ensemble([Model(), Model()], TWO_CPUS, combine=list)
    outputs = ensemble([(torch.ones(2), "a")], scale={"a": torch.tensor(3.0)})
    assert [output["a"].tolist() for output in outputs] == [[3.0, 3.0]] * 2
    with pytest.raises(TypeError, match=r"model 0 returned a dict.*combine="):
        Ensemble([Model(), Model()], TWO_CPUS)([], scale={})


def test_gradients_flow_to_the_input_and_to_every_model() -> None:
    models, x = pair(), torch.randn(5, 8, requires_grad=True)
    alone = copy.deepcopy(models)
    torch.stack([model(x) for model in alone]).square().sum().backward()
    assert x.grad is not None
    expected, x.grad = x.grad, None
    Ensemble(models, TWO_CPUS)(x).square().sum().backward()
    torch.testing.assert_close(x.grad, expected)
    for model, other in zip(models, alone, strict=True):
        for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.equal(ours.grad, theirs.grad)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", CONTEXTS)
def test_modes_of_the_calling_thread_hold_in_the_models(name: str) -> None:
    class Reporting(nn.Module):
        def forward(self) -> tuple[Any, ...]:
            return state()

    ensemble = Ensemble([Reporting(), Reporting()], TWO_CPUS, combine=list)
    with CONTEXTS[name]():
        assert ensemble() == [state()] * 2
    assert ensemble() == [state()] * 2  # the ensemble keeps its threads, but not their modes


def test_an_exception_names_its_model_and_the_next_call_works() -> None:
    ensemble = Ensemble(pair(), TWO_CPUS)
    ensemble.models[1][0].bias = nn.Parameter(torch.zeros(5))
    with pytest.raises(RuntimeError) as caught:
        ensemble(torch.ones(1, 8))
    assert caught.value.__notes__ == ["model 1 on cpu"]
    ensemble.models[1][0].bias = nn.Parameter(torch.zeros(16))
    assert ensemble(torch.ones(1, 8)).shape == (2, 1, 3)


def test_an_ensemble_that_has_run_can_be_copied_and_saved() -> None:
    ensemble, x = Ensemble(pair(), TWO_CPUS), torch.randn(5, 8)
    expected = ensemble(x)
    assert torch.equal(copy.deepcopy(ensemble)(x), expected)
    file = io.BytesIO()
    torch.save(ensemble, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=False)(x), expected)


def test_what_cannot_be_placed_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one module"):
        Ensemble([])
    with pytest.raises(ValueError, match="2 modules need 2 devices, got 1"):
        Ensemble(pair(), ["cpu"])
    shared = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"weight of module 0 is on meta, not on cpu.*deepcopy"):
        Ensemble([shared, shared], ["cpu", "meta"])


def test_without_gpus_an_ensemble_is_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert Ensemble(pair()).devices == [CPU, CPU]


# On GPUs


class Matmuls(nn.Module):
    """Some ms of work with small inputs and outputs, so that the links are not timed."""

    def __init__(self, size: int = 4096, count: int = 20) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.randn(size, size, dtype=torch.bfloat16) / size**0.5)
        self.count = count

    def forward(self, x: Tensor) -> Tensor:  # (size,) -> (size,)
        h = self.weights * x
        for _ in range(self.count):
            h = h @ self.weights
        return h.float().mean(0)


@pytest.mark.gpu
def test_a_job_on_a_gpu_has_its_own_stream_and_follows_what_the_caller_launched() -> None:
    x = torch.ones(4096, 4096, device="cuda")
    for _ in range(20):
        x = x @ x / 4096  # still running when the jobs begin
    places = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]

    def job(device: torch.device) -> tuple[torch.device, int, Tensor]:
        assert torch.cuda.current_device() == device.index
        return device, torch.cuda.current_stream().cuda_stream, x.to(device).sum()

    results = on_each([job] * (3 * len(places)), places)
    assert all(stream != torch.cuda.default_stream(device).cuda_stream for device, stream, _ in results)
    assert all(total.device == device and total.item() == 4096**2 for device, _, total in results)


@pytest.mark.gpu
def test_a_thread_whose_first_call_is_a_matrix_product_has_a_context() -> None:
    # creates the context: without one cuBLAS warns, and warnings are errors here
    models, x = pair("cuda:0"), torch.randn(5, 8, device="cuda:0")
    assert torch.equal(Ensemble(models, ["cuda:0"] * 2)(x), torch.stack([model(x) for model in models]))


@pytest.mark.gpu
@needs_two_gpus
def test_on_two_gpus_an_ensemble_gives_what_each_model_gives_alone() -> None:
    models = [Matmuls(1024, 3).to("cuda:0"), Matmuls(1024, 3).to("cuda:0")]
    x = torch.randn(1024)
    with torch.no_grad():
        expected = torch.stack([model(x.to("cuda:0", torch.bfloat16)) for model in models])
        ensemble = Ensemble(models, ["cuda:0", "cuda:1"])
        assert {p.device for p in ensemble.models[1].parameters()} == {torch.device("cuda:1")}
        for source in ("cpu", "cuda:0", "cuda:1"):
            output = ensemble(x.to(source, torch.bfloat16))
            assert output.device == torch.device("cuda:0")
            assert torch.equal(output, expected), source


@pytest.mark.gpu
@pytest.mark.alone
@needs_two_gpus
def test_on_two_gpus_an_ensemble_takes_the_time_of_its_slower_model() -> None:
    """About 20 ms of work, launched in less than a tenth of this time, so that one host can launch for both GPUs."""
    ensemble = Ensemble([Matmuls(count=100), Matmuls(count=100)], ["cuda:0", "cuda:1"])
    alone_ms = []
    with torch.inference_mode():
        for model, device in zip(ensemble.models, ensemble.devices, strict=True):
            x = torch.randn(4096, device=device, dtype=torch.bfloat16)
            with torch.cuda.device(device):
                alone_ms.append(measure(lambda model=model, x=x: model(x), device=device).median_ms)
        x = torch.randn(4096, device="cuda:0", dtype=torch.bfloat16)
        with torch.cuda.device(0):
            together_ms = measure(lambda: ensemble(x), device="cuda:0").median_ms
    assert min(alone_ms) > 10, "too little work to compare times"
    assert together_ms <= 1.1 * max(alone_ms), (together_ms, alone_ms)
