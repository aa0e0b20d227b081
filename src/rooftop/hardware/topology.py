"""How the GPUs of this machine are connected: their NVLink links, and the path from each GPU to each other.

The kinds of path, best first: NVLink directly to the other GPU; NVLink to a switch to which the other GPU is also
connected; otherwise the nearest common point on PCIe (in brackets the term of `nvidia-smi topo -m`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rooftop.hardware.nvml import Nvml

VERSIONS = {1: "1.0", 2: "2.0", 3: "2.2", 4: "3.0", 5: "3.1", 6: "4.0", 7: "5.0", 8: "6.0"}
"""NVML_NVLINK_VERSION_*."""

PCIE_PATHS = {
    0: "same board",
    10: "one PCIe switch (PIX)",
    20: "several PCIe switches (PXB)",
    30: "PCIe host bridge (PHB)",
    40: "within one NUMA node (NODE)",
    50: "across sockets (SYS)",
}
"""NVML_TOPOLOGY_* -> the nearest point that two GPUs share."""

GPU, SWITCH = 0, 2  # NVML_NVLINK_DEVICE_TYPE_*


@dataclass(frozen=True)
class NvLink:
    """An active NVLink link.

    Attributes:
        number: number of the link on its GPU.
        version: version of NVLink, e.g. "4.0".
        rate: bytes/s in each direction, as the driver reports it.
        remote: the kind of the other end: "gpu", "switch" or "other".
        remote_pci: the other end's PCI address.
    """

    number: int
    version: str | None = None
    rate: float | None = None
    remote: str | None = None
    remote_pci: str | None = None


@dataclass(frozen=True)
class Peer:
    """The path from one GPU to another.

    Attributes:
        path: "NVLink", "NVLink switch", or the point on PCIe where the two meet; None if the driver does not tell.
        links: NVLink links that serve the path.
        peer_access: whether the GPU can read and write the other GPU's memory without the host.
    """

    path: str | None
    links: int
    peer_access: bool

    def __str__(self) -> str:
        path = f"{self.links} x {self.path}" if self.links else self.path or "unknown path"
        return path if self.peer_access else f"{path}, through the host"


def nv_links(nvml: Nvml, uuid: str | None) -> tuple[NvLink, ...] | None:
    """The active links of a GPU; empty on a GPU without NVLink. None if the driver does not tell."""
    numbers = nvml.gpu(uuid, _links_up)
    return None if numbers is None else tuple(_link(nvml, uuid, number) for number in numbers)


def _links_up(module: Any, handle: Any) -> list[int]:
    """Numbers of the active links. For a link that this GPU does not have, NVML raises an error of a separate kind."""
    up = []
    for number in range(module.NVML_NVLINK_MAX_LINKS):
        try:
            if module.nvmlDeviceGetNvLinkState(handle, number) == module.NVML_FEATURE_ENABLED:
                up.append(number)
        except (module.NVMLError_NotSupported, module.NVMLError_InvalidArgument):
            break
    return up


def _link(nvml: Nvml, uuid: str | None, number: int) -> NvLink:
    version = nvml.gpu(uuid, lambda m, h: m.nvmlDeviceGetNvLinkVersion(h, number))
    remote = nvml.gpu(uuid, lambda m, h: m.nvmlDeviceGetNvLinkRemoteDeviceType(h, number))
    pci = nvml.gpu(uuid, lambda m, h: m.nvmlDeviceGetNvLinkRemotePciInfo(h, number).busId)
    rate = nvml.gpu(uuid, lambda m, h: _field(m, h, m.NVML_FI_DEV_NVLINK_GET_SPEED, number))
    return NvLink(
        number=number,
        version=VERSIONS.get(version),
        rate=1e6 * rate if rate else None,  # the driver's MB/s
        remote=None if remote is None else {GPU: "gpu", SWITCH: "switch"}.get(remote, "other"),
        remote_pci=_address(pci),
    )


def _field(module: Any, handle: Any, field: int, scope: int) -> int | None:
    """One unsigned field of NVML; None if this GPU does not have it."""
    (found,) = module.nvmlDeviceGetFieldValues(handle, [(field, scope)])
    return int(found.value.uiVal) if found.nvmlReturn == 0 else None


def _address(pci: str | bytes | None) -> str | None:
    """A PCI address in one spelling: old versions of NVML return bytes, and calls differ in case and in leading
    zeros.
    """
    if not pci:
        return None
    text = pci.decode() if isinstance(pci, bytes) else pci
    domain, _, rest = text.lower().partition(":")
    return f"{int(domain, 16):08x}:{rest}"


def peers(
    nvml: Nvml,
    index: int,
    uuids: Sequence[str | None],
    links: Sequence[tuple[NvLink, ...] | None],
    access: Mapping[int, bool],
) -> dict[str, Peer]:
    """The paths from GPU `index` to each other GPU.

    Args:
        uuids, links: UUIDs and NVLink links of all GPUs, by index.
        access: for each other GPU's index, whether this GPU can access that GPU's memory directly.
    """
    found = {}
    for other in range(len(uuids)):
        if other != index:
            path, count = _path(nvml, index, other, uuids, links)
            found[f"cuda:{other}"] = Peer(path, count, access[other])
    return found


def _path(
    nvml: Nvml, index: int, other: int, uuids: Sequence[str | None], links: Sequence[tuple[NvLink, ...] | None]
) -> tuple[str | None, int]:
    """(path, NVLink links that serve it)."""
    here, there = links[index] or (), links[other] or ()
    address = _address(nvml.gpu(uuids[other], lambda m, h: m.nvmlDeviceGetPciInfo(h).busId))
    direct = sum(link.remote == "gpu" and link.remote_pci == address for link in here) if address else 0
    if direct:
        return "NVLink", direct
    if switched := min(_to_switches(here, there), _to_switches(there, here)):
        return "NVLink switch", switched
    peer = nvml.handle(uuids[other])
    if peer is None:
        return None, 0
    level = nvml.gpu(uuids[index], lambda m, h: m.nvmlDeviceGetTopologyCommonAncestor(h, peer))
    return PCIE_PATHS.get(level), 0


def _to_switches(here: tuple[NvLink, ...], there: tuple[NvLink, ...]) -> int:
    """Links from `here` to switches to which `there` is also connected. A virtual machine may hide which switches these
    are."""
    known = {link.remote_pci for link in there if link.remote == "switch"}
    mine = [link.remote_pci for link in here if link.remote == "switch"]
    return sum(pci in known or (bool(known) and (pci is None or None in known)) for pci in mine)
