from __future__ import annotations

import sys
import time

import pytest

from specee_pc.bench import machine
from specee_pc.bench.machine import CpuTimes, Load, LoadMeter, parse_cpu_times

STAT = """\
cpu  999 999 999 999 999 999 999 999 0 0
cpu0 100 20 30 5000 7 4 6 50 90 0
cpu1 1000 0 0 5000 0 0 0 0 0 0
cpu12 9 9 9 9 9 9 9 9 9 9
intr 5
"""


def test_busy_time_is_that_of_the_usable_cpus_without_idle_and_guests() -> None:
    ticks = machine.TICKS
    one = parse_cpu_times(STAT, {0})
    assert one.busy_s == pytest.approx(160 / ticks)
    assert one.steal_s == pytest.approx(50 / ticks)
    assert parse_cpu_times(STAT, {0, 1}).busy_s == pytest.approx(1160 / ticks)


@pytest.mark.parametrize(
    ("load", "warns"),
    [
        (Load(0.05, 0.0), None),
        (Load(0.3, 0.0), "others used 0.30 of 2 CPUs"),
        (Load(0.0, 0.2), "0.20 of 2 CPUs were stolen"),
    ],
)
def test_a_busy_machine_is_told(load: Load, warns: str | None) -> None:
    line = load.warning(2, "before the start")
    assert (line is None) if warns is None else (line is not None and warns in line)


def test_our_own_work_is_not_that_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """In 10 s the CPUs worked for 8 s, 5 of them for us, and 1 s was stolen."""
    times = iter([CpuTimes(100.0, 7.0), CpuTimes(108.0, 8.0)])
    seconds = iter([50.0, 60.0])
    monkeypatch.setattr(machine, "cpu_times", lambda: next(times))
    monkeypatch.setattr(time, "monotonic", lambda: next(seconds))
    load = LoadMeter().load(own_cpu_s=5.0)
    assert load is not None
    assert load.others == pytest.approx(0.3)
    assert load.steal == pytest.approx(0.1)


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc/stat")
def test_the_system_counts_our_own_work() -> None:
    meter, own = LoadMeter(), time.process_time()
    while time.process_time() - own < 0.3:
        pass
    load = meter.load(0.0)
    assert load is not None
    assert load.others > 0.0


def test_the_machine_has_a_name_and_memory() -> None:
    assert machine.cpu_name().strip()
    if sys.platform != "win32":
        assert machine.peak_rss_bytes() > 5_000_000
    if sys.platform == "linux":
        free = machine.available_bytes()
        assert free is not None and free > 0
