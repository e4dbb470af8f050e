"""What a failure is held against: settings of the cpu kernels, from the faults in the tables and their neighbourhood.

A kind is one row of `cases/<module>/faults.toml`; its candidates are that row's knobs and the same fault with other
parameters: tiles of another size, another tile, a shift the other way.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conformance.catalogue.load import read_toml
from conformance.engine.evidence import OF_VALUES

TABLES = Path(__file__).resolve().parents[2] / "cases"
AXES = ("tile_k", "tile_n", "tile_m")
"""knobs that cut an axis; which of them cuts the one that is walked depends on the kernel"""
SMALLEST_TILE, LARGEST_TILE = 8, 256
USUAL = (16, 32, 64, 128, 256)
SIZES = (*USUAL, *(n for n in range(SMALLEST_TILE, LARGEST_TILE + 1, 8) if n not in USUAL))
"""sizes of tiles, the usual ones first"""
PLACES: Mapping[str, tuple[str, ...]] = {
    "drop_tile": ("-1", "0", "1", "-2"), "double_tile": ("0", "-1", "1"), "stale_tile": ("1", "-1", "2"),
    "mask_shift": ("1", "-1", "2", "-2"), "scale_shift": ("1", "-1", "2"), "accumulator": ("bf16", "fp16"),
    "partial": ("bf16", "fp16"), "split_k": ("2", "3", "4", "8"), "nan_to": ("0", "-inf", "inf"),
    "label_lookup": ("tile",),
}
"""knob to what it may be set to instead, where a fault sets it; the others keep the row's own value"""
CUT_BY: Mapping[str, tuple[str, ...]] = {
    "drop_tile": AXES, "double_tile": AXES, "stale_tile": AXES, "drop_tail": AXES, "accumulator": AXES,
    "partial": AXES, "label_lookup": ("tile_m",), "floor_grid": ("tile_m",),
    # of a softmax that walks tiles: what its largest logit so far is, and where its splits are cut
    "softmax_weights": AXES, "no_rescale": AXES, "sum_not_rescaled": AXES, "out_not_rescaled": AXES,
    "weights_cut": AXES, "coarse_exp": AXES, "plain_combine": AXES,
}
"""knob, or value of `fault`, to the tiles whose size changes what it does"""

FAMILIES: Mapping[str, str] = {
    "drop_tail": "left_out", "drop_tile": "left_out",  # the same but where an axis is whole tiles
    "accumulator": "narrow_sum", "partial": "narrow_sum",  # the same where a split is one tile
}
"""kind to what it shares with kinds that few problems tell it from"""


@dataclass(frozen=True)
class Candidate:
    """One setting of the kernels. `rank`: 0 the table's own, 1 usual parameters, 2 unusual ones."""

    kind: str
    """what it shares with the same fault under other parameters: a family"""
    name: str
    """of the row"""
    doc: str
    knobs: str
    rank: int


def kind_of(knobs: str) -> str:
    """Which fault some knobs are, whatever their parameters: the knobs that are no tiles, and the named fault."""
    own = parse(knobs)
    return "+".join(sorted(own[n] if n == "fault" else n for n in own if n not in (*AXES, "split_k"))) or knobs


def family_of(knobs: str) -> str:
    """`kind_of`, and one for kinds that look alike but on a few sizes: what alone is ever certain."""
    kind = kind_of(knobs)
    return FAMILIES.get(kind, kind)


def has_parameters(knobs: str) -> bool:
    """Whether the same fault has other parameters."""
    own = parse(knobs)
    return any(n in PLACES or n in CUT_BY for n in (*own, own.get("fault", "")))


def kinds_of(op: str, table: Mapping[str, Any] | None = None) -> list[Mapping[str, Any]]:
    """The rows of the op's fault table that values can show. Raises ValueError for a malformed table."""
    if table is None:
        path = TABLES / op.partition(".")[0] / "faults.toml"
        table = read_toml(path) if path.exists() else {}
    return [r for r in table.get("fault", ()) if op in r["ops"] and r.get("check", "values") != "rejects"
            and OF_VALUES & set([r["reason"]] if isinstance(r["reason"], str) else r["reason"])]


