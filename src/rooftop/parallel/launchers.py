"""Read this process's rank, the number of ranks and the rendezvous address from the launcher's environment variables.

| launcher | its variables |
|---|---|
| `torchrun`, or a compatible launcher | `RANK`, `WORLD_SIZE`, `MASTER_ADDR`, `MASTER_PORT`, `LOCAL_RANK` |
| `srun` | `SLURM_PROCID`, `SLURM_STEP_NUM_TASKS`, `SLURM_LOCALID`, `SLURM_STEP_NODELIST`, `SLURM_JOB_ID` |
| none: a single process | none of these |

A script that runs in a SLURM allocation without `srun` is a single process, because the variables of a job step are
missing.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
SLURM = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_NODELIST", "SLURM_JOB_ID")
FIRST_PORT, PORTS = 20_000, 12_000  # all ports are below 32768, where Linux's ephemeral ports begin
LAST_PORT = 65_535


@dataclass(frozen=True)
class Launch:
    """The position of this process among all processes that were started together.

    Attributes:
        rank, size: rank of this process, and the number of ranks.
        local_rank: index of this rank among this machine's ranks.
        launcher: "torchrun", "slurm" or "alone".
        address, port: the rendezvous address of the ranks; meaningless for a single process.
        served: whether the launcher runs the store at this address; if not, rank 0 runs the store.
        attempt: how often the launcher has restarted the ranks. If there are several launchers, such as one for each
            machine, each counts its own restarts.
        elastic: whether torchrun itself started this process, so that its parent process is the launcher.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    launcher: str = "alone"
    address: str = ""
    port: int = 0
    served: bool = False
    attempt: int = 0
    elastic: bool = False


def launched(environment: Mapping[str, str] = os.environ) -> Launch:
    """Read the launcher's environment variables in this process, without communication.

    Raises:
        ValueError: a variable of the launcher is missing, is no number or no port, or contradicts another variable.
    """
    if "RANK" in environment or "WORLD_SIZE" in environment:
        return _by_torchrun(environment)
    if "SLURM_STEP_NUM_TASKS" in environment:
        return _by_slurm(environment)
    return Launch()


def _by_torchrun(environment: Mapping[str, str]) -> Launch:
    _require(TORCHRUN, environment)
    rank = _number("RANK", environment)
    return _checked(
        Launch(
            rank,
            _number("WORLD_SIZE", environment),
            _number("LOCAL_RANK", environment, rank),
            "torchrun",
            environment["MASTER_ADDR"],
            _number("MASTER_PORT", environment),
            environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            _number("TORCHELASTIC_RESTART_COUNT", environment),
            "TORCHELASTIC_RUN_ID" in environment,
        )
    )


def _by_slurm(environment: Mapping[str, str]) -> Launch:
    _require(SLURM, environment)
    job, step = _number("SLURM_JOB_ID", environment), _number("SLURM_STEP_ID", environment)
    port = FIRST_PORT + (16 * job + step) % PORTS  # the same on all ranks of a step
    return _checked(
        Launch(
            _number("SLURM_PROCID", environment),
            _number("SLURM_STEP_NUM_TASKS", environment),
            _number("SLURM_LOCALID", environment),
            "slurm",
            environment.get("MASTER_ADDR") or first_host(environment["SLURM_STEP_NODELIST"]),
            _number("MASTER_PORT", environment, port),
        )
    )


def first_host(hosts: str) -> str:
    """The first host in SLURM's notation for a list of hosts: "gpu[003-006,9],login" -> "gpu003"."""
    return re.sub(r"\[(\d+)[^]]*]", r"\1", hosts).split(",")[0]


def _require(names: tuple[str, ...], environment: Mapping[str, str]) -> None:
    missing = [name for name in names if name not in environment]
    if missing:
        there = ", ".join(name for name in names if name in environment)
        raise ValueError(
            f"the environment has {there} but not {', '.join(missing)}: start the processes with torchrun or srun, "
            "or set all of these variables; for a single process, unset them"
        )


def _number(name: str, environment: Mapping[str, str], otherwise: int = 0) -> int:
    """The number in the environment variable `name`, or `otherwise` if the variable is not set."""
    text = environment.get(name, str(otherwise))
    if not text.isascii() or not text.isdigit():
        raise ValueError(f"{name}={text!r} in the environment: expected a number, 0 or more")
    return int(text)


def _checked(launch: Launch) -> Launch:
    if not launch.rank < launch.size:
        raise ValueError(
            f"the environment makes this rank {launch.rank} of {launch.size}: expected a rank below the size"
        )
    if not 0 < launch.port <= LAST_PORT:
        raise ValueError(f"MASTER_PORT={launch.port} in the environment: expected a port, 1 to {LAST_PORT}")
    if not launch.address:
        raise ValueError("MASTER_ADDR is empty in the environment: expected the name or address of rank 0's machine")
    return launch
