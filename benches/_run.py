"""Owns how a bench runs and reports: sides taken in turn, each in a process of its own; rounds that other programs
disturbed done again; ratios with their resolution; one JSON line a row.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import peers

HERE = Path(__file__).resolve().parent
WORKER = HERE / "_worker.py"
TICK_S = 1 / os.sysconf("SC_CLK_TCK")

# Cores that other programs may use while a round runs, for it to count.
OTHERS_MAX = 0.15

# Quantities of which more is better.
RATES = {"prefill", "decode", "generate"}

Numbers = dict[str, float]


@dataclass(frozen=True)
class Ran:
    """A process that has ended: what it printed, its own CPU seconds and its largest resident set."""

    out: str
    err: str
    cpu_s: float
    peak_bytes: int


def run(command: Sequence[str], environment: Mapping[str, str] | None = None) -> Ran:
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            cwd=tempfile.gettempdir(),  # away from the sources, which would hide what was built
            env={**os.environ, **(environment or {})},
        )
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        err.seek(0)
        ran = Ran(out.read(), err.read(), used.ru_utime + used.ru_stime, used.ru_maxrss * 1024)
    if process.returncode != 0:
        raise RuntimeError(f"{command[0]} ended with {process.returncode}: {ran.err.strip()[-2000:]}")
    return ran


def ours(question: str, threads: str = peers.DEFAULT_THREADS, **arguments: Any) -> tuple[dict[str, Any], Ran]:
    """A worker's answer for llamacppshim, as peers.py built it, on ggml's threads ("pool") or on OpenMP."""
    site = peers.SHIM[threads]
    if not site.is_dir():
        raise SystemExit("there is no build to measure: python3 benches/peers.py shim")
    ran = run([sys.executable, str(WORKER), "Ours", question, json.dumps(arguments)], {"PYTHONPATH": str(site)})
    return json.loads(ran.out), ran


def llama_cpp_python(question: str, **arguments: Any) -> tuple[dict[str, Any], Ran]:
    ran = run([str(peers.PYTHON), str(WORKER), "LlamaCppPython", question, json.dumps(arguments)])
    return json.loads(ran.out), ran


def llama_bench(model: Path, *options: str, threads: str = peers.DEFAULT_THREADS) -> tuple[list[dict[str, Any]], Ran]:
    """Its rows: one for a prompt, one for a generation."""
    program = peers.LLAMA_BENCH[threads]
    ran = run([str(program), "--model", str(model), "--output", "json", *options])
    rows: list[dict[str, Any]] = json.loads(ran.out)
    for row in rows:
        assert row["build_commit"] == peers.pinned("COMMIT")
    return rows, ran


@functools.cache
def model(name: str) -> Path:
    """The file of a real model, downloaded first where needed."""
    code = "import sys, real_models; print(real_models.obtain(real_models.MODELS[sys.argv[1]]))"
    path = f"{peers.SHIM[peers.DEFAULT_THREADS]}{os.pathsep}{peers.ROOT / 'tests'}"
    return Path(run([sys.executable, "-c", code, name], {"PYTHONPATH": path}).out.strip())


# Who else is using the machine.


def busy_s() -> float:
    """CPU seconds that all processes, and the host where it took them from us, have used since the boot."""
    user, nice, system, _, _, irq, softirq, steal = map(int, Path("/proc/stat").read_text().split()[1:9])
    return (user + nice + system + irq + softirq + steal) * TICK_S


def process_cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * TICK_S


@dataclass
class Spinner:
    """A process that keeps one core busy, if it runs."""

    pid: int | None = None

    def cpu_s(self) -> float:
        return 0.0 if self.pid is None else process_cpu_s(self.pid)


@contextlib.contextmanager
def one_busy_core(busy: bool = True) -> Iterator[Spinner]:
    if not busy:
        yield Spinner()
        return
    core = min(os.sched_getaffinity(0))
    code = f"import os; os.sched_setaffinity(0, [{core}])\nwhile True: pass"
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.DEVNULL)
    try:
        yield Spinner(process.pid)
    finally:
        process.kill()
        process.wait()


# Rounds.


@dataclass
class Measured:
    """For each side and quantity, a number a round; how many rounds were not counted; the most that others used."""

    values: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    disturbed: int = 0
    others: float = 0.0

    def median(self, side: str, quantity: str) -> float:
        return statistics.median(self.values[side][quantity])

    def best(self, side: str, quantity: str) -> float:
        """Rates: the highest. Seconds and bytes, whose names say so: the lowest."""
        values = self.values[side][quantity]
        return max(values) if quantity in RATES else min(values)

    def ratio(self, side: str, peer: str, quantity: str) -> dict[str, float]:
        """Of `side` to `peer`, round by round: the median, and where the true one lies with 95% confidence; and of the
        best rounds. What a noisy host takes from a round it never gives, so the best of many rounds repeat best."""
        both = zip(self.values[side][quantity], self.values[peer][quantity], strict=True)
        ratios = sorted(mine / other for mine, other in both)
        low, high = median_interval(len(ratios))
        return {
            "ratio": round(statistics.median(ratios), 4),
            "ratio_low": round(ratios[low], 4),
            "ratio_high": round(ratios[high], 4),
            "ratio_best": round(self.best(side, quantity) / self.best(peer, quantity), 4),
        }

    def rate(self, side: str, peer: str, quantity: str) -> dict[str, Any]:
        """A row's columns: how fast a side is, and how it stands to another."""
        return {
            "side": side,
            "quantity": quantity,
            "tokens_per_s": round(self.median(side, quantity), 2),
            **self.ratio(side, peer, quantity),
            **self.conditions(),
        }

    def conditions(self) -> dict[str, Any]:
        rounds = len(next(iter(next(iter(self.values.values())).values())))
        return {"rounds": rounds, "disturbed": self.disturbed, "others_cores": round(self.others, 2)}


