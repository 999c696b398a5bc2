"""Error file of a rank, read by torchrun's agent."""
from __future__ import annotations

import json
import logging
import math
import os
import time

log = logging.getLogger("hpml")


def write_error_file(error: BaseException, noticed: bool) -> None:
    """Write the error to torchrun's error file, if it asked for one; `hpml run` prints it first. noticed: this rank
    only noticed that another rank is late or gone."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path or os.path.exists(path):
        return
    # The agent blames the earliest failure, in whole seconds. A rank that only noticed must come after one that failed in the
    # same second, and before ranks that the agent kills afterwards, such as a stopped one.
    now = time.time()
    word = {"message": str(error) if noticed else f"{type(error).__name__}: {error}", "noticed": noticed,
            "timestamp": math.ceil(now) if noticed else int(now)}
    try:
        with open(path, "w") as file:
            json.dump(word, file)
    except OSError as failed:
        log.debug("cannot write the error file: %s", failed)
