"""Write the tables of the pages in docs/ and docs/measurements/ from the figures under benchmarks/results/.

    python benchmarks/kernels/tables.py [--check]

The script generates the text between `<!-- figures: NAME.json -->` and `<!-- end of figures -->` from that file.
`NAME.json` has the figures of the H200, `cpu/NAME.json` those of a CPU. The tables show both directions side by side,
Rooftop's column in bold, and the roof and the peers of the same run. `<!-- figures: overview -->` is one table with a
few rows from each of the files that `OVERVIEW` names. People write the text outside the markers. `--check` writes
nothing and fails if a page is not up to date.

`<!-- figures: NAME.json what=sizes name=a,b -->` shows only the rows that have one of the values under each key.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PAGES = tuple(sorted((ROOT / "docs").rglob("*.md")))
RESULTS = ROOT / "benchmarks" / "results" / "h200"
MARKED = re.compile(
    r"(<!-- figures: ((?:cpu/)?\w+\.json|overview)((?: \S+=\S+)*) -->\n).*?(<!-- end of figures -->)", re.DOTALL
)
COMMANDS = {  # the commands that write a file, where it is not the script of the same name under kernels/
    "log_softmaxes.json": "kernels/softmaxes.py --operators log_softmax",
    "rms_norms.json": "kernels/norms.py --norm rms_norm",
    "add_layer_norms.json": "kernels/norms.py --norm add_layer_norm",
    "add_rms_norms.json": "kernels/norms.py --norm add_rms_norm",
    "sparse.json": "sparse.py",
    "models.json": "models.py",
    "scene.json": "scene.py",
    "mat.json": "mat.py",
    "media.json": "media.py",
}
OURS = (
    *("rooftop", "cuda", "twin", "rooftop, compiled", "rooftop, replayed"),
    *("rooftop, bounded", "rooftop, bounded, replayed", "rooftop, autocast"),
)
FIGURES = ("graph", "rates", "eager")  # keys of a row's figures, in order of preference
NOT_SHOWN = {*FIGURES, "unit", "roof", "op_roof", "direction", "plan", "chosen", "peak_mib"}
NOT_SHOWN |= {"goal_ms", "spread", "apart", "absent"}
WORDS = ("operator", "kind", "expression", "surface", "model", "work")  # keys whose values are not numbers
UNKNOWN = "-"
BOLD = "Bold figures are Rooftop's, even where a peer is faster."
DIGITS = ((100, 0), (10, 1), (0.1, 2), (0, 4))  # (smallest number, digits after the decimal point)

Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a page is not up to date")
    options = parser.parse_args()
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        filled = with_figures(text, RESULTS)
        if filled == text:
            continue
        if options.check:
            sys.exit(f"{page.relative_to(ROOT)} does not match the figures: python benchmarks/kernels/tables.py")
        page.write_text(filled, encoding="utf-8")


def with_figures(page: str, results: Path) -> str:
    """The page, with the text between its markers regenerated."""

    def filled(found: re.Match[str]) -> str:
        folder = results.parent if found[2].startswith("cpu/") else results
        made = overview(results) if found[2] == "overview" else section(folder / found[2], found[3].split())
        return f"{found[1]}\n{made}\n\n{found[4]}"

    return MARKED.sub(filled, page)


def section(path: Path, chosen: Sequence[str] = ()) -> str:
    """The tables for the chosen rows of a file of figures, or, if the file does not exist, the command that creates
    it."""
    if not path.is_file():
        script = COMMANDS.get(path.name, f"kernels/{path.stem}.py")
        folder = "cpu" if path.parent.name == "cpu" else "h200"
        return f"No figures yet: `python benchmarks/{script} --out benchmarks/results/{folder}/{path.name}`."
    found = {name: rows_of(value, chosen) for name, value in json.loads(path.read_text(encoding="utf-8")).items()}
    if path.name == "tune_clusters.json":
        return f"{clusters(found['rows'])}\n\n`benchmarks/results/h200/{path.name}`, {found['device']}."
    device = found.get("environment", {}).get("device", "NVIDIA H200")
    if path.name == "models.json":
        return f"{models(found['rows'])}\n\n`benchmarks/results/h200/{path.name}`, {device}. {BOLD}"
    if path.name == "scene.json":
        return f"{scenes(found['rows'])}\n\n`benchmarks/results/h200/{path.name}`, {device}. {BOLD}"
    if path.parent.name == "cpu":
        tables = relative_times(found["rows"]) if path.name == "mat.json" else relative_rates(found["results"])
        return f"{tables}\n\n`benchmarks/results/cpu/{path.name}`, {device}, {found['threads']} threads.\n{BOLD}"
    if path.name == "mat.json":
        return f"{arrays(found['rows'])}\n\n`benchmarks/results/h200/{path.name}`, {device}. {BOLD}"
    if path.name.startswith("media"):
        return f"{videos(found['results'])}\n\n`benchmarks/results/h200/{path.name}`, {device}. {BOLD}"
    tables = []
    for rows in found.values():
        if isinstance(rows, list) and rows and isinstance(rows[0], dict) and set(rows[0]) & set(FIGURES):
            tables += [table(name, group, found) for name, group in groups(rows)]
    source = f"`benchmarks/results/h200/{path.name}`, {device}. {BOLD}"
    return "\n\n".join([*tables, source])


def rows_of(value: Any, chosen: Sequence[str]) -> Any:
    """Choose rows of each list: "key=a,b" chooses rows whose key is a or b. Values that are not lists are returned
    unchanged."""
    if not isinstance(value, list) or not all(isinstance(row, dict) for row in value):
        return value
    wanted = [(key, values.split(",")) for key, values in (each.split("=") for each in chosen)]
    return [row for row in value if all(str(row.get(key)) in values for key, values in wanted)]


class Line(NamedTuple):
    """Rows of one file that the overview shows.

    Attributes:
        operator: its name on the page.
        size: the size of its inputs.
        file: the file's name without its suffix.
        has: the required values of a row, by key; None: the row must not have that key.
        direction: the direction to show for rows without the key "direction".
    """

    operator: str
    size: str
    file: str
    has: Row
    direction: str = "forward"


OVERVIEW = (
    Line("layer_norm", "131072x1024", "norms", {"columns": 1024}),
    Line("layer_norm", "51602x2601", "norms", {"columns": 2601}),
    Line("add_rms_norm", "32768x4096", "add_rms_norms", {"columns": 4096}),
    Line("softmax", "262144x1024", "softmaxes", {"operator": "softmax", "columns": 1024}),
    Line("softmax", "2092x128256", "softmaxes", {"operator": "softmax", "columns": 128256}),
    Line("cross_entropy", "8192x128256", "losses", {"classes": 128256, "features": None}, "both"),
    Line("linear_cross_entropy", "8192x50257x768", "losses", {"classes": 50257, "features": 768}, "both"),
    Line("linear_act", "4096x4096x4096", "matmuls", {"shape": [4096] * 3, "activation": "gelu", "backward": False}),
    Line("linear_act", "4096x4096x4095", "matmuls", {"shape": [4096, 4096, 4095]}),
    Line("rope", "8x32x4096x128", "transformers", {"operator": "rope", "batch": 8}),
    Line("swiglu", "32768x4096", "transformers", {"operator": "swiglu", "rows": 32768}),
    Line("sum", "268435456", "reductions", {"operator": "sum", "shape": [268435456]}),
    Line("argmax", "1024x128256", "reductions", {"operator": "argmax"}),
    Line("fused", "134217728", "elementwise", {"expression": "gated"}),
)
OVERVIEW_COLUMNS = ("rooftop", "torch", "compile", "liger")


def overview(results: Path) -> str:
    """One line for each operator, size and direction of `OVERVIEW`.

    Raises:
        ValueError: a file has no such row.
    """
    lines = [["operator", "size", "roof", *OVERVIEW_COLUMNS], ["---", "---", *["---:"] * 5]]
    for operator, size, file, has, direction in OVERVIEW:
        found = json.loads((results / f"{file}.json").read_text(encoding="utf-8"))
        of_lists = [row for rows in found.values() if isinstance(rows, list) for row in rows if isinstance(row, dict)]
        rows = [row for row in of_lists if all(row.get(key) == value for key, value in has.items())]
        if not rows:
            raise ValueError(f"{file}.json has no row with {has}")
        for row in rows:
            rates = figures(row)
            ours, *peers = (number(rates.get(name)) for name in OVERVIEW_COLUMNS)
            unit = row.get("unit", found.get("unit"))
            what = [f"`{operator}` {row.get('direction', direction)}, {unit}", size, number(row["roof"])]
            lines.append([*what, f"**{ours}**", *peers])
    return "\n".join([*(f"| {' | '.join(line)} |" for line in lines), "", BOLD])


def clusters(rows: list[Row]) -> str:
    """One line for each size: the fastest clusters of each kernel, Triton's kernel and torch."""
    kernels = {"FORWARD": "softmax", "BACKWARD": "its backward", "FUSED": "fused cross entropy"}
    found: dict[int, dict[str, list[float]]] = {}
    for row in rows:
        name, columns = row["task"].removeprefix("CLUSTER_").split()
        others = [row["rates"].pop("Triton"), row["rates"].pop("torch")]
        found.setdefault(int(columns), {})[name] = [max(row["rates"].values()), *others]
    head = ["columns", *(each for name in kernels.values() for each in (f"{name}: clusters", "Triton", "torch"))]
    lines = [head, ["---:"] * len(head)]
    for columns, rates in sorted(found.items()):
        cells = [str(columns)]
        for name in kernels:
            three = rates.get(name, [])
            cells += [f"**{number(rate)}**" if rate == max(three) else number(rate) for rate in three] or [UNKNOWN] * 3
        lines.append(cells)
    return "\n".join(["In TB/s:", "", *(f"| {' | '.join(line)} |" for line in lines)])


