"""On a GPU, every protocol passes the same pointer, and every operation gives the CPU's bits."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from rooftop import mat
from rooftop.mat import CV_8U, CV_8UC3, CV_32FC1, CV_32FC3, Mat, MatDataFlag
from rooftop.mat.type_codes import DEPTHS

pytestmark = pytest.mark.gpu

DEPTH_NUMBERS = range(len(DEPTHS))


def numbers(depth: int, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """Numbers of a depth, including its limits and, for floats, special values."""
    generator = torch.Generator().manual_seed(seed)
    one = DEPTHS[depth]
    if one.dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    if one.limits is None:
        x = torch.randn(shape, generator=generator, dtype=torch.float64) * 10.0 ** torch.randint(
            -3, 22, shape, generator=generator
        )
        x.view(-1)[:8] = torch.tensor([np.nan, np.inf, -np.inf, 0.5, 1.5, 2.5, 2.0**63, 2.0**64], dtype=torch.float64)
        return x.to(one.dtype)
    raw = torch.randint(-(2**63), 2**63 - 1, shape, generator=generator)
    return raw.to(one.carrier).view(one.dtype)  # any bits


def same(one: Mat, other: Mat) -> bool:
    """The same bits, except that any NaN equals any other."""
    assert one.type() == other.type()
    assert one.size == other.size
    a, b = one.tensor().cpu(), other.tensor().cpu()
    nan = a.double().isnan() if DEPTHS[one.depth()].limits is None else torch.zeros(a.shape, dtype=torch.bool)
    carrier = DEPTHS[one.depth()].carrier
    return torch.equal(a.view(carrier)[~nan], b.view(carrier)[~nan]) and (
        not nan.any() or torch.equal(nan, b.double().isnan())
    )


def test_the_same_pointer_through_every_protocol() -> None:
    x = torch.rand(5, 6, 3, device="cuda")
    m = Mat(x)
    assert m.data_ptr() == x.data_ptr()
    assert m.device == x.device
    region = m[1:3, 2:5]
    assert region.tensor().data_ptr() == x[1:3, 2:5].data_ptr()
    assert region.tensor("chw").stride() == x[1:3, 2:5].permute(2, 0, 1).stride()
    assert torch.from_dlpack(region).data_ptr() == region.data_ptr()
    assert Mat.from_dlpack(x[1:3]).data_ptr() == x[1:3].data_ptr()
    described = region.__cuda_array_interface__
    assert described["data"] == (region.data_ptr(), False)
    assert described["strides"] == (72, 12, 4)
    assert described["shape"] == (2, 3, 3)

    class Foreign:
        __cuda_array_interface__ = described

    again = Mat(Foreign())
    assert again.data_ptr() == region.data_ptr()
    assert again.step == region.step
    torch.as_tensor(region, device="cuda").zero_()
    assert not x[1:3, 2:5].any()
    assert Mat(torch.zeros(3, 4, device="cuda", dtype=torch.uint8)).__cuda_array_interface__["strides"] is None
    assert Mat(device="cuda").__cuda_array_interface__["shape"] == (0,)
    with pytest.raises(ValueError, match=r"cpu\(\).numpy\(\) copies the Mat"):
        m.numpy()


def test_there_and_back() -> None:
    array = np.random.default_rng(0).integers(0, 255, (7, 9, 3)).astype(np.uint8)
    region = Mat(array)[1:5, 2:8]
    there = region.cuda()
    assert there.device.type == "cuda"
    assert there.isContinuous()
    assert np.array_equal(there.cpu().numpy(), array[1:5, 2:8])
    whole = Mat.zeros(8, 9, CV_8UC3, device="cuda")
    region.copyTo(whole[2:6, 1:7])  # upload into a region
    back = np.zeros_like(array)
    whole[2:6, 1:7].copyTo(Mat(back)[1:5, 2:8])  # and download
    assert np.array_equal(back[1:5, 2:8], array[1:5, 2:8])
    assert back.astype(int).sum() == array[1:5, 2:8].astype(int).sum()
    assert there.to("cuda").data is there.data
    for empty in (Mat(), Mat(0, 3, CV_8UC3)):
        assert empty.cuda().device.type == "cuda"
        assert tuple(empty.cuda().size) == tuple(empty.size)


def test_pinned_memory_and_its_copies() -> None:
    pinned = mat.getStdAllocator(pinned=True)
    m = Mat(64, 64, CV_32FC3, 2, allocator=pinned)
    assert m.data is not None
    assert MatDataFlag.PINNED in m.data.flags
    assert m.tensor().is_pinned()
    there = m.cuda(non_blocking=True)
    back = there.to("cpu", non_blocking=True, allocator=pinned)
    torch.cuda.synchronize()
    assert torch.equal(back.tensor(), m.tensor())
    assert back.tensor().is_pinned()


def test_allocators_of_the_gpu() -> None:
    allocator = mat.getStdAllocator("cuda")
    assert allocator is mat.getStdAllocator("cuda:0")
    before = torch.cuda.memory_allocated()
    with mat.using_allocator(allocator):
        m = Mat(1024, 1024, CV_8U)
    assert m.device.type == "cuda"
    assert torch.cuda.memory_allocated() - before == 1 << 20
    assert m.data is not None
    assert m.data.mapping == "device"
    assert m.clone().data.allocator is allocator
    m.release()
    assert torch.cuda.memory_allocated() == before


def test_a_mapped_block_is_the_hosts() -> None:
    m = Mat.zeros(4, 5, CV_32FC1, device="cuda")
    view = m[1:3]
    view.setTo(1)
    with view.mapped() as array:
        assert m.data is not None
        assert m.data.mapping == "host"
        array[0, 0] = 7
        for touch in (lambda: m.setTo(0), lambda: view.tensor(), lambda: view.clone(), lambda: m[0, 0]):
            with pytest.raises(RuntimeError, match="mapped to the host"):
                touch()
        with pytest.raises(RuntimeError, match="already"), m.mapped():
            pass
    assert m.data.mapping == "device"
    assert m.cpu().numpy()[1].tolist() == [7, 1, 1, 1, 1]
    with m.mapped(write=False) as array:
        assert not array.flags.writeable
    assert m[1, 0] == 7


@pytest.mark.parametrize("depth", DEPTH_NUMBERS)
def test_conversions_have_the_bits_of_the_cpu(depth: int) -> None:
    here = Mat(numbers(depth, (13, 17, 3)))
    there = here.cuda()
    for new in DEPTH_NUMBERS:
        for alpha, beta in ((1, 0), (1 / 255, 0), (1, 3.5), (1.7, -20.25), (-1e-9, 0.5)):
            assert same(here.convertTo(new, alpha, beta), there.convertTo(new, alpha, beta)), (new, alpha, beta)


OPERATIONS: dict[str, Callable[[Mat, Mat], Mat]] = {
    "clone of a region": lambda m, mask: m[1:, 2:].clone(),
    "masked copy": lambda m, mask: m.copyTo(mask=mask),
    "masked copy into": lambda m, mask: m.copyTo(m.clone().setTo(1), mask),
    "mask of channels": lambda m, mask: m.copyTo(mask=mat.merge([mask, mask, mat.split(mask)[0]])),
    "overlap": lambda m, mask: m.__setitem__(slice(0, 4), m[1:5]) or m,
    "set": lambda m, mask: m.setTo((1, 2, 3)),
    "set one": lambda m, mask: m.setTo(float("nan")),
    "masked set": lambda m, mask: m.setTo((3, 2, 1), mask),
    "element": lambda m, mask: m.__setitem__((1, 1), (1, 0, 1)) or m,
    "split and merge": lambda m, mask: mat.merge(mat.split(m)[::-1]),
    "insert": lambda m, mask: mat.insertChannel(mat.extractChannel(m, 0), m, 2),
    "mix": lambda m, mask: mat.mixChannels(m, m, [0, 2, 2, 0, -1, 1])[0],
    "push": lambda m, mask: [m.push_back(m[1:3]), m.push_back(m), m.pop_back(1)] and m,
    "resize": lambda m, mask: m.resize(20, (1, 1, 0)) or m,
    "diagonal": lambda m, mask: m.diag(-1).setTo(1) and m,
    "eye": lambda m, mask: Mat.eye(4, 5, m.type(), device=m.device),
    "reshape": lambda m, mask: m.reshape(1, 3).clone(),
}


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("depth", DEPTH_NUMBERS)
def test_every_operation_has_the_bits_of_the_cpu(name: str, depth: int) -> None:
    here = Mat(numbers(depth, (9, 7, 3)))
    mask = Mat((numbers(CV_8U, (9, 7), 1).int() % 2).to(torch.uint8))
    there, mask_there = here.cuda(), mask.cuda()
    ours, theirs = OPERATIONS[name](there, mask_there), OPERATIONS[name](here, mask)
    assert ours.device.type == "cuda"
    assert same(theirs, ours)
    assert repr(ours).replace("cuda:0", "cpu") == repr(theirs)


def test_elements_are_read() -> None:
    for depth in DEPTH_NUMBERS:
        here = Mat(numbers(depth, (3, 4, 2), 3))
        assert repr(here.cuda()[1, 2]) == repr(here[1, 2])


def test_two_devices_are_not_mixed_by_accident() -> None:
    m = Mat.zeros(3, 3, CV_8U, device="cuda")
    with pytest.raises(ValueError, match=r"a mask on cpu for elements on cuda:0: use mask.to\('cuda:0'\)"):
        m.setTo(1, np.eye(3, dtype=np.uint8))
    with pytest.raises(ValueError, match="the same size, depth and device"):
        mat.merge([m, Mat.zeros(3, 3, CV_8U)])
    with pytest.raises(ValueError, match=r"move one of them with to\(device\)"):
        m.convertTo(CV_32FC1, dst=Mat.zeros(3, 3, CV_32FC1))
    m.push_back(Mat.zeros(2, 3, CV_8U))  # rows are moved to other memory
    assert tuple(m.size) == (5, 3)
    m[0:3] = Mat.eye(3, 3, CV_8U)
    assert m.cpu().numpy()[:3].tolist() == np.eye(3).tolist()


@pytest.mark.large
def test_more_than_two_gigabytes() -> None:
    """Offsets beyond 2^31 bytes, and a Mat that OpenCV would not call continuous."""
    m = Mat(40_000, 60_000, CV_8U, device="cuda")
    m[39_990:].setTo(5)
    m[39_995, 59_999] = 9
    assert m.isContinuous()
    assert m[39_990:40_000, 59_998:60_000].cpu().numpy().sum() == 5 * 20 + 4
    assert m[39_995, 59_999] == 9
