"""In which order cases tell most: spread over ops, checks and what variants differ in, the plainest first.

Whoever stops early, by a budget or by patience, has then seen a bit of everything.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from conformance.model import Case

TURNS = ("values", "memory", "values", "rejects", "values", "degenerate", "values", "layout", "repeat", "values",
         "invariance", "laws", "compile")
"""whose turn it is among the cases of one op, round and round; a check that has no case left is left out"""


def most_telling(cases: Iterable[Case]) -> list[Case]:
    """All of the cases, round by round: one of every op, modules in turn, before the second of any."""
    queues: dict[str, list[Case]] = defaultdict(list)
    for case in cases:
        queues[case.op.name].append(case)
    ops = modules_in_turn({name: q[0].op.module for name, q in queues.items()})
    ordered = {name: one_op(queues[name]) for name in ops}
    longest = max(map(len, ordered.values()), default=0)
    return [ordered[name][i] for i in range(longest) for name in ops if i < len(ordered[name])]


def modules_in_turn(module_of: dict[str, str]) -> list[str]:
    """Names with the first of every module first, then the second of every module."""
    seen: dict[str, int] = defaultdict(int)
    place = {}
    for name, module in module_of.items():
        place[name] = seen[module]
        seen[module] += 1
    return sorted(module_of, key=lambda name: place[name])


def one_op(cases: list[Case]) -> list[Case]:
    """The cases of one op, checks in turn."""
    by_check: dict[str, list[Case]] = defaultdict(list)
    for case in cases:
        by_check[case.check].append(case)
    queues = {check: newest_first(mine)[::-1] for check, mine in by_check.items()}
    out: list[Case] = []
    while len(out) < len(cases):
        before = len(out)
        for check in TURNS:
            if queues.get(check):
                out.append(queues[check].pop())
        if len(out) == before:  # checks that have no turn of their own
            out.extend(q.pop() for q in queues.values() if q)
    return out


def newest_first(cases: list[Case]) -> list[Case]:
    """The first case, then always the one with most settings of variant keys that none before it had."""
    left = list(cases)
    seen: set[tuple[str, str]] = set()
    out = []
    while left:
        fresh = [len(set(dict(c.variant).items()) - seen) for c in left]
        if not any(fresh):
            return out + left
        best = left.pop(fresh.index(max(fresh)) if out else 0)
        seen |= set(dict(best.variant).items())
        out.append(best)
    return out
