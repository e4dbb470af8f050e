"""Every word of glibc over a damaged heap is a write outside a block; over a block freed twice, and others, none is."""

from __future__ import annotations

import signal

import pytest

from conformance.engine.executor import Death, Outcome
from conformance.engine.observe import ended_badly

DAMAGE = """\
break adjusted to free malloc space
corrupted double-linked list
corrupted double-linked list (not small)
corrupted size vs. prev_size
corrupted size vs. prev_size in fastbins
corrupted size vs. prev_size while consolidating
double free or corruption (!prev)
double free or corruption (out)
double free or corruption (top)
free(): corrupted unsorted chunks
free(): invalid next size (fast)
free(): invalid next size (normal)
free(): invalid pointer
free(): invalid size
free(): too many chunks detected in tcache
free(): unaligned chunk detected in tcache 2
invalid fastbin entry (free)
malloc(): corrupted top size
malloc(): corrupted unsorted chunks
malloc(): invalid next size (unsorted)
malloc(): invalid next->prev_inuse (unsorted)
malloc(): invalid size (unsorted)
malloc(): largebin double linked list corrupted (bk)
malloc(): memory corruption (fast)
malloc(): mismatching next->prev_size (unsorted)
malloc(): smallbin double linked list corrupted
malloc(): unaligned tcache chunk detected
malloc(): unsorted double linked list corrupted
malloc: top chunk is corrupt
malloc_check_get_size: memory corruption
malloc_consolidate(): invalid chunk size
mremap_chunk(): invalid pointer
munmap_chunk(): invalid pointer
realloc(): invalid next size
realloc(): invalid old size""".splitlines()

OTHER = ("free(): double free detected in tcache 2", "double free or corruption (fasttop)", "", "Aborted",
         "terminate called after throwing an instance of 'std::bad_alloc'", "my kernel: invalid size of a block")


def ended(stderr: str, number: int = signal.SIGABRT) -> tuple[str, str | None]:
    death = Death(int(number), "enqueue", 0, f"something before\n{stderr}\n")
    found = ended_badly(Outcome([None], death=death))
    assert found is not None
    return found.bug


@pytest.mark.parametrize("said", DAMAGE)
def test_damage(said: str) -> None:
    assert ended(said) == ("fail", "oob_write")
    assert ended(said, signal.SIGSEGV) == ("crash", "signal"), "only the allocator's own abort says so"


@pytest.mark.parametrize("said", OTHER)
def test_other_ends(said: str) -> None:
    assert ended(said) == ("crash", "signal")
