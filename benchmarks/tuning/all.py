"""Run all tuners one after another within a time limit.

    python benchmarks/tuning/all.py --out DIRECTORY [--seconds 600] [--only softmaxes losses ...] [--quick]

The script writes FAMILY.json and FAMILY.log for each tuner, even if others fail. A tuner gets a share of the remaining
time, by its number of candidates. Later tuners share the time that it leaves.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
SHARES = {  # tuner: seconds that suit it; tuners run in this order
    "rotary": 20,
    "attentions": 60,
    "matmuls": 80,
    "norms": 60,
    "clusters": 45,
    "softmaxes": 40,
    "losses": 40,
    "reductions": 40,
    "embeddings": 20,
    "elementwise": 30,
    "interpolations": 15,
    "gated": 15,
    "conv_lstms": 100,
    "window_attentions": 110,
    "attention_states": 15,
    "conv_acts": 240,
    "grouped_convs": 60,
    "max_pools": 15,
    "few_rows": 45,
    "sparse_convs": 100,
    "sparse_pools": 60,
    "randoms": 20,
}
GRACE = 30.0  # a tuner is stopped this many seconds after its share, since its last task may take long


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for figures and logs")
    parser.add_argument("--seconds", type=float, default=600.0, help="seconds for all tuners")
    parser.add_argument("--only", nargs="+", choices=SHARES, default=list(SHARES), help="these families")
    parser.add_argument("--quick", action="store_true", help="tiny runs on the CPU, to test the tuners")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + options.seconds
    families = [family for family in SHARES if family in options.only]
    failed = []
    for place, family in enumerate(families):
        left = end - time.monotonic()
        if left < 5 and not options.quick:
            print(f"out of time before {family}", flush=True)
            break
        share = min(left, 1.5 * SHARES[family], left * SHARES[family] / sum(SHARES[name] for name in families[place:]))
        if not _run(family, share, options.out, options.quick):
            failed.append(family)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


def _run(family: str, seconds: float, out: Path, quick: bool) -> bool:
    """Run a tuner with its output in a file, and return whether it succeeded."""
    began = time.monotonic()
    command = [sys.executable, str(HERE / f"{family}.py"), "--out", str(out / f"{family}.json")]
    command += ["--quick"] if quick else ["--seconds", f"{seconds:.0f}"]
    with (out / f"{family}.log").open("w") as log:
        try:
            done = subprocess.run(
                command, stdout=log, stderr=subprocess.STDOUT, timeout=None if quick else seconds + GRACE
            )
            outcome = "done" if done.returncode == 0 else f"exit status {done.returncode}"
        except subprocess.TimeoutExpired:
            outcome = "stopped"
    print(f"{family}: {outcome} after {time.monotonic() - began:.0f} s, see {out / family}.log", flush=True)
    return outcome == "done"


if __name__ == "__main__":
    main()
