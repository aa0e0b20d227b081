"""The machine is described without guessing, with and without a GPU."""

from __future__ import annotations

import json

import pytest
import torch

from rooftop.cli.main import main
from rooftop.hardware import devices
from rooftop.hardware.device import gpu, versions


def test_the_cpu_is_always_there_and_last() -> None:
    found = devices()
    assert [d.kind for d in found] == ["cuda"] * torch.cuda.device_count() + ["cpu"]
    cpu = found[-1].to_dict()
    assert cpu["logical_cores"] >= 1
    assert 0 < cpu["free_bytes"] <= cpu["memory_bytes"]
    json.dumps([d.to_dict() for d in found])


def test_versions_name_torch() -> None:
    assert versions()["torch"] == torch.__version__


def test_a_gpu_that_is_not_there_is_an_error() -> None:
    with pytest.raises(ValueError, match="no GPU 99"):
        gpu(99)


def test_the_verb_prints_a_table_or_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["device"]) == 0
    table = capsys.readouterr().out
    assert "instruction sets" in table
    if not torch.cuda.is_available():
        assert "No GPU that torch can use" in table
    assert main(["device", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["devices"][-1]["kind"] == "cpu"


@pytest.mark.gpu
def test_gpu_figures_are_those_of_the_driver() -> None:
    found = gpu(0)
    properties = torch.cuda.get_device_properties(0)
    assert (found.name, found.sm_count) == (properties.name, properties.multi_processor_count)
    assert found.l2_bytes > 0
    assert found.max_sm_clock_mhz is None or found.max_sm_clock_mhz > 500
