"""A clock that is set by hand, and a script that runs on it."""
from __future__ import annotations

from hpml_compiler.monitor.monitor import PlanMonitor
from hpml_compiler.monitor.profiled_step import KernelTimes


class FakeClock:
    """Its marks are µs."""

    def __init__(self) -> None:
        self.now = 0.0

    def mark(self) -> float:
        return self.now

    def elapsed_us(self, start: float, end: float) -> float:
        return end - start


class FakeProfile:
    """What a profile would see; `log` says what was done with it."""

    def __init__(self, classes_us=None, peak_bytes=1000) -> None:
        self.seen = KernelTimes(classes_us or {"matmul": 3.0, "collective": 1.0}, False, peak_bytes)
        self.log: list[str] = []

    def begin_graph(self, backward=False):
        self.log.append("begin")
        return self

    def end_graph(self, entered) -> None:
        assert entered is self
        self.log.append("end")

    def stop(self, steady_bytes=0):
        self.log.append("stop")
        return self.seen

    def cancel(self) -> None:
        self.log.append("cancel")


class Script:
    """Tells a monitor (or a recorder) what a training loop on the fake clock does."""

    def __init__(self, told, clock: FakeClock, optimizer=None) -> None:
        self.told, self.clock, self.optimizer = told, clock, optimizer

    def graph(self, number: int = 0, backward: bool = False, us: float = 10.0) -> None:
        token = self.told.graph_begins(number, backward)
        self.clock.now += us
        self.told.graph_ends(token)

    def optimize(self, us: float = 5.0) -> None:
        self.told.optimizer_begins(*([self.optimizer] if isinstance(self.told, PlanMonitor) else []))
        self.clock.now += us
        self.told.optimizer_ends()

    def between(self, us: float) -> None:
        self.clock.now += us

    def step(self, number: int = 0, times: int = 1, forward_us: float = 10.0, backward_us: float = 20.0) -> None:
        """2 us of data, then forward and backward so many times, then the optimizer for 5 us."""
        self.between(2.0)
        for _ in range(times):
            self.graph(number, us=forward_us)
            self.graph(number, backward=True, us=backward_us)
        self.optimize()
