"""One step, one count: do all reports of a plan name the same bytes?

    python benchmarks/one_count.py ../shared/acceptance/models.py [--models gpt2 vit] [--budgets 0.9 none] [--json FILE]

FILE has `build(name) -> (model, batch)` and `MODELS`. Each model is planned for one device and for two (dp, tp, zero,
microbatches, pipeline stages), without a budget and with parts of the peak without one. Prints a JSON line per plan: peak bytes
of the plan's record, its table's memory, `explain --memory`, the simulation and its curve over the step, and the monitor's
prediction; the same of the plan saved and loaded. Exits with 1 where two of them differ.
"""
from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from cost_model_accuracy import load

CASES: dict[str, dict[str, Any]] = {
    "one device": {}, "dp": {"mesh": {"dp": 2}}, "tp": {"mesh": {"tp": 2}}, "zero": {"mesh": {"dp": 2}, "zero": 3},
    "microbatches": {"microbatches": 2}, "dp, microbatches": {"mesh": {"dp": 2}, "microbatches": 2}, "pp": {"mesh": {"pp": 2}},
}


def counts(plan: Any) -> dict[str, int]:
    """Peak bytes by report."""
    from hpml_compiler.commands.plan import peak_of
    from hpml_compiler.monitor.prediction import expected_parts
    from hpml_compiler.options import Options
    from hpml_compiler.planner.graph.plan_assembly import step_peak_bytes
    from hpml_compiler.simulate import simulate
    from hpml_compiler.visualize.memory_explanation import memory_json

    played, options = simulate(plan), Options.parse({k: v for k, v in plan.options.items() if k in ("optimizer", "offload")})
    return {
        "record": plan.peak.bytes, "table": plan.memory.peak, "explain": memory_json(plan, peak_of(plan))["peak_bytes"],
        "simulation": played.peak_bytes, "curve": max(nbytes for _, nbytes in played.memory),
        "monitor": sum(expected_parts(plan.step_graphs, step_peak_bytes(plan.step_graphs, options, plan.hardware)).values()),
    }


def row(module: Any, name: str, case: str, budget: float | None, without: int | None) -> dict[str, Any]:
    """without: peak bytes without a budget, of which `budget` is a part."""
    import hpml_compiler
    from hpml_compiler.plan_api.model_plan import Plan
    from passes.errors import HpmlError

    options = dict(CASES[case])
    if budget is not None and without is not None:
        options["memory_budget"] = int(budget * without)
    model, batch = module.build(name)
    found: dict[str, Any] = {"model": name, "case": case, "budget": options.get("memory_budget")}
    try:
        plan = hpml_compiler.plan(model, batch, f"1x{2 if 'mesh' in options else 1}:cpu", **options)
    except HpmlError as refusal:
        return {**found, "refused": refusal.what}
    assert isinstance(plan, Plan) and plan.peak is not None
    here, again = counts(plan), counts(Plan.from_json(plan.to_json()))
    same = len({*here.values(), *again.values()}) == 1
    return {**found, "same": same, "counted": plan.peak.counted, **here, **({} if here == again else {"loaded": again})}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file")
    parser.add_argument("--models", nargs="*")
    parser.add_argument("--cases", nargs="*", default=list(CASES))
    parser.add_argument("--budgets", nargs="*", default=["none", "2", "0.9"], help="parts of the peak without one")
    parser.add_argument("--json", help="write all rows to this file")
    args = parser.parse_args()
    module, rows = load(args.file), []
    for name in args.models or list(module.MODELS):
        for case in args.cases:
            without = None
            for budget in (None if each == "none" else float(each) for each in args.budgets):
                rows.append(row(module, name, case, budget, without))
                without = rows[-1].get("record") if budget is None else without
                print(json.dumps(rows[-1]), flush=True)
    told = [each for each in rows if "same" in each]
    wrong = [each for each in told if not each["same"]]
    print(json.dumps({"plans": len(told), "different": len(wrong), "refused": len(rows) - len(told)}))
    if args.json:
        with open(args.json, "w") as file:
            json.dump(rows, file, indent=1)
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
