"""What DeepGEMM promises not to matter."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from cases.deepgemm import groups, scales
from cases.promises import rows_alone
from conformance.declare import Relation, When
from conformance.engine.arrays import Draw, array_seed
from conformance.model import Problem
from references.formats import codec

Codes = dict[str, np.ndarray]

DETERMINISTIC = "deterministic_algorithms"
"""setting of the module: without it other libraries may serve a call, and a row may depend on how many there are"""


def rows_alone_if_deterministic(**kw: Any) -> Relation:
    """`cases.promises.rows_alone`, promised under the deterministic setting only."""
    plain = rows_alone("m", **kw)

    def compare(problem: Problem, first: Codes, alone: Codes) -> dict[str, Any]:
        return plain.compare(problem, first, alone) if problem.values[DETERMINISTIC] else {}

    return replace(plain, compare=compare)


def _recipe_in_parts(problem: Problem, codes: Codes) -> tuple[Problem, Codes]:
    gran_m, gran_n, gran_k = scales.granularity(problem)
    parts = {"recipe": None, "recipe_a": (gran_m, gran_k), "recipe_b": (gran_n, gran_k)}
    return replace(problem, values={**problem.values, **parts}), codes


def _same_d(problem: Problem, first: Codes, second: Codes) -> dict[str, Any]:
    return {"d": codec.bits(first["d"]) != codec.bits(second["d"])}


RECIPE_IN_PARTS = Relation(
    "recipe_in_parts", "the recipe of each operand given apart is the same as both in one", _recipe_in_parts, _same_d)


def _first_blocks(problem: Problem, codes: Codes) -> tuple[Problem, Codes]:
    kept = max(1, problem.blocks // 2)
    rows = kept * problem.values[groups.ALIGNMENT]
    cut = {"a": codes["a"][:rows], "b": codes["b"], "grouped_layout": codes["grouped_layout"][:rows]}
    return replace(problem, sizes={**problem.sizes, "blocks": kept}), cut


def _same_rows(problem: Problem, first: Codes, alone: Codes) -> dict[str, Any]:
    """Of rows that belong to a group; what stands in padding is not promised."""
    name, m = "grouped_layout", len(alone["d"])
    owned = groups.labels(Draw(name, 0, (groups.rows(problem),), "int32", problem, array_seed(problem, name))) >= 0
    return {"d": (codec.bits(first["d"][:m]) != codec.bits(alone["d"])) & owned[:m, None]}


GROUPS_ALONE = Relation(
    "batch_invariant_m", "rows do not depend on how many blocks of rows there are", _first_blocks, _same_rows,
    When(layout="labels"))
