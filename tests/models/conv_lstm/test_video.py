"""Continuing a clip: the baseline, and frames that are refused."""

from __future__ import annotations

import pytest
import torch

from rooftop.models import next_frame_network
from rooftop.models.conv_lstm.video import continue_clip

CLIP = torch.rand(5, 3, 6, 6, generator=torch.Generator().manual_seed(0))


def test_errors_are_of_the_frames_that_have_a_real_frame() -> None:
    found = continue_clip(next_frame_network(filters=2), CLIP[:3], CLIP[3:], 4)
    assert found.frames.shape == (4, 1, 6, 6)
    assert found.errors.shape == found.errors_of_repeating.shape == (2,)
    assert continue_clip(next_frame_network(filters=2), CLIP[:3], CLIP[:0], 1).errors.shape == (0,)


@pytest.mark.parametrize("name", ["context", "real"])
def test_frames_of_bytes_are_refused(name: str) -> None:
    """In bytes, the weights that convert colours to grey would round to 0."""
    frames = {"context": CLIP[:3], "real": CLIP[3:]}
    frames[name] = (255 * frames[name]).byte()
    with pytest.raises(TypeError, match=rf"{name} must be floating point in 0\.\.1, got torch\.uint8"):
        continue_clip(next_frame_network(filters=2), count=1, **frames)
