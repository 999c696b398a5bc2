"""What `hpml run` starts on every rank where there are several GPUs: this module with `script.py ...` or `-m module ...`.

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
