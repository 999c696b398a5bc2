"""Quantity by which a search compares configurations: the simulated time of a step, or its energy."""
from __future__ import annotations

from dataclasses import dataclass

from hpml_compiler.plan_api.model_plan import Plan
from hpml_compiler.planner.joint.joint_candidate import JointCandidate
from hpml_compiler.plans.schema import Objective
from hpml_compiler.simulate.simulator import simulate
from hpml_compiler.visualize.formatting import format_objective
from passes.cost_model.energy_model import Power, capped
from passes.hardware.cluster import Cluster


@dataclass(frozen=True)
class FoundPlan:
    """A plan that fits. simulated_us: of its step, with overlap; cost: the objective, in the unit of `JointObjective`."""

    simulated_us: float
    cost: float
    plan: Plan
    candidate: JointCandidate


@dataclass(frozen=True)
class JointObjective:
    """Costs are µs of a step, with overlap; or with "energy", µJ of one device, which draws idle_w all the time, and more for
    what it does."""

    name: Objective
    idle_w: float

    @staticmethod
    def of(name: Objective, cluster: Cluster, power_cap: float | None) -> JointObjective:
        device = cluster.device if power_cap is None else capped(cluster.device, power_cap)
        return JointObjective(name, Power.of(device).idle_w)

    @property
    def is_worse(self) -> str:
        return "is slower" if self.name == "time" else "takes more energy"

    def simulated(self, plan: Plan) -> tuple[float, float]:
        """The simulated step in µs, and the cost of a plan."""
        found = simulate(plan)
        if self.name == "time":
            return found.step_us, found.step_us
        assert found.energy_j is not None, "the devices are known"
        return found.step_us, found.energy_j * 1e6 / plan.world_size

    def expected(self, candidate: JointCandidate, us: float) -> float:
        """Estimated cost of a configuration whose step is estimated to take `us`."""
        return us if self.name == "time" else self.idle_w * us + candidate.above_idle_uj

    def bound(self, candidate: JointCandidate) -> float:
        """No simulated step of this configuration costs less: energy is bounded as the least time at idle power, and the least
        work above it."""
        return candidate.bound_us if self.name == "time" else (
            self.idle_w * candidate.bound_us + candidate.least_above_idle_uj)

    def format(self, cost: float) -> str:
        return format_objective(cost, self.name)