def models(rows: list[Row]) -> str:
    """One line for each case: Rooftop called eagerly, in the engine's graphs, and replayed, and the fastest peer."""
    replayed, in_graphs = ", replayed", "rooftop, graphs of the engine"
    heads = ["case", "roof", "rooftop without graphs", "in the engine's graphs", "replayed"]
    heads += ["fastest peer", "called", "replayed"]
    lines = [heads, ["---" if head in ("case", "fastest peer") else "---:" for head in heads]]
    for case in dict.fromkeys(row["case"] for row in rows):
        measured = {row["variant"]: row for row in rows if row["case"] == case and row.get("ms")}
        times = {name: row["ms"] for name, row in measured.items()}
        ours = [times.get(name) for name in ("rooftop", in_graphs, f"rooftop{replayed}")]
        peers = sorted((time, name) for name, time in times.items() if not name.startswith("rooftop"))
        peer = peers[0][1].removesuffix(replayed) if peers else UNKNOWN
        theirs = [times.get(peer), times.get(f"{peer}{replayed}")]
        figures_ = [number(time) for time in (*ours, *theirs)]
        figures_[:3] = [each if each == UNKNOWN else f"**{each}**" for each in figures_[:3]]
        roof = number(next(iter(measured.values()))["roof_ms"])
        lines.append([case, roof, *figures_[:3], peer, *figures_[3:]])
    return "\n".join(["In ms:", "", *(f"| {' | '.join(line)} |" for line in lines)])


