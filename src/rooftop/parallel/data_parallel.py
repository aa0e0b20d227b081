"""Data parallelism in one process: split a batch over several devices, with a replica of the module on each device.

A forward pass has four steps, each a function. `scatter` splits the inputs, `replicate` copies the module,
`parallel_apply` runs each replica on its share, and `gather` joins the outputs. All four functions are differentiable,
so backward runs the steps in reverse and accumulates the gradients of all replicas in the module's parameters.
`DataParallel` combines the four functions in order, with the semantics of torch.nn.DataParallel.

Data parallelism in one process has limits: one Python process launches the kernels of all devices. In each forward, the
first device sends the parameters to the other devices; in each backward, it gets the parameters' gradients back. No
communication overlaps with backward. Use `DataParallel` for small jobs and for learning. One process per GPU (torchrun
and DistributedDataParallel) has none of these limits.

For tests on a CPU, `devices` may list "cpu" several times.
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
    """Wrap a module, and split its batches over several devices.

    Each forward creates replicas on the devices that get a share of the batch, and drops them afterwards. Gradients are
    those of the whole batch. As with torch.nn.DataParallel:

    - The first replica is the module itself; only this replica is kept. So running statistics of batch norms come from
      the first replica's share of the batch. Each replica normalizes its own share.
    - Hooks of the module and its submodules run once for each replica, in separate threads.
    - Keys of `state_dict` begin with "module.".
    - A scalar output (such as a mean loss) becomes a vector with one value per replica. The mean of these losses is the
      batch's mean loss only if all shares have the same size. For an exact mean loss, let the module return a value for
      each sample.

    This class differs from torch.nn.DataParallel in some ways. Shares differ by at most one sample. A parameter that no
    replica uses gets no gradient, instead of zeros. `parameters()` works in a replica. Tensors in attributes are copied
    to the replica's device, too. Dropout masks differ between GPUs even after `torch.manual_seed`, which gives all GPUs
    the same seed: before each forward, the generator of a GPU with the seed of an earlier GPU is seeded again, with the
    next seed that no earlier GPU has. On the CPU, all replicas draw from one generator, in an order that can differ
    between runs.

    Args:
        module: the module, which is moved to the first device in place.
        devices: the devices. Default: all GPUs, or the CPU if there are none. The list may repeat a device.
        output_device: the device that gathers the outputs. Default: the first device.
        dim: dimension along which inputs are split and outputs are joined.

    Raises:
        ValueError: the list of devices is empty, or a device is neither an existing GPU nor the CPU.
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
        """Run the module on its arguments, which `scatter` splits over the devices.

        Without arguments, only the first device runs. With arguments but no tensors, all devices run.

        Returns:
            The result of `gather` for the outputs.

        Raises:
            ValueError, TypeError: raised by `scatter`, `replicate`, `parallel_apply` or `gather`. Errors in arguments
                are raised before any replica runs.
            BaseException: the exception that a replica raised first. A note names the replica's number and device.
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
    """Call all modules at the same time, each with its inputs in a separate thread.

    Threads inherit the caller's grad mode, inference mode, autocast, and its current stream on each device. A single
    module is called in the calling thread.

    Args:
        modules: the modules to call.
        inputs: for each module, a tuple or list of positional arguments, or a single argument of any other type.
        kwargs: for each module, the keyword arguments. Default: none.
        devices: the device of each module. Default: the device of the first tensor in the module's arguments, or the
            CPU if there is no tensor.

    Returns:
        The modules' outputs, in order. The host does not wait for the GPUs.

    Raises:
        ValueError: the number of inputs, keyword arguments or devices differs from the number of modules.
        BaseException: the exception that a module raised first, raised again after all modules have ended. The
            exception keeps its traceback, and gets a note with the module's number and device.
    """
    kwargs = [{}] * len(modules) if kwargs is None else kwargs
    for what, given in (("inputs", inputs), ("dicts of keyword arguments", kwargs), ("devices", devices)):
        if given is not None and len(given) != len(modules):
            raise ValueError(
                f"{len(modules)} modules need {len(modules)} {what}, got {len(given)}: pass one for each module"
            )
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
    """Change the seed of each GPU's random generator that has the same seed as the generator of an earlier GPU."""
    gpus = [device for device in dict.fromkeys(devices) if device.type == "cuda"]
    if gpus:
        torch.cuda.init()  # creates the generators
    taken: set[int] = set()
    for device in gpus:
        generator = torch.cuda.default_generators[device.index]
        seed = generator.initial_seed()
        while seed in taken:
            seed = (seed + 1) % 2**64
        if seed != generator.initial_seed():
            generator.manual_seed(seed)
        taken.add(seed)
