"""Imported last -> what is there by then is no longer looked through for garbage, here and in what is forked from here.

Models and optimizers are made later, so those that search the memory for them find the same ones, in a fifth less time.
"""
from __future__ import annotations

import gc

gc.collect()
gc.freeze()