def candidates(rows: Iterable[Mapping[str, Any]], axes: Sequence[str], tiles: Iterable[int] = (),
               largest: int = LARGEST_TILE) -> list[Candidate]:
    """Every setting of these rows, those that need the least explaining first.

    axes: the tile knobs that change what this op's kernel walks. tiles: sizes that the backend declares.
    largest: the longest axis of the problem; of the tiles that hold all of it only the smallest is tried.
    """
    declared = [t for t in dict.fromkeys(tiles) if t > 0]
    sizes = _distinct([*declared, *(n for n in SIZES if n not in declared)], largest)
    rows = list(rows)
    around = [(row, knobs, rank) for row in rows
              for knobs, rank in _around(parse(row["knobs"]), axes, sizes, {*declared, *USUAL})]
    found: dict[str, Candidate] = {}
    # A setting that several rows are near to has the words of the nearest.
    for row, knobs, rank in sorted(around, key=lambda a: (a[2], _distance(a[0]["knobs"], a[1]))):
        found.setdefault(knobs, Candidate(family_of(row["knobs"]), row["name"], row.get("doc", ""), knobs, rank))
    return list(found.values())


def parse(knobs: str) -> dict[str, str]:
    """`"a=1,b=2"` by name."""
    return dict(pair.split("=", 1) for pair in knobs.split(",") if pair)


def text(knobs: Mapping[str, str]) -> str:
    """The inverse of `parse`."""
    return ",".join(f"{k}={v}" for k, v in knobs.items())


def twin(knobs: str) -> str:
    """The setting that does the same unless an axis is whole tiles: a dropped tail of a dropped last tile, and back.

    Empty where there is none.
    """
    own = parse(knobs)
    if "drop_tail" in own:
        return text({**{k: v for k, v in own.items() if k != "drop_tail"}, "drop_tile": "-1"})
    if "drop_tile" in own:
        return text({**{k: v for k, v in own.items() if k != "drop_tile"}, "drop_tail": "yes"})
    return ""


def clipped(knobs: str, reach: Mapping[str, int]) -> str:
    """The same for all knobs whose tiles hold a whole axis. reach: by axis the smallest tile that does."""
    return text({k: str(min(int(v), max(reach[k], 1))) if k in reach else v for k, v in parse(knobs).items()})


def _distance(row: str, knobs: str) -> int:
    """How many knobs differ."""
    a, b = parse(row), parse(knobs)
    return sum(a.get(n) != b.get(n) for n in {*a, *b})


def _distinct(sizes: Sequence[int], largest: int) -> list[int]:
    whole = min((n for n in sizes if n >= largest), default=0)
    return [n for n in sizes if n < largest or n == whole]


def _around(own: dict[str, str], axes: Sequence[str], sizes: Sequence[int], usual: set[int]) -> Iterator[
        tuple[str, int]]:
    yield text(own), 0
    moved = [name for name in own if name in PLACES]
    # A value of its own stands first, so that what the table says comes before what it does not.
    places = [list(dict.fromkeys((own[name], *PLACES[name]))) for name in moved]
    cut = dict.fromkeys(a for key in (*own, own.get("fault", "")) for a in CUT_BY.get(key, ())
                        if a in axes or CUT_BY[key] != AXES)
    for values in itertools.product(*places):
        here = {**own, **dict(zip(moved, values, strict=True))}
        yield text(here), 1
        # A tile that a row names may be far smaller than one that holds all there is.
        yield text({k: v for k, v in here.items() if k not in AXES}), 1
        for axis, n in itertools.product(cut, sizes):
            yield text({**here, axis: str(n)}), 1 if n in usual else 2
