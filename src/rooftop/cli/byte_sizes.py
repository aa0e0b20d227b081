"""Sizes in bytes as values of options: 2GB, 512MiB, 800000000."""

from __future__ import annotations

import re
from decimal import Decimal

import click

UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}


def byte_size(context: click.Context, option: click.Parameter, text: str | None) -> int | None:
    """Option callback: parse a size of at least one byte; None stays None."""
    if text is None:
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-zA-Z]*)", text.strip())
    size = int(Decimal(found[1]) * UNITS.get(found[2].lower(), 0)) if found is not None else 0
    if size == 0:
        raise click.BadParameter(f"{text!r}: expected a size such as 2GB, 512MiB or 800000000", param=option)
    return size
