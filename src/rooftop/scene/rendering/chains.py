"""Cache the memory of chains from frame to frame. A chain is the sequence of kernel launches that draws a set of
views."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from rooftop.scene.rendering.canvases import Canvas
from rooftop.scene.rendering.memory import ROOM, FrameMemory
from rooftop.scene.rendering.targets import Outputs
from rooftop.scene.rendering.uploads import Inputs

Sizes = tuple[tuple[int, int], ...]
# Maximum number of chains of a renderer. One draws only the cameras; each of the others also redraws its own set of
# shadow maps.
MOST_CHAINS = 4
MOST_KINDS = 8  # maximum number of combinations of outputs for which a chain caches tensors
MOST_TEXELS = 2**27  # maximum number of texels (8 bytes each) of all cached chains except the one used most recently


@dataclass
class Chain:
    """The views, the working memory and the cached outputs of a chain, which is the sequence of kernel launches that
    draws a set of views."""

    inputs: Inputs
    memory: FrameMemory
    _outputs: dict[tuple[tuple[str, ...], int], Outputs] = field(default_factory=dict)

    def outputs(self, names: tuple[str, ...], lights: int) -> Outputs:
        """The cached tensors for outputs of these names, in a scene with `lights` lights."""
        known = self._outputs.pop((names, lights), None)
        if known is None:
            known = Outputs(names, self.memory.canvas.camera_texels, lights, self.memory.device)
        self._outputs[names, lights] = known
        if len(self._outputs) > MOST_KINDS:
            del self._outputs[next(iter(self._outputs))]  # the combination that was used least recently
        return known


class Chains:
    """A renderer's chains, least recently used first.

    Args:
        device: device of the renderer.
        pictures: whether the chains draw; if False, they only cull.
    """

    def __init__(self, device: torch.device, pictures: bool = True) -> None:
        self.device, self._pictures = device, pictures
        self._chains: dict[tuple[Canvas, bool], Chain] = {}
        self._places = 0
        # The cameras' sizes, and the buffer of the previous frame's depths. `_settled` is the value of `_depths` after
        # the last completed frame.
        self._depths: tuple[Sizes, torch.Tensor] = (), torch.empty(0, dtype=torch.float32, device=device)
        self._settled: tuple[Sizes, torch.Tensor] = self._depths
        self._room: Mapping[str, int] = ROOM

    def of(self, canvas: Canvas, places: int, fragments: bool = False) -> Chain:
        """The chain for these pictures, created if it is not cached. Chains with the same camera sizes share the depths
        of the previous frame. If the camera sizes or the capacity differ from the last call, all cached chains are
        dropped.

        Args:
            canvas: the pictures.
            places: capacity for instances.
            fragments: whether triangles are counted for each pixel.
        """
        sizes = canvas.sizes[: canvas.cameras]
        if sizes and sizes != self._depths[0]:
            self._chains.clear()
            known, depths = self._settled
            if sizes != known:
                texels = canvas.hzb_texels if self._pictures else 0
                depths = torch.empty(texels, dtype=torch.float32, device=self.device)
            self._depths = sizes, depths
        if places != self._places:
            self._chains.clear()
            self._places = places
        chain = self._chains.pop((canvas, fragments), None)
        if chain is None:
            depths = self._depths[1] if sizes else self._depths[1][:0]
            memory = FrameMemory(places, canvas, fragments, self._room, depths, self._pictures)
            chain = Chain(Inputs(canvas, self.device), memory)
        self._chains[canvas, fragments] = chain
        self._forget_some()
        return chain

    def widen(self, chain: Chain, room: Mapping[str, int]) -> None:
        """Give the lists in a chain's working memory the larger capacities `room`. Chains that are created later start
        with the same capacities."""
        chain.memory = chain.memory.with_room(room)
        self._room = room

    def settle(self, chain: Chain) -> None:
        """End a frame that `chain` drew: its depths become the previous frame's depths for the next frame."""
        chain.memory.turn_over()
        self._settled = self._depths

    def forget_graphs(self) -> None:
        """Drop captured graphs and packed launches. Call this when the scene's tensors have new addresses."""
        for chain in self._chains.values():
            chain.memory.graphs.clear()
            chain.memory.launches.clear()

    def _forget_some(self) -> None:
        kept = list(self._chains)
        texels = sum(canvas.texels for canvas, _ in kept[:-1])
        for key in kept[:-1]:  # the least recently drawn chain first
            if len(self._chains) <= MOST_CHAINS and texels <= MOST_TEXELS:
                break
            texels -= key[0].texels
            del self._chains[key]
