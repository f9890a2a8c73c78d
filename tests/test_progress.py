import pytest

from prunecli import progress
from prunecli.progress import duration_text, foretelling, silent


@pytest.mark.parametrize(
    ("whole", "line"),
    [
        (200, []),  # 100 s
        (360, ["reading: about 3.0 min; --few takes less."]),
        (12_960, ["reading: about 1.8 h; --few takes less."]),
    ],
)
def test_long_work_is_said_once_after_its_beginning(monkeypatch, whole, line):
    clock = iter([0.0, 4.0, 10.0, 20.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    said = []
    opened = foretelling(silent, whole, said.append, "reading", "--few takes less")
    with opened("first", 20) as advance:
        advance(1)
        assert said == []  # too early to tell
        advance(19)
    with opened("second", whole - 20) as advance:
        advance(20)
    assert said == line


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.031, "0.03 s"), (75, "75 s"), (500, "8.3 min"), (20000, "5.6 h")]
)
def test_durations(seconds, text):
    assert duration_text(seconds) == text
