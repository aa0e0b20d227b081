"""What the launcher of this process says of it: which rank it is, of how many, and where they meet.

| started by | known by |
|---|---|
| `torchrun`, or whatever sets the same variables | `RANK`, `WORLD_SIZE`, `MASTER_ADDR`, `MASTER_PORT`, `LOCAL_RANK` |
| `srun` | `SLURM_PROCID`, `SLURM_STEP_NUM_TASKS`, `SLURM_LOCALID`, `SLURM_STEP_NODELIST`, `SLURM_JOB_ID` |
| nobody: a process by itself | none of these |

A script that runs in an allocation of SLURM without `srun` is by itself: the variables of a step are not there.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
SLURM = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_NODELIST", "SLURM_JOB_ID")
FIRST_PORT, PORTS = 20_000, 12_000  # below the ports that Linux hands out by itself, from 32768


@dataclass(frozen=True)
class Launch:
    """This process among those that were started with it.

    Attributes:
        rank, size: which, of how many.
        local_rank: which of those on this machine.
        launcher: "torchrun", "slurm" or "alone".
        address, port: where the ranks meet; of no meaning alone.
        served: whether the launcher holds the store there; if not, rank 0 does.
        attempt: how many times the launcher has restarted the ranks; of several launchers each has its own count.
        elastic: whether this process was started by torchrun itself, with which it ends.
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
    """What the environment says of this process. Communicates with nobody.

    Raises:
        ValueError: a variable of the launcher is missing, is no number or contradicts another.
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
            _number("LOCAL_RANK", environment) if "LOCAL_RANK" in environment else rank,
            "torchrun",
            environment["MASTER_ADDR"],
            _number("MASTER_PORT", environment),
            environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            int(environment.get("TORCHELASTIC_RESTART_COUNT", "0")),
            "TORCHELASTIC_RUN_ID" in environment,
        )
    )


def _by_slurm(environment: Mapping[str, str]) -> Launch:
    _require(SLURM, environment)
    step = int(environment.get("SLURM_STEP_ID", "0"))
    port = FIRST_PORT + (16 * _number("SLURM_JOB_ID", environment) + step) % PORTS  # the same at all ranks of a step
    return _checked(
        Launch(
            _number("SLURM_PROCID", environment),
            _number("SLURM_STEP_NUM_TASKS", environment),
            _number("SLURM_LOCALID", environment),
            "slurm",
            environment.get("MASTER_ADDR") or first_host(environment["SLURM_STEP_NODELIST"]),
            _number("MASTER_PORT", environment) if "MASTER_PORT" in environment else port,
        )
    )


def first_host(hosts: str) -> str:
    """The first of a list of hosts as SLURM writes it: "gpu[003-006,9],login" -> "gpu003"."""
    return re.sub(r"\[(\d+)[^]]*]", r"\1", hosts).split(",")[0]


def _require(names: tuple[str, ...], environment: Mapping[str, str]) -> None:
    missing = [name for name in names if name not in environment]
    if missing:
        there = ", ".join(name for name in names if name in environment)
        raise ValueError(
            f"the environment has {there} but not {', '.join(missing)}: start the processes by torchrun or srun, or "
            "set all of these; for a process by itself unset them"
        )


def _number(name: str, environment: Mapping[str, str]) -> int:
    if not environment[name].isascii() or not environment[name].isdigit():
        raise ValueError(f"{name}={environment[name]!r} in the environment: expected a number, 0 or more")
    return int(environment[name])


def _checked(launch: Launch) -> Launch:
    if not launch.rank < launch.size:
        raise ValueError(f"the environment makes this rank {launch.rank} of {launch.size}: expected a rank below that")
    return launch