DRAWING = ("instance_cull", "cull", "sort", "rasterize", "hzb")  # stages that fill the visibility buffer


def scenes(rows: list[Row]) -> str:
    """Frame times compared with drawing all triangles, of finer meshes in the same view, of several views at once, and
    of a single mesh."""
    named = {what: [row for row in rows if row["what"] == what] for what in dict.fromkeys(row["what"] for row in rows)}
    tables = []
    for frame in named.get("frame", []):
        frame["drawing"] = sum(frame["stage_ms"][stage] for stage in DRAWING)
    if "frame" in named:
        heads = ["triangles", "picture", "drawn", "culled and rasterized", "depth", "G-buffer"]
        lines = [[*heads, "in Warp: depth", "G-buffer", "every triangle", "to depth"]]
        for brute in named["brute force"]:
            warp, ours = (
                next(row for row in named["frame"] if row["kernels"] == kernels and same_case(row, brute))
                for kernels in ("warp", "cuda")
            )
            times = [f"**{number(ours[key])}**" for key in ("drawing", "depth_ms", "g_buffer_ms")]
            times += [number(warp[key]) for key in ("depth_ms", "g_buffer_ms")]
            lines.append([*case_of(ours), *times, number(brute["ms"]), f"{brute['ms'] / ours['depth_ms']:.1f} x"])
        tables.append(lines)
    for what, first in (("finer", "triangles"), ("cameras", "cameras"), ("hills", "by")):
        if what in named:
            lines = [[first, "picture", "drawn", "depth", "G-buffer"]]
            for row in named[what]:
                times = [number(row[key]) if key in row else UNKNOWN for key in ("depth_ms", "g_buffer_ms")]
                lines.append([*case_of(row, first), *times])
            tables.append(lines)
    return "\n\n".join("\n".join(f"| {' | '.join(line)} |" for line in ruled(lines)) for lines in tables)


