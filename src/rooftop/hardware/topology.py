"""Describe how this machine's GPUs are connected: their NVLink links, and the path between each pair of GPUs.

The kinds of path, best first: NVLink directly to the other GPU; NVLink to a switch to which the other GPU is also
connected; the nearest common point on PCIe. In the name of a PCIe path, the text in brackets is the term of
`nvidia-smi topo -m`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rooftop.hardware.nvml import Nvml

VERSIONS = {1: "1.0", 2: "2.0", 3: "2.2", 4: "3.0", 5: "3.1", 6: "4.0", 7: "5.0", 8: "6.0"}
"""NVML_NVLINK_VERSION_* -> the version of NVLink."""

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
        remote: kind of device at the other end: "gpu", "switch" or "other".
        remote_pci: PCI address of the other end.
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
        path: "NVLink", "NVLink switch", or the nearest common point of the GPUs on PCIe; None if the driver does not
            report it.
        links: number of NVLink links that serve the path; 0 for a path over PCIe.
        peer_access: whether the GPU can read and write the other GPU's memory without the host.
    """

    path: str | None
    links: int
    peer_access: bool

    def __str__(self) -> str:
        path = f"{self.links} x {self.path}" if self.links else self.path or "unknown path"
        return path if self.peer_access else f"{path}, through the host"


def nv_links(nvml: Nvml, uuid: str | None) -> tuple[NvLink, ...] | None:
    """The active NVLink links of a GPU; empty on a GPU without NVLink. None if the driver does not report them."""
    numbers = nvml.gpu(uuid, _links_up)
    return None if numbers is None else tuple(_link(nvml, uuid, number) for number in numbers)


def _links_up(module: Any, handle: Any) -> list[int]:
    """Numbers of a GPU's active NVLink links. The search ends at the first link that the GPU lacks, for which NVML
    raises an error.
    """
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
    """The value of an unsigned NVML field, where `scope` is the number of the link; None if this GPU lacks the
    field."""
    (found,) = module.nvmlDeviceGetFieldValues(handle, [(field, scope)])
    return int(found.value.uiVal) if found.nvmlReturn == 0 else None


def _address(pci: str | bytes | None) -> str | None:
    """Normalize a PCI address: old versions of NVML return bytes, and NVML's calls differ in case and leading zeros."""
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
    """The path from GPU `index` to every other GPU.

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
    """Find the best path between the GPUs `index` and `other`, such as "NVLink", and the number of NVLink links that it
    uses; (None, 0) if the driver does not report a path.
    """
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
    """The number of links from `here` to switches to which `there` is also connected. If a virtual machine hides the
    address of a link's switch, or of one of `there`'s switches, the link counts if `there` has any switch."""
    known = {link.remote_pci for link in there if link.remote == "switch"}
    mine = [link.remote_pci for link in here if link.remote == "switch"]
    return sum(pci in known or (bool(known) and (pci is None or None in known)) for pci in mine)
