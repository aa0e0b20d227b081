"""Generate text with a `Gpt`: prefill prompts of different lengths, then decode the sequences token by token.

    new = generate(model, [[464, 3290], [40]], 20)                        # the most probable tokens
    new = generate(model, prompts, 100, temperature=0.8, top_p=0.95, seed=1)
    for index, token in Generation(model, prompts, 100):                  # yields tokens as they are generated
        ...

Prefill reads several prompts at once, padded at the end. A decoding step does the same work for every row of the batch.
Tokens, positions and the page table are in tensors with fixed addresses, so on a GPU the step is one CUDA graph,
captured once and replayed. When a sequence ends, its pages and its row become free for the next prompt.

Decoding is bound by memory bandwidth: a step reads all weights, and the keys and values of all positions, once.
`step_cost` counts the bytes and operations of a step, and `Generation.decode_roof_ms` returns the shortest possible
time of all steps so far.

Tensor parallel ranks that share a model generate together: all ranks call `generate` with the same arguments and get
the same tokens. Each rank keeps the keys and values of its own heads.
"""

from __future__ import annotations

import heapq
import operator
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rooftop.cost import Cost, matrix_precision
from rooftop.cost.accounting import counted_for
from rooftop.cost.roofs import roof
from rooftop.hardware.ceilings import Ceilings
from rooftop.hardware.graphs import captured_into
from rooftop.models.gpt.blocks import rotation_of
from rooftop.models.gpt.network import Gpt
from rooftop.models.gpt.paged_cache import PAGE, PagedCache, cache_bytes
from rooftop.models.gpt.sampling import Sampling, check_sequence, choose_on_ranks, numbers_of
from rooftop.models.gpt.switches import GptConfig
from rooftop.parallel.exchanges import place_in
from rooftop.parallel.norm_sums import NormSums, Summand, first_refusal, norm_sums
from rooftop.parallel.self_attentions import Rotation
from rooftop.words import counted

PREFILL_TOKENS = 8192
"""Maximum number of prompt tokens per forward pass, including padding.

The number is a compromise: with more tokens per pass, the weights are read less often, but a pass takes more memory.
"""

Prompt = Sequence[int] | Tensor


def generate(
    model: Gpt,
    prompts: Sequence[Prompt],
    max_new_tokens: int,
    *,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    seed: int = 0,
    stop: Sequence[int] = (),
    sequences: Sequence[int] | None = None,
    batch: int | None = None,
    pages: int | None = None,
    page: int = PAGE,
) -> list[list[int]]:
    """Generate the tokens that follow each prompt.

    Args:
        model: a whole model or a tensor parallel rank's part, in eval mode, on its device. All ranks that share a
            model must pass the same arguments.
        prompts: the tokens of each prompt, as a sequence of ints or a tensor (S,) with S at least 1. The prompts
            may differ in length.
        max_new_tokens: maximum number of new tokens per prompt. A sequence also ends when it fills the model's
            positions.
        temperature, top_k, top_p, seed: how tokens are sampled, as in `Sampling`. Temperature 0 chooses the most
            probable token.
        stop: tokens that end a sequence; the result includes the token that ended the sequence.
        sequences: a sequence number for each prompt; None: 0, 1, 2, ... Random numbers depend only on the sequence
            number, the seed and the position. So a prompt with the same sequence number gets the same text whichever
            other prompts are generated with it.
        batch: maximum number of prompts that are continued at the same time; None: all prompts. Further prompts wait.
        pages: number of pages in the cache of keys and values; None: the maximum that `batch` sequences can need. With
            fewer pages, prompts wait until pages are free.
        page: number of positions whose keys and values a page holds.

    Returns:
        The new tokens of each prompt, in the order of the prompts.

    Raises:
        TypeError, ValueError: the model is a pipeline stage, is in training mode or is on the meta device, or its ranks
            split each sequence among them (sequence parallelism or context parallelism).
        TypeError, ValueError: a prompt is empty, too long or has unknown tokens, a number is out of range, or the cache
            has too few pages for a prompt.
        FloatingPointError: the model's logits are NaN or infinite, so no token can be chosen.
    """
    sampling = Sampling(temperature, top_k, top_p, seed)
    options = {"stop": stop, "sequences": sequences, "batch": batch, "pages": pages}
    generation = Generation(model, prompts, max_new_tokens, sampling, page=page, **options)  # type: ignore[arg-type]
    new: list[list[int]] = [[] for _ in prompts]
    for index, token in generation:
        new[index].append(token)
    return new