def arrays(rows: list[Row]) -> str:
    """Operations of Mats on a GPU, in TB/s of the bytes that must move. Masked copies are in ms, since the mask decides
    how many bytes move."""
    lines = [["operation", "images of", "roof", "rooftop", "torch", "torch.compile"]]
    masked = [["operation", "images of", "rooftop", "torch", "torch.compile"]]
    for row in rows:
        if row["operation"] == "masked":
            ours, *theirs = (f"{row['ms'][name]:.3f}" for name in ("rooftop", "torch", "compile"))
            masked.append([*operation_of(row), f"**{ours}**", *theirs])
            continue
        rates = row["tb_per_s"]
        ours = f"**{number(rates['rooftop'])}**"
        lines.append(
            [*operation_of(row), number(row["roof_tb_per_s"]), ours, *(number(rates[n]) for n in ("torch", "compile"))]
        )
    tables = [in_a_table("In TB/s:", lines)]
    if len(masked) > 1:
        tables.append(in_a_table("In ms:", masked))
    return "\n\n".join(tables)


def relative_times(rows: list[Row]) -> str:
    """Times of operations of Mats on a CPU, relative to OpenCV's."""
    lines = [["operation", "images of", "rooftop", "torch"]]
    for row in rows:
        times = [row["ms"][name] / row["ms"]["opencv"] for name in ("rooftop", "torch")]
        lines.append([*operation_of(row), f"**{times[0]:.2f}**", f"{times[1]:.1f}"])
    return in_a_table("Time relative to OpenCV's (less is better):", lines)


def operation_of(row: Row) -> list[str]:
    return [row["operation"], row["dtype"] + (", regions" if row["region"] else "")]


def relative_rates(rows: list[Row]) -> str:
    """Frames a second of video readers on a CPU, relative to OpenCV's."""
    lines = [["video", "rooftop: rgb", "input", "torchcodec: rgb", "PyAV, not converted"]]
    for row in rows:
        rates = row["frames_per_s"]
        names = (
            "rooftop, CPU, rgb",
            "rooftop, CPU, input",
            "torchcodec, CPU, rgb",
            "PyAV, frames in the host's memory",
        )
        shares = [rates[name] / rates["OpenCV, bgr in the host's memory"] if name in rates else None for name in names]
        cells = [UNKNOWN if share is None else f"{share:.2f}" for share in shares]
        lines.append([row["name"], *(f"**{cell}**" for cell in cells[:2]), *cells[2:]])
    return in_a_table("Frames a second relative to OpenCV's (more is better):", lines)


def in_a_table(says: str, lines: list[list[str]]) -> str:
    return "\n".join([says, "", *(f"| {' | '.join(line)} |" for line in ruled(lines))])


READERS = (  # (column head, variant)
    ("NVDEC: rgb", "rooftop, NVDEC, rgb"),
    ("input", "rooftop, NVDEC, input"),
    ("CPU: rgb", "rooftop, CPU, rgb"),
    ("PyNvVideoCodec: rgb", "PyNvVideoCodec threaded, rgb"),
    ("input", "PyNvVideoCodec threaded, input"),
    ("torchcodec, NVDEC: rgb", "torchcodec, CUDA, rgb"),
    ("torchcodec, CPU: rgb", "torchcodec, CPU, rgb"),
    ("PyAV, not converted", "PyAV, frames in the host's memory"),
    ("OpenCV, on the host", "OpenCV, bgr in the host's memory"),
)


def videos(rows: list[Row]) -> str:
    """Frames a second: one reader of each video, and several readers of one video at once."""
    tables = []
    if alone := [row for row in rows if row["what"] == "sizes"]:
        lines = [["video", *(head for head, _ in READERS)]]
        for row in alone:
            rates = [number(row["frames_per_s"].get(variant)) for _, variant in READERS]
            lines.append([row["name"], *(f"**{each}**" for each in rates[:3]), *rates[3:]])
        tables.append(lines)
    if together := [row for row in rows if row["what"] == "streams"]:
        variants = list(together[0]["frames_per_s"])
        lines = [["streams", *variants]]
        for row in together:
            lines.append([str(row["streams"]), *(number(row["frames_per_s"][variant]) for variant in variants)])
        tables.append(lines)
    if steps := [row for row in rows if row["what"] == "training" and "both_on_default_stream_ms" in row]:
        lines = [["video", "a step alone, ms", "its clips alone", "both", "both on the default stream"]]
        for row in steps:
            keys = ("step_ms", "clips_ms", "both_ms", "both_on_default_stream_ms")
            lines.append([row["name"], *(number(row[key]) for key in keys)])
        tables.append(lines)
    return "\n\n".join("\n".join(f"| {' | '.join(line)} |" for line in ruled(lines)) for lines in tables)


