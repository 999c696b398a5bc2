"""Launcher of one rank of `hpml run`, used with several GPUs or a store of rank 0: `script.py ...` or `-m module ...`.

A single-device script says `.to("cuda")`, the current GPU, which is the first one on every rank by default. This sets it to
the rank's own. LOCAL_RANK and the visible GPUs stay unchanged, for scripts that choose by themselves.
"""
from __future__ import annotations

import os
import runpy
import sys


def choose_gpu() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())


def main() -> None:
    choose_gpu()
    if os.environ.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE") == "1":  # ranks do not use the launcher's store
        from passes import compat

        compat.open_stores_on_loopback()
    first = sys.argv[1]
    if first == "-m":
        sys.argv = sys.argv[2:]  # run_module inserts the file's path
        sys.path.insert(0, os.getcwd())
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = sys.argv[1:]
        sys.path.insert(0, os.path.dirname(os.path.abspath(first)))
        runpy.run_path(first, run_name="__main__")


if __name__ == "__main__":
    main()
