"""Data parallelism in one process: a batch split over several devices, a replica of the module on each.

Four steps, each a function: `scatter` splits the inputs, `replicate` copies the module, `parallel_apply` runs each
replica on its share, `gather` joins the outputs. All are differentiable, so the backward goes the same way back, and
the gradients of all replicas end up in the module's parameters. `DataParallel` is the four in order, with the meaning
of torch.nn.DataParallel.

What bounds it: one Python process launches for all devices, parameters go out and gradients come back through the first
device at every step, and nothing overlaps with the backward. It is for small jobs and for learning; a process for each
GPU (torchrun and DistributedDataParallel) has none of these limits.

On the CPU it works with "cpu" named several times, which is how it is tested.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from rooftop.hardware.threads import Modes, caller_stream, current, noted, run_together
from rooftop.parallel.containers import leaves, mapped, opened
from rooftop.parallel.replicas import places_of, replicate

__all__ = ["DataParallel", "gather", "parallel_apply", "replicate", "scatter"]

COMPARABLE = (bool, int, float, complex, str, bytes, torch.dtype, torch.device)
"""What outputs may hold besides tensors, if all replicas give the same."""


class DataParallel(nn.Module):
    """A module whose batches are split over several devices.

    Each forward makes replicas on the devices that get a share, and lets go of them after it; gradients are those of
    the whole batch. As with torch.nn.DataParallel:

    - The first replica is the module itself, and the only one that lasts: running statistics of batch norms are those
      of its share of the batch, and each replica normalizes its share by itself.
    - Hooks of the module and of those in it run once for each replica, in threads of their own.
    - Keys of `state_dict` begin with "module.".
    - An output without dimensions (a mean loss) becomes a vector, a value for each replica. Its mean is that of the
      batch only if all shares are of the same size: let the module return a value for each sample.

    Unlike there: shares differ by one sample at most; a parameter that no replica uses has no gradient rather than
    zeros; `parameters()` works in a replica; tensors in attributes go along; and dropout differs between GPUs after
    `torch.manual_seed`, which gives all of them the same seed (here a GPU that has the seed of one before it gets the
    next one that is free). On the CPU replicas draw from one generator in whichever order they come.

    Args:
        module: is moved to the first device, in place.
        devices: default: all GPUs, the CPU where there are none. One may be named several times.
        output_device: where outputs are gathered. Default: the first device.
        dim: of inputs that is split, and of outputs that is joined.

    Raises:
        ValueError: no devices, or one that is neither a GPU that is there nor the CPU.
    """

    def __init__(
        self,
        module: nn.Module,
        devices: Sequence[torch.device | str] | None = None,
        output_device: torch.device | str | None = None,
        dim: int = 0,
    ) -> None:
        super().__init__()
        self.devices = places_of(devices)
        self.output_device = self.devices[0] if output_device is None else places_of([output_device])[0]
        self.dim = dim
        self.module = module.to(self.devices[0])

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module on its arguments, split as `scatter` does.

        Without arguments it runs on the first device, with arguments but no tensors on all of them.

        Returns:
            What `gather` makes of the outputs.

        Raises:
            ValueError, TypeError: of the four functions.
            BaseException: the first that a replica raised, with its number and device as a note.
        """
        shares = scatter((args, kwargs), self.devices, self.dim) if args or kwargs else [((), {})]
        devices = self.devices[: len(shares)]
        _give_different_seeds(devices)
        replicas = replicate(self.module, devices)
        outputs = parallel_apply(replicas, [share[0] for share in shares], [share[1] for share in shares], devices)
        return gather(outputs, self.output_device, self.dim)

    def extra_repr(self) -> str:
        return f"devices={[str(device) for device in self.devices]}, dim={self.dim}"


