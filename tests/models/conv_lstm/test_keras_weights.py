"""Files of Keras that Rooftop cannot load: errors instead of wrong weights. The files are written without Keras."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from torch import nn

from rooftop.errors import WeightsError
from rooftop.models import load_keras_weights

h5py = pytest.importorskip("h5py")


def test_an_older_file_of_a_nested_model_is_refused(tmp_path: Path) -> None:
    """Keras stores all layers of a nested model in one group, so two kernels would have one name."""
    names = [f"nested/conv2d{number}/{weight}" for number in ("", "_1") for weight in ("kernel:0", "bias:0")]
    with h5py.File(tmp_path / "nested.h5", "w") as file:
        root = file.create_group("model_weights")
        root.attrs["layer_names"] = ["nested"]
        group = root.create_group("nested")
        group.attrs["weight_names"] = names
        for name in names:
            group[name] = np.zeros((3, 3, 2, 2) if "kernel" in name else 2, np.float32)
    message = "nested has several layers, and the file does not tell their order: nested/conv2d/"
    with pytest.raises(WeightsError, match=message):
        load_keras_weights(nn.Conv2d(2, 2, 3), tmp_path / "nested.h5")


def test_a_layer_with_a_single_number_is_named(tmp_path: Path) -> None:
    """The layer Normalization stores a mean, a variance and a count, which is a scalar."""
    with h5py.File(tmp_path / "layer.weights.h5", "w") as file:
        for number, value in enumerate((np.zeros(1), np.ones(1), np.int32(0))):
            file[f"layers/normalization/vars/{number}"] = value
    with pytest.raises(WeightsError, match=r"the file has 1 normalization; the model needs 1 conv2d"):
        load_keras_weights(nn.Conv2d(2, 2, 3), tmp_path / "layer.weights.h5")
