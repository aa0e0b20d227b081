"""NVLink and PCIe paths, from a driver that answers a query, refuses it, or does not know it."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from rooftop.cli.device import _links as phrase
from rooftop.hardware.nvml import nvml_session
from rooftop.hardware.topology import NvLink, nv_links, peers

UUIDS = ["GPU-0", "GPU-1"]
ADDRESSES = {"GPU-0": "00000000:1A:00.0", "GPU-1": "00000000:3B:00.0"}
SWITCHES = [f"00000000:0{number}:00.0" for number in range(4)]


class NVMLError(Exception):
    """Any refusal."""


class NVMLError_NotSupported(NVMLError):
    """This GPU has no such feature."""


class NVMLError_InvalidArgument(NVMLError):
    """No link has that number."""


class Driver:
    """A stand-in for pynvml. `remotes`: for each GPU and link (kind, PCI address); None: the link is down."""

    NVMLError, NVMLError_NotSupported = NVMLError, NVMLError_NotSupported
    NVMLError_InvalidArgument = NVMLError_InvalidArgument
    NVML_NVLINK_MAX_LINKS, NVML_FEATURE_ENABLED, NVML_FI_DEV_NVLINK_GET_SPEED = 18, 1, 164

    def __init__(self, remotes: dict[str, list[tuple[int, str] | None]], ancestor: int = 50) -> None:
        self.remotes, self.ancestor, self.open = remotes, ancestor, 0

    def nvmlInit(self) -> None:
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid not in ADDRESSES:
            raise NVMLError
        return uuid

    def nvmlDeviceGetPciInfo(self, handle: str) -> Any:
        return SimpleNamespace(busId=ADDRESSES[handle].lower().encode())  # old versions: bytes, other case

    def nvmlDeviceGetNvLinkState(self, handle: str, link: int) -> int:
        if not self.remotes.get(handle):
            raise NVMLError_NotSupported
        if link >= len(self.remotes[handle]):
            raise NVMLError_InvalidArgument
        return int(self.remotes[handle][link] is not None)

    def nvmlDeviceGetNvLinkVersion(self, handle: str, link: int) -> int:
        return 6

    def nvmlDeviceGetNvLinkRemoteDeviceType(self, handle: str, link: int) -> int:
        return self.remotes[handle][link][0]  # type: ignore[index]

    def nvmlDeviceGetNvLinkRemotePciInfo(self, handle: str, link: int) -> Any:
        return SimpleNamespace(busId=self.remotes[handle][link][1])  # type: ignore[index]

    def nvmlDeviceGetFieldValues(self, handle: str, fields: list[tuple[int, int]]) -> Any:
        return [SimpleNamespace(nvmlReturn=0, value=SimpleNamespace(uiVal=26562))]

    def nvmlDeviceGetTopologyCommonAncestor(self, handle: str, other: str) -> int:
        return self.ancestor


def path(driver: Any, monkeypatch: pytest.MonkeyPatch, access: bool = True) -> str:
    """The path from GPU 0 to GPU 1, in the words of the command line."""
    monkeypatch.setitem(sys.modules, "pynvml", driver)
    with nvml_session() as nvml:
        links = [nv_links(nvml, uuid) for uuid in UUIDS]
        return str(peers(nvml, 0, UUIDS, links, {1: access})["cuda:1"])


def test_nvlink_straight_to_the_other_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver({"GPU-0": [(0, ADDRESSES["GPU-1"])] * 4, "GPU-1": [(0, ADDRESSES["GPU-0"])] * 4})
    assert path(driver, monkeypatch) == "4 x NVLink"
    assert driver.open == 0


def test_nvlink_through_switches_that_both_are_on(monkeypatch: pytest.MonkeyPatch) -> None:
    here: list[tuple[int, str] | None] = [(2, switch) for switch in SWITCHES]
    assert path(Driver({"GPU-0": here, "GPU-1": here[:3]}), monkeypatch) == "3 x NVLink switch"
    assert path(Driver({"GPU-0": here[:2], "GPU-1": here[2:]}), monkeypatch) == "across sockets (SYS)"


@pytest.mark.parametrize(("ancestor", "expected"), [(10, "one PCIe switch (PIX)"), (30, "PCIe host bridge (PHB)")])
def test_without_nvlink_the_path_is_on_pcie(monkeypatch: pytest.MonkeyPatch, ancestor: int, expected: str) -> None:
    assert path(Driver({}, ancestor), monkeypatch) == expected
    assert path(Driver({}, ancestor), monkeypatch, access=False) == f"{expected}, through the host"


def test_links_that_are_down_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    remote = (0, ADDRESSES["GPU-1"])
    assert path(Driver({"GPU-0": [remote, None, remote]}), monkeypatch) == "2 x NVLink"


def test_a_driver_that_refuses_or_is_too_old_leaves_the_path_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing(Driver):
        def nvmlDeviceGetNvLinkState(self, handle: str, link: int) -> int:
            raise NVMLError

        def __getattribute__(self, name: str) -> Any:
            if name == "nvmlDeviceGetTopologyCommonAncestor":
                raise AttributeError(name)
            return super().__getattribute__(name)

    driver = Refusing({})
    assert path(driver, monkeypatch) == "unknown path"
    with nvml_session() as nvml:
        assert nv_links(nvml, "GPU-0") is None
        assert nv_links(nvml, "GPU-9") is None


def test_without_a_driver_nothing_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    class Missing(Driver):
        def nvmlInit(self) -> None:
            raise NVMLError

    assert path(Missing({}), monkeypatch) == "unknown path"


def test_links_are_described_with_version_rate_and_remote(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", Driver({"GPU-0": [(2, SWITCHES[0]), (2, SWITCHES[1])]}))
    with nvml_session() as nvml:
        links = nv_links(nvml, "GPU-0")
    assert links is not None
    assert links[1] == NvLink(1, "4.0", 26.562e9, "switch", SWITCHES[1])
    plain = [vars(link) for link in links]
    assert phrase(plain) == "2 x NVLink 4.0 to a switch, 26.56 GB/s each way"
    assert phrase([{**plain[0], "version": None, "rate": None, "remote": None}]) == "1 x NVLink"
