"""Long-lived ranks that judge one script after another, for an adaptive search for failing scripts."""
from __future__ import annotations

import contextlib
import faulthandler
import pickle
import tempfile
import threading
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.helpers.ranks import RanksFailed, run_ranks
from tests.scripts.compare import Outcome, Unfit, judge
from tests.scripts.launch import RANKS, read, together
from tests.scripts.use import Use

TOLERANCE = 1e-7  # what a few ill-conditioned steps make of rounding; a mistake is far larger
LIMIT_S = 45
LAUNCH_S = 3600


class Ranks:
    """`judge(*asked)` on every rank, by default of a script's text and a mesh. Ranks that die or hang are launched anew for
    the next one."""

    def __init__(self, folder: Path, judged: Callable[..., Outcome] | None = None, world_size: int = RANKS,
                 limit_s: float = LIMIT_S) -> None:
        self.folder, self.judged, self.world_size, self.limit_s = folder, judged or judged_text, world_size, limit_s
        self.thread: threading.Thread | None = None
        self.log, self.number = "", 0

    def judge(self, *asked: Any) -> Outcome:
        if self.thread is None or not self.thread.is_alive():
            self._launch()
        number = self.number = self.number + 1
        assert self.thread is not None
        _write(self.here / f"{number}.ask", asked)
        ranks = range(self.world_size)
        while self.thread.is_alive() and not all((self.here / f"{number}.{rank}").exists() for rank in ranks):
            time.sleep(0.02)
        parts = [read(self.here / f"{number}.{rank}") for rank in ranks]
        if any(part is None or part.verdict == "crashed" for part in parts):
            self.stop()
        return together(parts, self.log)

    def _launch(self) -> None:
        self.here, self.number = Path(tempfile.mkdtemp(dir=self.folder)), 0
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            run_ranks(self.folder, serve, self.world_size, args=(str(self.here), self.judged, self.limit_s), timeout_s=LAUNCH_S)
        except RanksFailed as failure:
            self.log = str(failure)

    def stop(self) -> None:
        if self.thread is not None and self.thread.is_alive():
            _write(self.here / f"{self.number + 1}.ask", None)
            self.thread.join(self.limit_s + 15)


def serve(rank: int, folder: str, judged: Callable[..., Outcome], limit_s: float) -> None:
    number = 1
    while True:
        path = Path(folder, f"{number}.ask")
        while not path.exists():
            time.sleep(0.01)
        asked = pickle.loads(path.read_bytes())
        if asked is None:
            return
        faulthandler.dump_traceback_later(limit_s, exit=True)
        outcome = judged(*asked, rank, Path(folder))
        faulthandler.cancel_dump_traceback_later()
        _write(Path(folder, f"{number}.{rank}"), outcome)
        if outcome.verdict == "crashed":
            return  # the peers may be out of step
        with contextlib.suppress(RuntimeError):
            dist.barrier()
        number += 1


def judged_text(text: str, mesh: str, rank: int, folder: Path) -> Outcome:
    names: dict = {}
    path = folder / f"script_{zlib.crc32(text.encode())}.py"  # the same name on all ranks, and a source that can be read
    partial = path.with_suffix(f".{rank}")
    partial.write_text(text)
    partial.rename(path)
    exec(compile(text, str(path), "exec"), names)  # noqa: S102
    try:
        return judge(Use("script", names["script"], tolerance=TOLERANCE), mesh, folder, rank)
    except Unfit as error:
        return Outcome("unfit", str(error))


def _write(path: Path, value: object) -> None:
    partial = path.with_suffix(path.suffix + ".partial")
    partial.write_bytes(pickle.dumps(value))
    partial.rename(path)
