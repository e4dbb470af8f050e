"""Objects that deep_ep's calls hand out: section 2.3 of dossiers/deepep.md."""

from __future__ import annotations

from typing import Any

import torch

from adapters.standins.checks import asserts


class EPHandle:
    """What combine and a cached dispatch need; the attributes that are documented."""

    def __init__(self, inner: Any, buffer: Any) -> None:
        self.inner, self.buffer = inner, buffer
        self.channel_linked_list = self.dst_buffer_slot_idx = self.token_metadata_at_forward = None

    @property
    def topk_idx(self) -> torch.Tensor:
        """The caller's own tensor. AssertionError if it was modified in place since dispatch."""
        return self.inner.topk_idx

    def __getattr__(self, name: str) -> Any:
        if name in _PUBLIC:
            return getattr(self.inner, name)
        raise AttributeError(name)


_PUBLIC = frozenset((
    "do_expand", "num_experts", "expert_alignment", "num_max_tokens_per_rank", "num_sms", "num_recv_tokens",
    "num_expanded_tokens", "num_recv_tokens_per_expert_list", "psum_num_recv_tokens_per_scaleup_rank",
    "psum_num_recv_tokens_per_expert", "num_unaligned_recv_tokens_per_expert", "recv_src_metadata",
))


def new_classes(rig: Any) -> dict[str, type]:
    """Fresh classes, so that two installations share nothing."""

    class EPBuffer:
        """2.4"""

    class PPBuffer:
        """2.6"""

    class EventHandle:
        """A point on the current stream."""

        def current_stream_wait(self) -> None:
            """Stream-ordered; nothing to do on a host."""

    class EventOverlap:
        """2.3: what an asynchronous call returns."""

        @classmethod
        def _make(cls, event: Any, hook: Any = None, work: Any = None) -> Any:
            made = cls.__new__(cls)
            made.event, made.hook, made.work = event, hook, work
            return made

        def _waited(self) -> Any:
            asserts(self.event is not None, "a synchronous call leaves nothing to wait for")
            if self.work is not None:
                rig.device.finish_apart(self.work)
            hook, self.hook = self.hook, None
            return hook() if hook else None

        def __enter__(self) -> Any:
            return self

        def __exit__(self, *_: Any) -> None:
            self._waited()

    return {c.__name__: c for c in (EPBuffer, PPBuffer, EventHandle, EventOverlap)} | {"EPHandle": EPHandle}
