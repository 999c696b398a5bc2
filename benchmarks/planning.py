"""Planning without devices: seconds, memory and size of the ILP for models of growing depth, and hand-made plans.

    python benchmarks/planning.py big_models.py:llama_8b --cluster 8x8:h100-80g
"""
from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target")
    parser.add_argument("--cluster", default="8x8:h100-80g")
    parser.add_argument("--fix", action="append", default=[])
    args = parser.parse_args()
    command = [sys.executable, "-m", "hpml_compiler.cli", "plan", args.target, "--cluster", args.cluster, "--json"]
    for fix in args.fix:
        command += ["--fix", fix]
    start = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    summary = json.loads(done.stdout)
    print(json.dumps({
        "benchmark": "planning", "target": args.target, "cluster": args.cluster, "fix": args.fix,
        "wall_s": time.perf_counter() - start,
        "peak_memory_bytes": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024,
        **{k: summary[k] for k in ("step_time_s", "bound_s", "gap", "status", "mesh", "ilp", "seconds")},
    }))


if __name__ == "__main__":
    main()
