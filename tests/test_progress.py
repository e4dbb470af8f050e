"""What a run says while it goes on is there to be read at once, in a log too."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from conformance import progress
from conformance.progress import Progress, duration


def test_a_log_can_be_read_while_the_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "LOG_EVERY_S", 0.0)
    log = tmp_path / "log"
    with log.open("w") as f:  # buffered, as the standard output of a run is that goes to a file
        reporter = SimpleNamespace(write_line=lambda text: f.write(text + "\n"), flush=f.flush)
        reporter.write_line("conformance: backend cpu")
        shown = Progress(reporter, tmp_path, 3, live=False)
        assert log.read_text() == "conformance: backend cpu\n"
        shown.done("conforming")
        assert log.read_text().splitlines()[1].startswith("1/3 cases, 0 nonconforming, ")
        shown.done("waived")
        assert ", 1 waived, " in log.read_text().splitlines()[2]
        shown.done("nonconforming")
        assert log.read_text().splitlines()[3].startswith("3/3 cases, 1 nonconforming, 1 waived, ")
        assert log.read_text().endswith(" in all\n")


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0 s"), (59.4, "59 s"), (60, "1 min 0 s"), (200, "3 min 20 s"),
                                               (3900, "1 h 5 min")])
def test_durations_are_words(seconds: float, text: str) -> None:
    assert duration(seconds) == text
