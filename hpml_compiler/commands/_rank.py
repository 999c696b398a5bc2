"""Start of a rank of `hpml run`, where there are several GPUs or rank 0 opens a store: `script.py ...` or `-m module ...`.

A script for one device says `.to("cuda")`, which is the current GPU, and that is the first one on every rank unless somebody
chooses. LOCAL_RANK stays what it is, and so do the GPUs that are seen, for scripts that choose by themselves.
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
    if os.environ.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE") != "1":  # the ranks meet at a store of the launcher's
        return _run()
    from passes import compat

    with compat.stores_on_loopback():
        _run()


def _run() -> None:
    first = sys.argv[1]
    if first == "-m":
        sys.argv = sys.argv[2:]  # run_module puts the file's path first
        sys.path.insert(0, os.getcwd())
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = sys.argv[1:]
        sys.path.insert(0, os.path.dirname(os.path.abspath(first)))
        runpy.run_path(first, run_name="__main__")


if __name__ == "__main__":
    main()
