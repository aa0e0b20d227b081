"""Show a finished analysis as a table, JSON and HTML."""

from __future__ import annotations

import html
import json
import math
import os
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass
from itertools import chain
from typing import Any

from rooftop.analysis.formats import time_text
from rooftop.analysis.ranks.merging import Ranks
from rooftop.analysis.report_contents import (
    Advice,
    Compilation,
    Gaps,
    GraphBreak,
    ModuleNode,
    OperatorRow,
    Recompilation,
    ReportContents,
    Summary,
)
from rooftop.errors import MissingExtraError
from rooftop.hardware.ceilings import Ceilings
from rooftop.user_paths import user_path
from rooftop.whole_files import write_whole

FORMAT = 1


@dataclass(frozen=True, repr=False)
class Report(ReportContents):
    """The result of `rooftop.analyze`, which can be shown as a table, JSON and HTML. A report has the attributes of
    `ReportContents`."""

    def table(self, rows: int = 12) -> str:
        """The summary, the opportunities and the `rows` slowest operators as text.

        Raises:
            ValueError: `rows` is negative.
        """
        if rows < 0:
            raise ValueError(f"table(rows={rows}): expected 0 or more")
        from rooftop.analysis.text import render_text  # rich takes a while to import

        return render_text(self, rows)

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts, lists, strings and numbers: the JSON form."""
        plain: dict[str, Any] = {"format": FORMAT, **asdict(self)}
        plain["summary"]["percent_of_roof"] = self.summary.percent_of_roof
        plain["summary"]["percent_interval"] = list(self.summary.percent_interval)
        plain["pace"] = self.pace
        plain["memory"] = {"peak_bytes": plain.pop("peak_bytes"), "timeline": [list(p) for p in self.memory]}
        plain["ranks"] = self.ranks.to_dict() if self.ranks is not None else None
        plain["ops"] = [_operator_dict(row, self.predicted) for row in self.ops]
        plain["modules"] = _module_dict(self.modules)
        plain["uncovered"] = [
            {"name": row.name, "calls": row.calls, "measured_ms": row.measured_ms, "reason": row.uncovered}
            for row in self.uncovered
        ]
        return plain

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Report:
        """Read the report from the result of `to_dict`.

        Raises:
            ValueError: the data are not a report, or have another format version.
        """
        if "levels" in plain and "flops" in plain:
            raise ValueError(
                "the data are the ceilings of a machine, expected a report: `rooftop analyze --json FILE` writes one"
            )
        if "format" not in plain:
            raise ValueError("the data are no report: `rooftop analyze --json FILE` writes one")
        if plain["format"] != FORMAT:
            raise ValueError(f"expected a rooftop report of format {FORMAT}, got format {plain['format']!r}")
        try:
            later = {"memory", "peak_bytes", "compilation", "predicted", "ranks"}
            values = {name: plain[name] for name in cls.__dataclass_fields__ if name not in later}
            values["inputs"], values["notes"] = tuple(plain["inputs"]), tuple(plain["notes"])
            for text in (plain["target"], plain["mode"], plain["created"], plain["device"]["name"]):
                _text("target, mode, created or device", text)
            for text in (*values["inputs"], *values["notes"]):
                _text("an input or a note", text)
            values["summary"] = _from(Summary, plain["summary"])
            if values["summary"].wall_ms <= 0:
                raise ValueError(
                    f"damaged rooftop report: wall_ms is {values['summary'].wall_ms}, expected more than 0"
                )
            _number("coverage", plain["coverage"])
            values["device"] = {"name": plain["device"]["name"], **plain["device"]}
            values["versions"] = dict(plain["versions"])
            Ceilings.from_dict(plain["ceilings"])
            values["gaps"] = _from(Gaps, plain["gaps"])
            values["ops"] = tuple(_operator(row) for row in plain["ops"])
            values["modules"] = _module(plain["modules"])
            values["advice"] = tuple(_from(Advice, item) for item in plain["advice"])
            values["memory"] = tuple((ms, size) for ms, size in plain["memory"]["timeline"])
            for number in (*chain.from_iterable(values["memory"]), plain["memory"]["peak_bytes"]):
                _number("memory", number)
            values["compilation"] = _compilation(plain.get("compilation"))
            values["ranks"] = Ranks.from_dict(plain["ranks"]) if plain.get("ranks") else None
            values["predicted"] = bool(plain.get("predicted", False))
            return cls(**values, peak_bytes=plain["memory"]["peak_bytes"])
        except (KeyError, TypeError, OverflowError) as error:
            raise ValueError(f"damaged rooftop report: {type(error).__name__} {error}") from error

    def to_json(self, path: str | os.PathLike[str]) -> None:
        """Write the JSON form."""
        write_whole(user_path(path), json.dumps(self.to_dict(), indent=1) + "\n")

    @classmethod
    def from_json(cls, path: str | os.PathLike[str]) -> Report:
        """Read what `to_json` wrote.

        Raises:
            OSError: the file cannot be read.
            ValueError: the file is not a report.
        """
        try:
            plain = json.loads(user_path(path).read_text(encoding="utf-8"))
            if not isinstance(plain, dict):
                raise ValueError(f"expected an object, got {type(plain).__name__}")
            return cls.from_dict(plain)
        except (ValueError, RecursionError) as error:  # JSONDecodeError and UnicodeDecodeError are ValueErrors
            raise ValueError(f"{os.fspath(path)} is not a rooftop report: {error}") from error

    def to_html(self, path: str | os.PathLike[str]) -> None:
        """Write the report as one self-contained HTML page.

        Raises:
            MissingExtraError: plotly is not installed.
        """
        from rooftop.analysis.page import render_page  # jinja2 takes a while to import

        write_whole(user_path(path), render_page(self.to_dict()))

    def __repr__(self) -> str:
        share = "predicted" if self.predicted else f"{self.summary.percent_of_roof:.1f}% of roof"
        return f"<Report of {self.target} {self.mode}: {time_text(self.summary.wall_ms)}, {share}>"

    def _repr_html_(self) -> str:
        """The report in a notebook: the HTML page in a separate frame, or the table if plotly is not installed.

        The frame is sandboxed: its scripts run but cannot reach the notebook, whatever a report contains.
        """
        from rooftop.analysis.page import render_page

        try:
            page = render_page(self.to_dict())
        except MissingExtraError:
            return f"<pre>{html.escape(self.table())}</pre>"
        style = "width: 100%; height: 48rem; border: 1px solid #8884"
        # an attribute needs only these escapes; html.escape would add 1 MB
        source = page.replace("&", "&amp;").replace('"', "&quot;")
        return f'<iframe title="Rooftop report" sandbox="allow-scripts" srcdoc="{source}" style="{style}"></iframe>'


def _operator_dict(row: OperatorRow, predicted: bool) -> dict[str, Any]:
    plain = asdict(row)
    plain["shapes"] = [list(shape) for shape in row.shapes]
    plain["percent_of_roof"] = None if predicted else row.percent_of_roof
    if row.flagged and not predicted:
        plain["flagged"] = True
    return plain


def _module_dict(node: ModuleNode) -> dict[str, Any]:
    plain = {name: getattr(node, name) for name in ModuleNode.__dataclass_fields__ if name != "children"}
    return {
        **plain,
        "percent_of_roof": node.percent_of_roof,
        "children": [_module_dict(child) for child in node.children],
    }


def _operator(plain: Mapping[str, Any]) -> OperatorRow:
    row = {**plain, "shapes": tuple(tuple(shape) for shape in plain["shapes"])}
    row["modules"], row["kernels"] = tuple(plain["modules"]), tuple(plain["kernels"])
    return _from(OperatorRow, row)


def _module(plain: Mapping[str, Any]) -> ModuleNode:
    return _from(ModuleNode, {**plain, "children": tuple(_module(child) for child in plain["children"])})


def _compilation(plain: Mapping[str, Any] | None) -> Compilation | None:
    if plain is None:
        return None
    breaks = tuple(_from(GraphBreak, item) for item in plain["graph_breaks"])
    again = tuple(_from(Recompilation, item) for item in plain["recompilations"])
    compilation: Compilation = _from(Compilation, {**plain, "graph_breaks": breaks, "recompilations": again})
    return compilation


def _from(kind: Any, plain: Mapping[str, Any]) -> Any:
    """A dataclass from a dict. The dict may also hold derived properties, and may lack fields that have a default.

    Raises:
        KeyError, TypeError: a field is missing, or a value that should be a number or a text is not.
    """
    given = {}
    for name, declared in kind.__dataclass_fields__.items():
        if name not in plain and declared.default is not MISSING:
            continue
        given[name] = plain[name]
        optional = declared.type in ("int | None", "float | None")
        if declared.type in ("int", "float") or (optional and plain[name] is not None):
            _number(name, plain[name])
        if declared.type == "str":
            _text(name, plain[name])
    return kind(**given)


def _number(name: str, value: Any) -> None:
    if not isinstance(value, (int, float)) or not math.isfinite(value):
        raise TypeError(f"{name} is {value!r}, expected a finite number")


def _text(name: str, value: Any) -> None:
    if not isinstance(value, str):
        raise TypeError(f"{name} is {value!r}, expected a text")
