"""Word that a rank leaves for the launcher when an error ends it."""
from __future__ import annotations

import json
import logging
import math
import os
import time

log = logging.getLogger("hpml")


def write_error_file(error: BaseException, noticed: bool) -> None:
    """For torchrun's agent on this node, where it asks for it; `hpml run` begins its report with it. noticed: whether this rank
    only noticed that another one is late or gone."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path or os.path.exists(path):
        return
    # The agent blames the earliest, in whole seconds. Who only noticed does not come before who failed in the same second, and
    # does come before whom the agent kills afterwards, such as a rank that was stopped.
    now = time.time()
    word = {"message": str(error) if noticed else f"{type(error).__name__}: {error}", "noticed": noticed,
            "timestamp": math.ceil(now) if noticed else int(now)}
    try:
        with open(path, "w") as file:
            json.dump(word, file)
    except OSError as failed:
        log.debug("no word left for the agent: %s", failed)
