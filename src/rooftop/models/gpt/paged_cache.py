"""A paged cache of keys and values, in which a sequence takes memory only for its own positions.

    cache = PagedCache(config, pages=1000, dtype=torch.bfloat16, device="cuda")
    pages = cache.take(prompt_length + new_tokens)   # when a sequence begins
    cache.give_back(pages)                           # when the sequence ends

All pages have the same number of positions, in all layers. A table lists the pages of each sequence (Kwon et al. 2023,
"Efficient Memory Management for Large Language Model Serving with PagedAttention"). Page 0 is a scratch page, to which
padding and rows without a sequence are written.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rooftop.hardware.large_tensors import allocated
from rooftop.kernels import paged_attention
from rooftop.models.gpt.switches import GptConfig
from rooftop.parallel.self_attentions import ParallelSelfAttention

PAGE = 16
"""Number of positions in a page. On average, half of the last page of a sequence is unused."""


class PagedCache:
    """A pool of pages that hold the keys and values of sequences, without gradients.

    Args:
        config: config of the model; for a tensor parallel rank `config.of_rank(ranks)`, because it holds only its own
            heads.
        pages: total number of pages for sequences.
        page: number of positions in a page.
        dtype: dtype of keys and values; it must be the dtype of the model's activations.
        device: device of the model.

    Attributes:
        keys, values: (layers, 1 + pages, kv_heads, page, head_features) each; page 0 is the scratch page.
        free: number of unused pages.

    Raises:
        TypeError, ValueError: `pages` or `page` is not an int of 1 or more.
        MemoryError: the host has too little memory for the pages. On a GPU, PyTorch raises `torch.OutOfMemoryError`.
    """

    def __init__(
        self, config: GptConfig, pages: int, *, page: int = PAGE, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        for name, value in (("pages", pages), ("page", page)):
            if not isinstance(value, int) or isinstance(value, bool):
                raise TypeError(f"PagedCache: {name} must be an int, got {value!r}")
        if pages < 1 or page < 1:
            raise ValueError(f"PagedCache: expected at least one page of at least one position, got {pages} of {page}")
        self.page, self.pages = page, pages
        shape = (config.layers, 1 + pages, config.kv_heads, page, config.head_features)
        self.keys, self.values = (
            allocated(f"the cache of {each}", shape, dtype, lambda: torch.empty(shape, dtype=dtype, device=device))
            for each in ("keys", "values")
        )
        self.page_bytes = cache_bytes(config, page, dtype)
        self._free = list(range(pages, 0, -1))  # pages are taken from the end
        self._taken: set[int] = set()

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def bytes(self) -> int:
        """The number of bytes of all pages, including page 0."""
        return (1 + self.pages) * self.page_bytes

    def pages_for(self, positions: int) -> int:
        """The number of pages that hold this many positions."""
        return -(-positions // self.page)

    def take(self, positions: int) -> list[int]:
        """Take free pages for a new sequence; returns their numbers, in the order of the sequence's positions.

        Raises:
            ValueError: there are fewer free pages than the positions need.
        """
        needed = self.pages_for(positions)
        if needed > self.free:
            raise ValueError(
                f"PagedCache: {positions} positions take {needed} pages of {self.page} positions "
                f"({needed * self.page_bytes:,} bytes), but {self.free} of {self.pages} are free: free the pages of a "
                f"sequence, or create the cache with at least {self.pages - self.free + needed} pages "
                f"({(1 + self.pages - self.free + needed) * self.page_bytes:,} bytes)"
            )
        taken = [self._free.pop() for _ in range(needed)]
        self._taken.update(taken)
        return taken

    def give_back(self, pages: Sequence[int]) -> None:
        """Free the pages of a sequence that has ended; their contents may be overwritten from now on.

        Raises:
            ValueError: a page is not in use or is repeated; no page is freed.
        """
        wrong = set(pages) - self._taken
        if wrong or len(set(pages)) < len(pages):
            raise ValueError(f"PagedCache: expected different pages that are in use, got {sorted(pages)}")
        self._taken.difference_update(pages)
        self._free.extend(reversed(pages))

    def first(self, table: Tensor, lengths: Tensor, positions: int) -> FirstPositions:
        """Create the cache that the layers use while prompts are prefilled.

        Args:
            table: (B, W), the numbers of each prompt's pages.
            lengths: (B,), the number of positions of each prompt, without padding.
            positions: number of positions to which the prompts are padded.
        """
        return FirstPositions(self, table, lengths, positions)

    def next(
        self, table: Tensor, positions: Tensor, count: int | None = None, windowed: int | None = None
    ) -> NextPosition:
        """Create the cache that the layers use in a decoding step, for one new token of each sequence.

        Args:
            table: (B, W), the numbers of each sequence's pages.
            positions: (B,), positions of the new tokens; -1: the row has no sequence, and attention returns 0.
            count: number of positions that a layer without a window attends to, summed over the sequences; None: the
                host does not know it. `rooftop.kernels.paged_attention` explains its use.
            windowed: as `count`, for a layer with a window.
        """
        return NextPosition(self, table, positions, count, windowed)

    def write(self, layer: int, pages: Tensor, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """Write keys and values (B, H_k, S, D) to the pages (B, S), at the positions `slots` (B, S) within the pages.

        The caller must turn autograd off.
        """
        for stored, new in ((self.keys, key), (self.values, value)):
            stored[layer][pages, :, slots] = new.transpose(1, 2)  # (B, S, H_k, D): indexed dimensions come first


class FirstPositions:
    """The cache during prefill of prompts padded at the end.

    The causal mask hides the padding from the positions of the prompt.
    """

    def __init__(self, cache: PagedCache, table: Tensor, lengths: Tensor, positions: int) -> None:
        self.cache = cache
        place = torch.arange(positions, device=table.device).expand(len(table), -1)  # (B, S)
        real = place < lengths[:, None]
        pages = table.gather(1, (place // cache.page).clamp(max=table.shape[1] - 1))
        self.pages, self.slots = torch.where(real, pages, 0), place % cache.page

    def attended(self, attention: ParallelSelfAttention, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attend from each position to itself and all earlier positions: (B, H, S, D)."""
        self.cache.write(attention.layer, self.pages, self.slots, key, value)
        return attention.attend(query, key, value)


class NextPosition:
    """The cache during a decoding step: one position of each sequence.

    The host reads no values, so CUDA graphs can capture the step.
    """

    def __init__(
        self, cache: PagedCache, table: Tensor, positions: Tensor, count: int | None, windowed: int | None = None
    ) -> None:
        self.cache, self.table, self.count, self.windowed = cache, table, count, windowed
        place = positions.clamp(min=0)[:, None]  # (B, 1)
        pages = table.gather(1, place // cache.page)
        self.pages, self.slots = torch.where(positions[:, None] >= 0, pages, 0), place % cache.page
        self.lengths = positions + 1

    def attended(self, attention: ParallelSelfAttention, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attend from the new position to itself and all earlier positions: (B, H, 1, D)."""
        self.cache.write(attention.layer, self.pages, self.slots, key, value)
        keys, values = self.cache.keys[attention.layer], self.cache.values[attention.layer]
        count, window = self.count if attention.window is None else self.windowed, attention.window
        seen = paged_attention(query[:, :, 0], keys, values, self.table, self.lengths, positions=count, window=window)
        return seen[:, :, None]


def cache_bytes(config: GptConfig, positions: int, dtype: torch.dtype) -> int:
    """The number of bytes that the keys and values of this many positions take, in all layers."""
    return 2 * config.layers * config.kv_width * positions * dtype.itemsize
