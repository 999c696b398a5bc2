"""SIGTERM and SIGUSR1 -> a checkpoint at the next step, and exit code 75, on all ranks at the same step."""
from __future__ import annotations

import os
import signal
import threading
import time

import pytest
import torch

import hpml_compiler
from hpml_compiler.checkpoints.stop_signals import STOPPED
from tests.hpml_compiler.checkpoints.toy import Run


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_saves_and_exits(tmp_path, number):
    before = signal.getsignal(number)
    run = Run(str(tmp_path))
    whole = run.train(3)
    assert not os.listdir(tmp_path)
    os.kill(os.getpid(), number)
    with pytest.raises(SystemExit) as ended:
        run.train(10)
    assert ended.value.code == STOPPED == 75 and signal.getsignal(number) == before
    other = Run(str(tmp_path / "other"))
    assert other.train(3) == whole
    expected = other.train(6)[1:]
    again = Run(str(tmp_path))
    assert again.start == 4 and again.train(6) == expected
    again.checkpointer.close()


def run_until_told(rank, folder):
    run = Run(folder, {"mesh": {"dp": 2}})
    if rank == 1:  # one rank alone is told, in the middle of a step
        threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGTERM)).start()
    begun = time.monotonic()
    try:
        while time.monotonic() - begun < 60:
            run.train(run.start + 1)
            time.sleep(0.01)
    except SystemExit as ended:
        return ended.code, Run(folder, {"mesh": {"dp": 2}}).start
    return 0, 0


def test_all_ranks_save_at_the_step_after_the_first_is_told(launch, tmp_path):
    (code, step), other = launch(run_until_told, args=(str(tmp_path),))
    assert code == STOPPED and step > 0 and other == (code, step)


def test_outside_of_the_main_thread_signals_are_left_alone(tmp_path, caplog):
    before = signal.getsignal(signal.SIGTERM)
    model = torch.nn.Linear(2, 2)
    thread = threading.Thread(target=lambda: hpml_compiler.Checkpointer(tmp_path, model))
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGTERM) == before and "main thread" in caplog.text