@dataclass
class _Sequence:
    """A prompt and its state during generation."""

    index: int  # index of the prompt in the list of all prompts
    tokens: list[int]  # the prompt's tokens
    budget: int  # maximum number of new tokens
    number: int  # the sequence number, on which random numbers depend
    row: int = -1  # the sequence's row in the batch
    pages: list[int] = field(default_factory=list)  # numbers of the sequence's pages in the cache
    count: int = 0  # new tokens so far
    ended: bool = False

    @property
    def positions(self) -> int:
        """Number of cache positions that the sequence needs. The model never reads the last new token."""
        return len(self.tokens) + self.budget - 1


class Generation:
    """Iterate over tokens as they are generated: (index of the prompt, token).

    Arguments and errors are the same as for `generate`. The caller's autocast and inference mode do not
    affect the tokens. Each iteration starts again from the prompts and yields the same tokens. A second iteration
    before the end of the first raises ValueError. Tensor parallel ranks iterate in lockstep: if the loop ends early, it
    must end after the same token on all ranks.

    Attributes:
        ranks: number of tensor parallel ranks that share the model.
        cache: the paged cache; `cache.bytes` is its memory on this rank.
        prompt_tokens, prefill_s: number of prompt tokens read so far, and the seconds of host time spent on prefill,
            including waits for the device.
        steps: the decoding steps so far, each as (number of sequences, number of positions that a layer without a
            window attended to, summed over the sequences).
        decode_s: seconds that the decoding steps took, without the capture of the CUDA graph.
        norm_sums_refused: the reason why decoding steps sum over the ranks with NCCL. "": the steps use one kernel that
            sums and computes the norm (`rooftop.parallel.norm_sums`). None: no step has run on a GPU yet.
    """

    def __init__(
        self,
        model: Gpt,
        prompts: Sequence[Prompt],
        max_new_tokens: int,
        sampling: Sampling | None = None,
        *,
        stop: Sequence[int] = (),
        sequences: Sequence[int] | None = None,
        batch: int | None = None,
        pages: int | None = None,
        page: int = PAGE,
    ) -> None:
        _check_model(model)
        if sampling is not None and not isinstance(sampling, Sampling):
            raise TypeError(f"generate: sampling must be a Sampling or None, got {sampling!r}")
        self.model, self.sampling = model, sampling or Sampling()
        self.ranks = place_in(model.group)[1]
        self._part = model.config.of_rank(self.ranks)  # the sizes of this rank's part
        self.stop = frozenset(_whole_numbers("stop", stop))
        self._all = _sequences(model.config, prompts, max_new_tokens, sequences)
        sizes = {"batch": batch, "pages": pages, "page": page}
        for name, size in sizes.items():
            if size is None and name != "page":
                continue
            if not isinstance(size, int) or isinstance(size, bool):
                raise TypeError(f"generate: {name} must be an int, got {size!r}")
            if size < 1:
                raise ValueError(f"generate: {name} must be at least 1, got {size}")
        weight = next(model.parameters())
        self.device, self.dtype = weight.device, weight.dtype
        self.rows = max(1, min(len(self._all), batch or len(self._all)))
        needs = [-(-each.positions // page) for each in self._all if each.budget] or [1]
        most = sum(heapq.nlargest(self.rows, needs)) if pages is None else pages
        with torch.inference_mode(False):  # a tensor created in inference mode cannot be written outside of it
            self.cache = PagedCache(self._part, most, page=page, dtype=self.dtype, device=self.device)
        if max(needs) > most:
            raise ValueError(
                f"generate: the longest prompt with its new tokens takes {max(needs)} pages of {page} positions, but "
                f"the cache has {most}: give pages={max(needs)} ({(1 + max(needs)) * self.cache.page_bytes:,} bytes), "
                "or shorten the prompt or max_new_tokens"
            )
        with torch.inference_mode(False):
            self._make_state(max(needs))
        self._step: Callable[[], None] | None = None
        self._sums: NormSums | None = None
        self.norm_sums_refused: str | None = None
        self._running = False
        self._restart_counts()

    def __iter__(self) -> Iterator[tuple[int, int]]:
        if self._running:
            raise ValueError("Generation: an iteration is already running: finish it, or create another Generation")
        self._running = True
        try:
            yield from self._tokens()
        finally:
            self._end_all()
            self._running = False

    def ended(self, index: int) -> bool:
        """Whether all tokens of a prompt have been yielded."""
        return self._all[index].ended

    def decode_roof_ms(self, ceilings: Ceilings) -> float:
        """The shortest possible time, in ms, of the decoding steps so far on a machine with these ceilings.

        Each tensor parallel rank reads its part of the weights, and the keys and values of its heads. Communication
        counts as zero time.

        Raises:
            ValueError: the machine's rate in the model's dtype is unknown.
        """
        return sum(roof(cost, ceilings).ms for cost in self._decode_costs())

    def decode_precisions(self) -> set[str]:
        """The precisions of the decoding steps so far, whose rates `decode_roof_ms` needs."""
        return {precision for cost in self._decode_costs() for precision in cost.flops}

    def _decode_costs(self) -> Iterator[Cost]:
        counted = zip(self.steps, self._windowed, strict=True)
        return (step_cost(self._part, *step, self.dtype, windowed, self.device) for step, windowed in counted)

    # ---- scheduling of prompts -------------------------------------------------------------------------------------

    def _tokens(self) -> Iterator[tuple[int, int]]:
        self._restart_counts()
        for each in self._all:
            each.count, each.ended = 0, each.budget == 0
        waiting = deque(each for each in self._all if each.budget)
        while waiting or self._active:
            begun = self._begin(waiting)
            for group in groups_of([len(each.tokens) for each in begun], PREFILL_TOKENS):
                members = [begun[place] for place in group]
                yield from self._chosen(members, self._timed_prefill(members))
            if self._active:
                members = list(self._active.values())
                yield from self._chosen(members, self._timed_step(members))

    def _begin(self, waiting: deque[_Sequence]) -> list[_Sequence]:
        """Assign free rows and pages to the waiting prompts, in order, up to the first prompt for which they do not
        suffice. Return the prompts that start."""
        begun = []
        while waiting and self._free_rows and self.cache.pages_for(waiting[0].positions) <= self.cache.free:
            each = waiting.popleft()
            each.row, each.pages = self._free_rows.pop(), self.cache.take(each.positions)
            self._active[each.row] = each
            begun.append(each)
        return begun

    def _chosen(self, members: list[_Sequence], tokens: list[int]) -> Iterator[tuple[int, int]]:
        """Yield (index of the prompt, token) for each of the sequences `members`. `tokens` has the token that was
        chosen for each sequence; a negative number means that no token could be chosen.

        All tokens are counted, and finished sequences give back their rows and pages, before the first token is
        yielded, because the caller may stop the iteration at any token.
        """
        for each, token in zip(members, tokens, strict=True):
            if token < 0:
                narrow = f", or {self.dtype} is too narrow for them: try bfloat16 or float32"
                raise FloatingPointError(
                    f"generate: after {len(each.tokens) + each.count} tokens of prompt {each.index} and its "
                    "continuation the model gives NaN or infinity, so no token can be chosen: the weights are damaged"
                    f"{narrow if self.dtype == torch.float16 else ''}"
                )
        for each, token in zip(members, tokens, strict=True):
            each.count += 1
            if each.count == each.budget or token in self.stop:
                self._end(each)
        for each, token in zip(members, tokens, strict=True):
            each.ended = each.row not in self._active
            yield each.index, token

    def _end(self, each: _Sequence) -> None:
        del self._active[each.row]
        self._free_rows.append(each.row)
        self.cache.give_back(each.pages)
        self._positions[each.row] = -1

    def _end_all(self) -> None:
        for each in list(self._active.values()):
            self._end(each)

    def _restart_counts(self) -> None:
        self.prompt_tokens, self.prefill_s, self.decode_s = 0, 0.0, 0.0
        self.steps: list[tuple[int, int]] = []
        self._windowed: list[int] = []  # for each step, positions that a layer with a window reads, over all rows

    # ---- computation -----------------------------------------------------------------------------------------------

    def _make_state(self, width: int) -> None:
        """Allocate the tensors that a decoding step reads and writes: a row for each sequence that is decoded at the
        same time. A row of the page table lists up to `width` pages."""
        rows, where = self.rows, self.device
        self._active: dict[int, _Sequence] = {}
        self._free_rows = list(reversed(range(rows)))
        self._last = torch.zeros(rows, dtype=torch.int64, device=where)  # last token of each row
        self._positions = torch.full((rows,), -1, dtype=torch.int64, device=where)  # of each last token; -1: none
        self._table = torch.zeros(rows, width, dtype=torch.int64, device=where)
        most = 1 if self.sampling.greedy else max((len(each.tokens) + each.budget for each in self._all), default=1)
        self._numbers = torch.zeros(rows, most, dtype=torch.float64, device=where)
        longest = max((each.positions for each in self._all), default=1)
        self._rotation: Rotation | None = None  # cosines and sines of all positions, (T, D / 2) each
        if self.model.config.position == "rope":
            self._rotation = rotation_of(torch.arange(max(1, longest), device=where), self.model.config)

    def _timed_prefill(self, members: list[_Sequence]) -> list[int]:
        begin = time.perf_counter()
        with torch.no_grad(), torch.autocast(self.device.type, enabled=False):  # the cache has the model's dtype
            tokens = self._prefill(members)
        self.prefill_s += time.perf_counter() - begin
        self.prompt_tokens += sum(len(each.tokens) for each in members)
        return tokens

    def _prefill(self, members: list[_Sequence]) -> list[int]:
        """Run the model on the prompts `members` to fill the cache, and choose the first new token of each prompt."""
        longest, width = max(len(each.tokens) for each in members), self._table.shape[1]
        padded = [each.tokens + [0] * (longest - len(each.tokens)) for each in members]
        table = [each.pages + [0] * (width - len(each.pages)) for each in members]
        rows, lengths, tokens, pages = (
            torch.tensor(each, device=self.device)
            for each in ([each.row for each in members], [len(each.tokens) for each in members], padded, table)
        )
        self._table[rows] = pages
        if not self.sampling.greedy:
            for each in members:
                own = numbers_of(self.sampling.seed, each.number, len(each.tokens) + each.budget, self.device)
                self._numbers[each.row, : len(own)] = own
        cache = self.cache.first(pages, lengths, longest)
        x, update = self.model.through_layers(tokens, torch.arange(longest, device=self.device), cache)  # (B, S, W)
        place = torch.arange(len(members), device=self.device)[:, None], lengths[:, None] - 1  # (B, 1)
        chosen = self._choose(x[place], update[place] if update is not None else None, rows, lengths)
        self._last[rows], self._positions[rows] = chosen, lengths
        return chosen.tolist()

    def _timed_step(self, members: list[_Sequence]) -> list[int]:
        lengths = [len(each.tokens) + each.count for each in members]  # including the last token
        positions, window = sum(lengths), self.model.config.window
        windowed = positions if window is None else sum(min(length, window) for length in lengths)
        with torch.no_grad(), torch.autocast(self.device.type, enabled=False):
            if self.device.type == "cuda":
                if self._step is None:
                    self._sums = self._norm_sums()
                    self._step = self._captured_step()
                step = self._step
            else:
                step = lambda: self._decode(positions, windowed)  # noqa: E731
            begin = time.perf_counter()
            step()
            tokens = self._last.tolist()
        self.decode_s += time.perf_counter() - begin
        self.steps.append((len(members), positions))
        self._windowed.append(windowed)
        return [tokens[each.row] for each in members]

    def _decode(self, count: int | None = None, windowed: int | None = None) -> None:
        """Run one decoding step: choose the next token of the sequence in each row of the batch.

        `count` is the number of positions that a layer without a window attends to, summed over the rows. `windowed` is
        this sum for a layer with a window. Each is None if the host does not know it.
        """
        cache = self.cache.next(self._table, self._positions, count, windowed)
        places = self._positions.clamp(min=0)[:, None]  # (R, 1)
        last = self._last.clamp(min=0)[:, None]  # -1: no token could be chosen
        x: Tensor | None
        update: Tensor | Summand | None
        rotation = None if self._rotation is None else (self._rotation[0][places], self._rotation[1][places])
        if self._sums is None:
            x, update = self.model.through_layers(last, places, cache, rotation=rotation)  # (R, 1, W)
        else:
            x, update = self.model.with_norm_sums(last, places, cache, rotation, self._sums)
        here, rows = self._positions + 1, torch.arange(self.rows, device=self.device)
        self._last.copy_(self._choose(x, update, rows, here))
        self._positions.copy_(torch.where(self._positions < 0, -1, here))

    def _choose(self, x: Tensor | None, update: Tensor | Summand | None, rows: Tensor, positions: Tensor) -> Tensor:
        """Choose the next token of B sequences: (B,).

        Args:
            x, update: the head's inputs at each sequence's last position so far, (B, 1, W): the residual connection,
                and the last layer's result, which is not yet added to it.
            rows: (B,) the row of each sequence in the batch.
            positions: (B,) the position of each next token in its sequence.
        """
        assert self.model.head is not None
        logits = self.model.head.own_logits(x, update)[:, 0]  # (B, v), for the v tokens that this rank holds
        numbers = self._numbers[:, 0]
        if not self.sampling.greedy:
            numbers = self._numbers[rows, positions.clamp(max=self._numbers.shape[1] - 1)]
        return choose_on_ranks(logits, numbers, self.sampling, self.model.config.vocabulary, self.model.group)

    def _norm_sums(self) -> NormSums | None:
        """The object that sums over the tensor parallel ranks in a decoding step, with a kernel. None: NCCL sums
        instead. All ranks make the same choice."""
        sums = norm_sums(self.model.group, self.device)
        refused = sums.refused(self.rows, self.model.config.width, self.dtype)
        if not refused:
            own = "" if self.model.takes_norm_sums() else "parts of the model were replaced, or hooks watch them"
            refused = first_refusal(own, self.model.group)
        self.norm_sums_refused = refused
        return None if refused else sums

    def _captured_step(self) -> Callable[[], None]:
        """Capture a decoding step as a CUDA graph, and return a function that replays the graph.

        The step first runs twice, because lazy initialization must not happen during capture. After the capture, last
        tokens and positions get their previous values again. All ranks must capture and replay, because the graph
        contains their communication. So the graph must also be freed before their process group;
        `rooftop.parallel.join` ensures this order.
        """
        state = (self._last, self._positions)
        held = [tensor.clone() for tensor in state]
        self._positions.fill_(-1)  # without a sequence, a row writes to page 0
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.device(self.device), torch.cuda.stream(stream):
            for _ in range(2):
                self._decode()
            graph = torch.cuda.CUDAGraph()
            with captured_into(graph, stream):
                self._decode()
        torch.cuda.current_stream(self.device).wait_stream(stream)
        for tensor, value in zip(state, held, strict=True):
            tensor.copy_(value)
        return graph.replay


def groups_of(lengths: Sequence[int], tokens: int) -> list[list[int]]:
    """Divide prompts into groups that are each prefilled in one forward pass. Return the indices of each group's
    prompts. Over all groups, the prompts are in order of length, longest first.

    Args:
        lengths: number of tokens of each prompt.
        tokens: maximum number of tokens of a group whose prompts are padded to the longest of them. A single prompt may
            have more tokens; it is then a group by itself.
    """
    groups: list[list[int]] = []
    room = 0
    for place in sorted(range(len(lengths)), key=lambda place: -lengths[place]):
        if not groups or len(groups[-1]) == room:
            groups.append([])
            room = max(1, tokens // max(1, lengths[place]))
        groups[-1].append(place)
    return groups


def step_cost(
    config: GptConfig,
    rows: int,
    positions: int,
    dtype: torch.dtype,
    windowed: int | None = None,
    device: torch.device | str = "cuda",
) -> Cost:
    """The cost of one decoding step.

    The step reads the weights, and the keys and values of earlier positions, once. The step writes the new keys and
    values.

    Args:
        config: config of the model; for a tensor parallel rank `config.of_rank(ranks)`.
        rows: number of sequences in the batch.
        positions: number of positions that one layer attends to, summed over the sequences, including the new ones.
        dtype: dtype of weights and cache.
        windowed: as `positions`, but for one layer with a window; None: the same as `positions`.
        device: the device that computes. On a GPU, products of float32 may run in TF32.
    """
    embeddings = config.vocabulary * (1 if config.tied else 2)
    embeddings += config.positions if config.position == "learned" else 0
    weights = config.parameters - embeddings * config.width + config.vocabulary * config.width  # the whole head
    # of the embeddings, only the rows that are looked up
    weights += rows * config.width * (2 if config.position == "learned" else 1)
    products = config.layers * config.layer_weights + config.vocabulary * config.width
    narrow = config.windowed_layers
    seen = (config.layers - narrow) * positions + narrow * (positions if windowed is None else windowed)
    flops = 2 * rows * products + 4 * config.query_width * seen
    read = weights * dtype.itemsize + 2 * config.kv_width * (seen - config.layers * rows) * dtype.itemsize
    with counted_for(torch.device(device).type):
        precision = matrix_precision(torch.empty(0, dtype=dtype))
    return Cost(read, cache_bytes(config, rows, dtype), {precision: flops})


# ---- checks of arguments -------------------------------------------------------------------------------------------


def _check_model(model: Gpt) -> None:
    if not isinstance(model, Gpt):
        raise TypeError(f"generate: expected a rooftop.models.Gpt, got {type(model).__name__}")
    if model.embedding is None or model.head is None or len(model.layers) != model.config.layers:
        raise ValueError("generate: expected a whole model, got a pipeline stage")
    if model.split_along is not None or model.context.ranks > 1:
        raise ValueError(
            "generate: ranks split each sequence (sequence_parallel, or a context), but a new token is one "
            "position: load the model with only tensor parallel ranks"
        )
    if any(parameter.is_meta for parameter in model.parameters()):
        raise ValueError("generate: the model is on the meta device, so its parameters have no values: load weights")
    if model.training:
        raise ValueError("generate: the model is in training mode: call model.eval()")


def _sequences(
    config: GptConfig, prompts: Sequence[Prompt], max_new_tokens: int, numbers: Sequence[int] | None
) -> list[_Sequence]:
    if isinstance(prompts, (str, bytes, Tensor)) or not isinstance(prompts, Sequence):
        raise TypeError(f"generate: expected a list of prompts, each of tokens, got {type(prompts).__name__}")
    if isinstance(max_new_tokens, bool) or not isinstance(max_new_tokens, int) or max_new_tokens < 0:
        raise ValueError(f"generate: max_new_tokens must be an int, 0 or more, got {max_new_tokens!r}")
    given = list(range(len(prompts))) if numbers is None else _whole_numbers("sequences", numbers)
    if len(given) != len(prompts):
        raise ValueError(f"generate: expected one sequence number for each of {len(prompts)} prompts, got {len(given)}")
    found = []
    for index, prompt in enumerate(prompts):
        tokens = _checked(index, prompt, config)
        check_sequence(given[index])
        budget = min(max_new_tokens, config.positions - len(tokens))
        found.append(_Sequence(index, tokens, budget, given[index]))
    return found


def _checked(index: int, prompt: Prompt, config: GptConfig) -> list[int]:
    """Convert the tokens of a prompt to ints, and check them."""
    if isinstance(prompt, str):
        raise TypeError(f"generate: prompt {index} is text: give its tokens, from a tokenizer")
    if isinstance(prompt, Tensor) and (
        prompt.dim() != 1 or prompt.dtype not in (torch.int64, torch.int32) or prompt.is_meta
    ):
        raise TypeError(
            f"generate: expected tokens (S,), int64 or int32, as prompt {index}, got {tuple(prompt.shape)}, "
            f"{prompt.dtype} on {prompt.device}"
        )
    tokens = _whole_numbers(f"prompt {index}", prompt)
    if not tokens:
        raise ValueError(f"generate: prompt {index} is empty: begin with a token, such as the beginning-of-text token")
    if len(tokens) >= config.positions:
        raise ValueError(
            f"generate: prompt {index} has {counted(len(tokens), 'token')}, and the model has "
            f"{counted(config.positions, 'position')}, which leaves no room for a new token; shorten it to at most "
            f"{config.positions - 1}"
        )
    least, most = min(tokens), max(tokens)
    if least < 0 or most >= config.vocabulary:
        raise ValueError(
            f"generate: tokens of prompt {index} are from {least} to {most}, but the model's are from 0 to "
            f"{config.vocabulary - 1}: use the model's own tokenizer"
        )
    return tokens


def _whole_numbers(what: str, given: Iterable[Any]) -> list[int]:
    """Convert integers of Python, NumPy or tensors to ints, in order. Raise TypeError for anything else."""
    if isinstance(given, Tensor) and given.dim() == 1:
        given = given.tolist()
    if isinstance(given, (str, Set, Mapping, Tensor)) or not isinstance(given, Iterable):
        raise TypeError(f"generate: {what} must be a sequence of ints, got {given!r}")
    found = []
    for each in given:
        try:
            number = None if isinstance(each, bool) else operator.index(each)
        except TypeError:
            number = None
        if number is None:
            raise TypeError(f"generate: {what} must be ints, got {each!r}")
        found.append(number)
    return found