def scatter(inputs: Any, devices: Sequence[torch.device | str], dim: int = 0) -> list[Any]:
    """Split a batch into a share for each device.

    Args:
        inputs: a tensor, or tensors in tuples, named tuples, lists, dicts and dataclasses. All with a dimension are
            split, and must be of the same size along `dim`; those without are copied to each device. Whatever is no
            tensor is the same object in every share.
        devices: of a batch of n samples at most n get a share (the first ones), of none the first; with no tensors to
            split, all.
        dim: along which tensors are split; may be negative.

    Returns:
        The shares, each like `inputs`, in order. The first ones have one sample more where the batch cannot be divided.
        A share that stays on its device is a view.

    Raises:
        ValueError: no devices, tensors without this dimension or of different sizes along it.
    """
    places = places_of(devices)
    tensors = [leaf for leaf in leaves(inputs) if isinstance(leaf, Tensor) and leaf.dim() > 0]
    for tensor in tensors:
        if not -tensor.dim() <= dim < tensor.dim():
            raise ValueError(f"inputs are split along dim {dim}, which a tensor of shape {tuple(tensor.shape)} lacks")
    sizes = {tensor.shape[dim]: tuple(tensor.shape) for tensor in tensors}
    if len(sizes) > 1:
        raise ValueError(
            f"all tensors are split along dim {dim} and must be of one size there, got the shapes "
            f"{', '.join(map(str, sizes.values()))}: expand those that every sample shares (tensor.expand), or make "
            "them buffers of the module"
        )
    if not tensors:
        return [_share(inputs, place, dim, 0, 0) for place in places]
    (batch,) = sizes
    count = min(len(places), max(1, batch))
    bounds = [number * (batch // count) + min(number, batch % count) for number in range(count + 1)]
    return [
        _share(inputs, place, dim, start, end - start)
        for place, start, end in zip(places, bounds, bounds[1:], strict=False)
    ]


def _share(inputs: Any, device: torch.device, dim: int, start: int, size: int) -> Any:
    """A tensor that is there twice is copied once."""
    done: dict[int, Tensor] = {}

    def of(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if id(leaf) not in done:
            part = leaf.narrow(dim, start, size) if leaf.dim() else leaf
            done[id(leaf)] = _to(part, device)
        return done[id(leaf)]

    return mapped(inputs, of)


def parallel_apply(
    modules: Sequence[Callable[..., Any]],
    inputs: Sequence[Any],
    kwargs: Sequence[Mapping[str, Any]] | None = None,
    devices: Sequence[torch.device | str] | None = None,
) -> list[Any]:
    """Call each module with its inputs, all at the same time, a thread for each.

    Threads have the grad mode, inference mode and autocast of the caller; each works on the caller's current stream of
    its device, which is the current one. A single module is called in the calling thread.

    Args:
        modules: what is called.
        inputs: for each, the positional arguments in a tuple or list, or anything else as the only one.
        kwargs: for each, the keyword arguments. Default: none.
        devices: for each, where it runs. Default: where the first tensor of its arguments is, else the CPU.

    Returns:
        Their outputs, in order; nothing waits for the GPUs.

    Raises:
        ValueError: not as many inputs, keyword arguments or devices as modules.
        BaseException: the first that a module raised, when all have ended: the exception itself with its traceback,
            and the module's number and device as a note.
    """
    kwargs = [{}] * len(modules) if kwargs is None else kwargs
    for what, given in (("inputs", inputs), ("keyword arguments", kwargs), ("devices", devices)):
        if given is not None and len(given) != len(modules):
            raise ValueError(f"{len(modules)} modules need {len(modules)} {what}, got {len(given)}: one for each")
    arguments = [value if isinstance(value, tuple | list) else (value,) for value in inputs]
    if not modules:
        return []
    places = places_of(list(map(_device_of, arguments, kwargs)) if devices is None else devices)
    modes = Modes.of_this_thread()
    outputs: dict[int, Any] = {}

    def run(number: int, stream: torch.cuda.Stream | None) -> None:
        with modes.entered(), current(stream), noted(f"replica {number} on {places[number]}"):
            outputs[number] = modules[number](*arguments[number], **kwargs[number])

    calls = [partial(run, number, caller_stream(place)) for number, place in enumerate(places)]
    if len(calls) == 1:
        calls[0]()
    else:
        with ThreadPoolExecutor(len(calls), "rooftop-replica") as threads:
            run_together(threads, calls)
    return [outputs[number] for number in range(len(modules))]


def _device_of(arguments: Any, kwargs: Mapping[str, Any]) -> torch.device:
    given = chain(leaves(arguments), leaves(dict(kwargs)))
    return next((leaf.device for leaf in given if isinstance(leaf, Tensor)), torch.device("cpu"))


def gather(outputs: Sequence[Any], device: torch.device | str, dim: int = 0) -> Any:
    """Join what the replicas gave.

    Args:
        outputs: one for each replica, all of one structure: tensors in tuples, named tuples, lists, dicts (with the
            same keys) and dataclasses; besides tensors None, numbers, strings and the like that are equal in all.
        device: where the result lies.
        dim: along which tensors are joined; may be negative. Those without dimensions become a vector (replicas,).

    Returns:
        The same structure.

    Raises:
        ValueError: no outputs; tensors that differ in dtype or in another size than that along `dim`, or lack it; dicts
            with other keys; other values that differ.
        TypeError: structures that differ, or values that cannot be joined.
    """
    place = places_of([device])[0]
    if not outputs:
        raise ValueError("there are no outputs to gather: expected one for each replica")
    return _joined(list(outputs), place, dim)


def _joined(parts: list[Any], device: torch.device, dim: int) -> Any:
    first = parts[0]
    for number, part in enumerate(parts):
        if type(part) is not type(first) and not (isinstance(part, Tensor) and isinstance(first, Tensor)):
            raise TypeError(
                f"replica {number} gave a {type(part).__name__} where replica 0 gave a {type(first).__name__}: all "
                "must give the same structure"
            )
    if isinstance(first, Tensor):
        return _joined_tensors(parts, device, dim)
    found = opened(first)
    if found is None:
        return _same_value(parts)
    made = found[1]
    return made([_joined(list(column), device, dim) for column in zip(*_rows(parts), strict=True)])


def _rows(parts: list[Any]) -> list[list[Any]]:
    """The values in containers of one type, those of dicts in the order of the first one's keys."""
    first = parts[0]
    if isinstance(first, dict):
        for number, part in enumerate(parts):
            if part.keys() != first.keys():
                raise ValueError(
                    f"replica {number} gave a dict with the keys {list(part)}, replica 0 one with {list(first)}: all "
                    "must give the same keys"
                )
        return [[part[key] for key in first] for part in parts]
    rows = [found[0] for part in parts if (found := opened(part)) is not None]
    for number, row in enumerate(rows):
        if len(row) != len(rows[0]):
            raise ValueError(
                f"replica {number} gave a {type(first).__name__} of {len(row)}, replica 0 one of {len(rows[0])}: all "
                "must give as many values"
            )
    return rows


def _joined_tensors(parts: list[Tensor], device: torch.device, dim: int) -> Tensor:
    kinds = {(part.dtype, _without(part.shape, dim)) for part in parts}
    if len(kinds) > 1 or not (parts[0].dim() == 0 or -parts[0].dim() <= dim < parts[0].dim()):
        given = ", ".join(f"{tuple(part.shape)} {part.dtype}" for part in parts)
        raise ValueError(
            f"outputs of the replicas cannot be joined along dim {dim}: {given}; they must agree in dtype and in all "
            "other sizes (pad them inside the module)"
        )
    there = [_to(part, device) for part in parts]
    return torch.stack(there) if parts[0].dim() == 0 else torch.cat(there, dim)


def _without(shape: torch.Size, dim: int) -> tuple[int, ...]:
    """The number of dimensions, and the sizes along all but one."""
    kept = [size for number, size in enumerate(shape) if number not in (dim, dim + len(shape))]
    return len(shape), *kept


def _same_value(parts: list[Any]) -> Any:
    first = parts[0]
    if first is None or (isinstance(first, COMPARABLE) and all(part == first for part in parts)):
        return first
    if isinstance(first, COMPARABLE):
        raise ValueError(f"replicas gave different values, {', '.join(map(repr, parts))}: return them as tensors")
    raise TypeError(
        f"outputs of the type {type(first).__module__}.{type(first).__qualname__} cannot be gathered: return tensors, "
        "in tuples, lists, dicts or dataclasses"
    )


def _to(tensor: Tensor, device: torch.device) -> Tensor:
    """Towards the host only a blocking copy is safe to read."""
    return tensor.to(device, non_blocking=device.type == "cuda")


def _give_different_seeds(devices: Sequence[torch.device]) -> None:
    """Generators of GPUs that have the seed of an earlier device get another one."""
    gpus = [device for device in dict.fromkeys(devices) if device.type == "cuda"]
    if gpus:
        torch.cuda.init()  # before it there are no generators
    taken: set[int] = set()
    for device in gpus:
        generator = torch.cuda.default_generators[device.index]
        seed = generator.initial_seed()
        while seed in taken:
            seed = (seed + 1) % 2**64
        if seed != generator.initial_seed():
            generator.manual_seed(seed)
        taken.add(seed)
