"""Import pyarrow, which reads and writes Parquet. No other file of this package imports pyarrow."""

from __future__ import annotations

from types import ModuleType

from rooftop.errors import MissingExtraError


def load_arrow() -> ModuleType:
    """Return the module `pyarrow`, with `pyarrow.parquet` loaded.

    Raises:
        MissingExtraError: pyarrow is not installed.
    """
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise MissingExtraError('writing results as Parquet needs pyarrow: pip install "rooftop[cluster]"') from error
    module: ModuleType = pyarrow
    return module
