"""The plan for a heterogeneous cluster: each group of equal devices computes some rows of the batch, under its own plan.

Every group that takes part has all parameters (sharded over its devices as in its plan), computes the gradients of
its rows, and reduces them with the other groups, weighted so that the sum is the gradient of the whole batch: where the
loss is a mean over the rows, group g's gradient counts b_g/B (`GroupShare.fraction`). Then each group's optimizer steps.

Nothing here imports torch. Files are strict JSON, like those of plans for equal devices; the field `kind` is "mixed".
"""
from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from hpml_compiler.plan_api.mixed_content import MixedContent
from hpml_compiler.plans.plan_json import json_content
from hpml_compiler.plans.validation_errors import describe_errors
from passes.errors import BadInput
from passes.filesystem.text_files import is_device


class MixedPlan(MixedContent):
    """A split of the batch over device groups, with each group's plan; see the module's docstring."""

    # -- files ---------------------------------------------------------------------------------------------------------

    @classmethod
    def from_json(cls, text: str, where: str = "plan") -> MixedPlan:
        """Parse the plan in `text`; `where` names it in errors. Raises BadInput unless it is a complete, valid mixed plan."""
        remake = "make it again with `hpml plan TARGET --cluster A+B --save PLAN.json`"
        content = json_content(text, where, remake)
        if content.get("kind") != "mixed":
            raise BadInput(what="this plan is for devices of one kind, not a mixed plan", where=where,
                           next_step="read it with Plan.load")
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            raise BadInput(what=f"not a valid plan: {describe_errors(error)}", where=where, next_step=remake) from error

    # -- for people ----------------------------------------------------------------------------------------------------

    def table(self, width: int | None = None) -> str:
        """The split of the batch as text, then the table of each group's plan."""
        from hpml_compiler.plan_api.mixed_table import render_text

        return render_text(self, width)

    def render(self, path: str | os.PathLike[str], **options: Any) -> list[Path]:
        """Draw the plan of each group that takes part into its own file: plan.svg gives plan-0.svg, plan-1.svg."""
        path = Path(path)
        if is_device(path):
            return [group.plan.render(path, **options) for group in self.groups if group.plan]
        return [group.plan.render(path.with_stem(f"{path.stem}-{number}"), **options)
                for number, group in enumerate(self.groups) if group.plan]
