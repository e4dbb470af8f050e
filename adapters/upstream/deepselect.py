"""DeepSelect (`deep_select`): its two public calls."""

from __future__ import annotations

from typing import Any

from adapters.upstream.base import UpstreamAdapter, given
from adapters.upstream.release import parameters

TOPK_PARAMETERS = (
    "input", "topk", "sorted", "begin", "end", "indices_type", "sorted_index", "hint", "output_idx",
    "output_idx_offset", "idx_oob_fill_value", "value_oob_fill_value", "return_value", "abort_when_nan_found",
)
"""of both releases that are called 1.0.0; what they differ in is told by `get_stride_requirement`"""


class Adapter(UpstreamAdapter):
    """A method an op, named like the public function."""

    module, package = "deepselect", "deep_select"

    def get_stride_requirement(self) -> Any:
        return self.lib.get_stride_requirement()

    def topk(self, input: Any, topk: int, sorted: bool = False, begin: Any = None, end: Any = None,
             indices_type: Any = None, sorted_index: bool = False, hint: Any = None, output_idx: Any = None,
             output_idx_offset: Any = None, idx_oob_fill_value: int | None = None,
             value_oob_fill_value: float | None = None, return_value: bool = True,
             abort_when_nan_found: bool = True) -> Any:
        return self.lib.topk(
            input, topk, sorted=sorted, sorted_index=sorted_index, return_value=return_value,
            abort_when_nan_found=abort_when_nan_found,
            **given(begin=begin, end=end, indices_type=indices_type, hint=hint, output_idx=output_idx,
                    output_idx_offset=output_idx_offset, idx_oob_fill_value=idx_oob_fill_value,
                    value_oob_fill_value=value_oob_fill_value))

    def recognised(self) -> str:
        found = parameters(getattr(self.lib, "topk", None))
        if found is None or not hasattr(self.lib, "get_stride_requirement"):
            raise self.cannot_tell("topk or get_stride_requirement is missing, or topk does not tell its parameters")
        lacking = [name for name in TOPK_PARAMETERS if name not in found]
        if lacking:
            raise self.cannot_tell(f"topk does not take {', '.join(lacking)}")
        return "1.0"

    def found(self) -> dict[str, str]:
        rows, out = self.get_stride_requirement()
        return {**super().found(), "stride_requirement_bytes": f"{rows},{out}"}

    def trial(self) -> str:
        stated, described = tuple(self.get_stride_requirement()), self.backend.chip["requirements"]
        wanted = described["input_row_bytes"], described["output_row_bytes"]
        if stated != wanted:
            # The two releases of this version differ in nothing else that can be asked.
            return (f"deep_select asks for row strides of {stated[0]} and {stated[1]} bytes; those of "
                    f"{self.backend.chip['name']} are {wanted[0]} and {wanted[1]}: it was built for another platform")
        return ""
