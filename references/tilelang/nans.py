"""What a maximum or minimum makes of NaN: a rule of the profile, the same for every order of the operands."""

from __future__ import annotations

from dataclasses import dataclass

from references.expected import Array, Expected, Judgement


@dataclass(frozen=True)
class OneRule(Expected):
    """All elements follow the first rule, or all the second one, and so on; which one is free.

    rules: expectations of one shape. What is wrong is told by the rule that fewest elements break.
    """

    rules: tuple[Expected, ...]

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        return tuple(self.rules[0].shape)

    def judge(self, codes: Array, fmt: str) -> Judgement:
        return min((r.judge(codes, fmt) for r in self.rules), key=lambda j: int(j.bad.sum()))

    def saturating(self) -> Expected:
        return OneRule(tuple(r.saturating() for r in self.rules))


def by_rule(rule: str, *, drop: Expected, propagate: Expected, free: Expected) -> Expected:
    """The expectation for a rule of `bounds.profile.NAN_RULES`."""
    return OneRule((drop, propagate)) if rule == "consistent" else {
        "drop": drop, "propagate": propagate, "free": free}[rule]
