"""What bench says about the machine: its CPU, how busy others kept it, what a process used."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

TICKS = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100


def cpu_name() -> str:
    """The CPU's name as the system tells it; never empty."""
    name = ""
    if sys.platform == "linux":
        try:
            text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
        except OSError:
            text = ""
        found = re.search(r"^(?:model name|Model|Hardware)\s*:\s*(.+)$", text, re.MULTILINE)
        name = found.group(1) if found else ""
    elif sys.platform == "darwin":
        command = ["sysctl", "-n", "machdep.cpu.brand_string"]
        try:
            name = subprocess.run(command, capture_output=True, text=True, check=False).stdout
        except OSError:
            name = ""
    return " ".join(name.split()) or platform.processor() or platform.machine() or "unknown"


def usable_cpus() -> set[int]:
    """The CPUs that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return set(os.sched_getaffinity(0))
    return set(range(os.cpu_count() or 1))


def peak_rss_bytes() -> int:
    """The most memory that this process had resident, mapped model pages included.

    0 where the system does not tell (Windows).
    """
    if resource is None:
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


@dataclass(frozen=True)
class CpuTimes:
    """CPU seconds since boot, summed over the usable CPUs: worked, and stolen by a hypervisor."""

    busy_s: float
    steal_s: float


def parse_cpu_times(text: str, cpus: set[int]) -> CpuTimes:
    """From /proc/stat: user nice system idle iowait irq softirq steal, in ticks (man 5 proc)."""
    busy = steal = 0
    for line in text.splitlines():
        name, *fields = line.split() or [""]
        if not re.fullmatch(r"cpu\d+", name) or int(name[3:]) not in cpus:
            continue
        ticks = [int(field) for field in fields] + [0] * 8
        busy += ticks[0] + ticks[1] + ticks[2] + ticks[5] + ticks[6]
        steal += ticks[7]
    return CpuTimes(busy / TICKS, steal / TICKS)


def cpu_times() -> CpuTimes | None:
    """Now; None where there is no /proc/stat."""
    try:
        text = Path("/proc/stat").read_text(encoding="ascii")
    except OSError:
        return None
    return parse_cpu_times(text, usable_cpus())


@dataclass(frozen=True)
class Load:
    """CPUs' worth of time over a while: others' processes, and what a hypervisor took away."""

    others: float
    steal: float

    def warning(self, n_cpu: int, when: str) -> str | None:
        """A line when so much was taken that timings suffer: over 5 % of the CPUs."""
        limit = 0.05 * n_cpu
        if self.others > limit:
            return f"the machine was busy {when}: others used {self.others:.2f} of {n_cpu} CPUs"
        if self.steal > limit:
            return f"the machine was busy {when}: {self.steal:.2f} of {n_cpu} CPUs were stolen"
        return None


class LoadMeter:
    """Measures the load of others from its making to each call of load()."""

    def __init__(self) -> None:
        self._begin_s, self._begin = time.monotonic(), cpu_times()

    def load(self, own_cpu_s: float) -> Load | None:
        """own_cpu_s: CPU seconds that we used ourselves meanwhile. None where unknown."""
        now, elapsed = cpu_times(), time.monotonic() - self._begin_s
        if self._begin is None or now is None or elapsed <= 0:
            return None
        others = now.busy_s - self._begin.busy_s - own_cpu_s
        # The kernel counts in ticks, so a short while cannot be told exactly.
        return Load(max(0.0, others) / elapsed, (now.steal_s - self._begin.steal_s) / elapsed)


def load_before(seconds: float = 0.5) -> Load | None:
    """The load of others now, before bench starts. Waits for that long.

    The load average would still remember a build that ended a minute ago; it is used only where
    there is nothing better.
    """
    meter, own = LoadMeter(), time.process_time()
    if cpu_times() is None:
        return Load(os.getloadavg()[0], 0.0) if hasattr(os, "getloadavg") else None
    time.sleep(seconds)
    return meter.load(time.process_time() - own)


def available_bytes() -> int | None:
    """Memory that new processes can use without swapping; None where the system does not tell."""
    try:
        text = Path("/proc/meminfo").read_text(encoding="ascii")
    except OSError:
        return None
    found = re.search(r"^MemAvailable:\s*(\d+) kB", text, re.MULTILINE)
    return int(found.group(1)) * 1024 if found else None
