"""Data parallelism in one process: a batch is split over several devices, with a replica of the module on each.

Four steps, each a function: `scatter` splits the inputs, `replicate` copies the module, `parallel_apply` runs each
replica on its share, `gather` joins the outputs. All four are differentiable, so backward takes the reverse path, and
the gradients of all replicas end up in the module's parameters. `DataParallel` combines the four in order, with the
semantics of torch.nn.DataParallel.

Its limits: one Python process launches for all devices, parameters go out and gradients come back through the first
device at every step, and nothing overlaps with the backward. It is meant for small jobs and for learning. One process
per GPU (torchrun and DistributedDataParallel) has none of these limits.

On the CPU, "cpu" can be named several times, which the tests do.
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
from rooftop.parallel.containers import leaves
from rooftop.parallel.gathering import gather
from rooftop.parallel.replicas import places_of, replicate
from rooftop.parallel.scattering import scatter

__all__ = ["DataParallel", "gather", "parallel_apply", "replicate", "scatter"]


class DataParallel(nn.Module):
    """A module whose batches are split over several devices.

    Each forward creates replicas on the devices that get a share, and drops them afterwards; gradients are those of the
    whole batch. As with torch.nn.DataParallel:

    - The first replica is the module itself, and the only one that is kept. Running statistics of batch norms come from
      its share of the batch, and each replica normalizes its own share.
    - Hooks of the module and its submodules run once for each replica, in separate threads.
    - Keys of `state_dict` begin with "module.".
    - An output without dimensions (a mean loss) becomes a vector, with a value for each replica. The mean of the
      shares' losses is the batch's mean only if all shares have the same size: let the module return a value for each
      sample.

    It differs from torch.nn.DataParallel in some ways. Shares differ by at most one sample. A parameter that no replica
    uses has no gradient instead of zeros. `parameters()` works in a replica, and tensors in attributes are copied too.
    Dropout differs between GPUs after `torch.manual_seed`, which gives all of them the same seed (here a GPU with the
    seed of an earlier one gets the next free seed). On the CPU replicas draw from one generator, in any order.

    Args:
        module: the module; it is moved to the first device, in place.
        devices: default: all GPUs, or the CPU if there are none. A device may be named several times.
        output_device: where outputs are gathered. Default: the first device.
        dim: dimension along which inputs are split and outputs are joined.

    Raises:
        ValueError: there are no devices, or one is neither an existing GPU nor the CPU.
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

        Without arguments only the first device runs; with arguments but no tensors, all devices do.

        Returns:
            The result of `gather` for the outputs.

        Raises:
            ValueError, TypeError: as in the four functions. Errors in arguments are raised before any replica runs.
            BaseException: the first exception of a replica, with its number and device as a note.
        """
        given: dict[Any, Any] = dict(enumerate(args)) | kwargs
        shares = scatter(given, self.devices, self.dim) if given else [{}]
        devices = self.devices[: len(shares)]
        _give_different_seeds(devices)
        replicas = replicate(self.module, devices)
        positional = [tuple(share[number] for number in range(len(args))) for share in shares]
        named = [{name: share[name] for name in kwargs} for share in shares]
        outputs = parallel_apply(replicas, positional, named, devices)
        return gather(outputs, self.output_device, self.dim)

    def extra_repr(self) -> str:
        return f"devices={[str(device) for device in self.devices]}, dim={self.dim}"


def parallel_apply(
    modules: Sequence[Callable[..., Any]],
    inputs: Sequence[Any],
    kwargs: Sequence[Mapping[str, Any]] | None = None,
    devices: Sequence[torch.device | str] | None = None,
) -> list[Any]:
    """Call each module with its inputs, all at the same time, in a thread for each.

    Threads have the grad mode, inference mode and autocast of the caller; each uses the caller's current stream of its
    device. A single module is called in the calling thread.

    Args:
        modules: the modules to call.
        inputs: for each module, the positional arguments in a tuple or list, or a single argument of any other type.
        kwargs: for each module, the keyword arguments. Default: none.
        devices: the device of each module. Default: the device of the first tensor in its arguments, else the CPU.

    Returns:
        Their outputs, in order; nothing waits for the GPUs.

    Raises:
        ValueError: the number of inputs, keyword arguments or devices differs from that of modules.
        BaseException: a module raised an exception. The first one is raised after all modules have ended, with its
            traceback, and with the module's number and device as a note.
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


def _give_different_seeds(devices: Sequence[torch.device]) -> None:
    """Give generators of GPUs with the seed of an earlier device another seed."""
    gpus = [device for device in dict.fromkeys(devices) if device.type == "cuda"]
    if gpus:
        torch.cuda.init()  # without it there are no generators yet
    taken: set[int] = set()
    for device in gpus:
        generator = torch.cuda.default_generators[device.index]
        seed = generator.initial_seed()
        while seed in taken:
            seed = (seed + 1) % 2**64
        if seed != generator.initial_seed():
            generator.manual_seed(seed)
        taken.add(seed)
