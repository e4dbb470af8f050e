"""Recorded signatures: each has its source, and agrees with the catalogue, which was typed apart."""

from __future__ import annotations

import sys

import pytest

from adapters.standins import install, uninstall
from adapters.standins.arch import arch_of
from adapters.standins.signatures import PACKAGES, parsed, rows_of
from conformance.catalogue.load import MODULES, functions, package_of


def parameters(text: str) -> list[tuple[str, str]]:
    """(name, default) of a catalogue signature: `name(a, b=1) -> what`."""
    head = text.partition(" -> ")[0]
    signature = parsed(head[head.index("(") : head.rindex(")") + 1])
    return [(p.name, repr(p.default)) for p in signature.parameters.values()]


CATALOGUE = {f"{package_of(m)}.{f.name.partition('.')[2]}": f.signature for m in MODULES for f in functions(m)}


@pytest.mark.parametrize("package", PACKAGES)
def test_recorded_signatures_agree_with_the_catalogue(package):
    compared = 0
    for row in rows_of(package):
        text = CATALOGUE.get(row.full_name, "")
        # Of settings the documents give no names of parameters.
        if row.helper or "(" not in text or "..." in text or "<" in text:
            continue
        mine = [(p.name, repr(p.default)) for p in row.signature.parameters.values()]
        assert mine == parameters(text), row.full_name
        compared += 1
    assert compared >= 2


@pytest.mark.parametrize("package", PACKAGES)
def test_each_row_has_its_section(package):
    for platform in ("cuda", "ascend"):
        rows = rows_of(package, platform)
        assert all(r.section for r in rows)
        assert len({r.name for r in rows}) == len(rows)


def test_an_unknown_release_or_architecture_is_told():
    with pytest.raises(ValueError, match=r"R26, W24.*'V1'"):
        rows_of("flash_mla", release="V1")
    with pytest.raises(ValueError, match="sm90, sm100, ascend950"):
        arch_of("sm80")


def test_uninstalling_puts_back_what_stood_there():
    sys.modules.pop("deep_select", None)
    install("sm100", ("deep_select",))
    assert "deep_select" in sys.modules
    install("sm90", ("flash_mla",))
    assert "deep_select" not in sys.modules
    uninstall()
    assert not {"flash_mla", "flash_mla.flash_mla_interface"} & set(sys.modules)