def median_interval(n: int) -> tuple[int, int]:
    """Indices into n sorted samples between which their median lies with 95% confidence, whatever their distribution;
    the outermost where there are too few."""
    low, below = 0, 0.5**n
    while below + math.comb(n, low + 1) * 0.5**n <= 0.025:
        low += 1
        below += math.comb(n, low) * 0.5**n
    return low, n - 1 - low


def in_turn(
    sides: Mapping[str, Callable[[], tuple[Numbers, Ran]]],
    rounds: int,
    spinner: Spinner | None = None,
    others_max: float = OTHERS_MAX,
) -> Measured:
    """Each side once a round, in alternating order. A round in which other programs used too much is done again, up to
    four times as often as asked for; then the least disturbed of all are taken."""
    spinner = spinner or Spinner()
    kept: list[tuple[float, dict[str, Numbers]]] = []
    quiet = tried = 0
    while quiet < rounds and tried < 4 * rounds:
        order = list(sides) if tried % 2 == 0 else list(sides)[::-1]
        tried += 1
        found: dict[str, Numbers] = {}
        worst = 0.0
        for name in order:
            busy, spun, began = busy_s(), spinner.cpu_s(), os.times().elapsed
            found[name], ran = sides[name]()
            elapsed = os.times().elapsed - began
            others = (busy_s() - busy - (spinner.cpu_s() - spun) - ran.cpu_s) / elapsed
            worst = max(worst, others)
        kept.append((worst, found))
        quiet += worst <= others_max
        progress(f"round {quiet}/{rounds} after {tried}, others used {worst:.2f} cores")
    chosen = sorted(kept, key=lambda one: one[0])[:rounds]
    measured = Measured(disturbed=tried - rounds, others=chosen[-1][0])
    for name in sides:
        numbers = [found[name] for _, found in chosen]
        measured.values[name] = {quantity: [one[quantity] for one in numbers] for quantity in numbers[0]}
    return measured


# Reports.


def progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@functools.cache
def cpu_name() -> str:
    found = re.search(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text())
    return found[1] if found else platform.processor()


def emit(**row: Any) -> None:
    """One JSON line, with the machine and its load."""
    machine = {"pin": peers.pinned("COMMIT"), "cpu": cpu_name(), "n_cpus": len(os.sched_getaffinity(0))}
    print(json.dumps({**row, **machine, "load": [round(x, 2) for x in os.getloadavg()]}), flush=True)