def same_case(a: Row, b: Row) -> bool:
    return a["triangles"] == b["triangles"] and a["size"] == b["size"]


def case_of(row: Row, key: str = "triangles") -> list[str]:
    """The first columns of a case: the count, the size of the picture, and the number of drawn triangles."""
    counted = row[key] if isinstance(row[key], str) else amount(row[key])
    return [counted, " x ".join(map(str, row["size"])), amount(row["drawn"]["triangles"]) if "drawn" in row else "all"]


def amount(count: int) -> str:
    """A count with a suffix, such as 10.0 G, 250 M or 64."""
    for unit, name in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if count >= unit:
            return f"{count / unit:.{1 if count < 100 * unit else 0}f}{name}"
    return str(count)


def ruled(lines: list[list[str]]) -> list[list[str]]:
    """The lines of a Markdown table, with a rule below the heads."""
    return [lines[0], ["---:"] * len(lines[0]), *lines[1:]]


def groups(rows: list[Row]) -> Iterator[tuple[str, list[Row]]]:
    """Group rows that have the same keys. Each group has its operator's name, or "" if its rows have several
    operators."""
    kinds: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        kinds.setdefault(described_by(row), []).append(row)
    for group in kinds.values():
        operators = {row.get("operator", row.get("block", "")) for row in group}
        yield operators.pop() if len(operators) == 1 else "", group


def described_by(row: Row) -> tuple[str, ...]:
    return tuple(key for key in row if key not in NOT_SHOWN)


def table(name: str, rows: list[Row], file: Row) -> str:
    """One line for each size, with the figures of the directions side by side."""
    keys = [key for key in described_by(rows[0]) if not (name and key in ("operator", "block"))]
    directions = list(dict.fromkeys(row.get("direction", "") for row in rows))
    variants = ours_first(list(dict.fromkeys(name for row in rows for name in figures(row))))
    sizes: dict[str, dict[str, Row]] = {}
    for row in rows:
        sizes.setdefault(json.dumps([row[key] for key in keys]), {})[row.get("direction", "")] = row
    of_direction = ["roof", *variants]
    first = [f"{direction}: {of_direction[0]}" if direction else of_direction[0] for direction in directions]
    head = [*keys, *(each for begin in first for each in (begin, *variants))]
    lines = [head, ["---" if each in WORDS else "---:" for each in head]]
    for described in sizes.values():
        any_row = next(iter(described.values()))
        cells = [as_read(any_row[key]) for key in keys]
        for direction in directions:
            row = described.get(direction)
            cells += [UNKNOWN] * len(of_direction) if row is None else [number(row.get("roof")), *shown(row, variants)]
        lines.append(cells)
    unit = rows[0].get("unit", file.get("unit", ""))
    caption = f"`{name}`, {unit}:" if name else f"In {unit}:"
    return "\n".join([caption, "", *(f"| {' | '.join(line)} |" for line in lines)])


def figures(row: Row) -> dict[str, float]:
    return next((row[key] for key in FIGURES if row.get(key)), {})


def ours_first(names: list[str]) -> list[str]:
    return sorted(names, key=lambda name: OURS.index(name) if name in OURS else len(OURS))


def shown(row: Row, variants: list[str]) -> list[str]:
    found = figures(row)
    cells = [number(found.get(name)) for name in variants]
    return [
        f"**{cell}**" if name in OURS and cell != UNKNOWN else cell for name, cell in zip(variants, cells, strict=True)
    ]


def number(value: float | None) -> str:
    """The number, rounded to about three digits."""
    if value is None:
        return UNKNOWN
    digits = next(digits for least, digits in DIGITS if value >= least)
    return f"{value:,.{digits}f}"


def as_read(value: Any) -> str:
    """A size in readable form."""
    if isinstance(value, list):
        return " x ".join(map(as_read, value))
    if isinstance(value, bool):
        return "yes" if value else "no"
    return UNKNOWN if value is None else str(value)


if __name__ == "__main__":
    main()
