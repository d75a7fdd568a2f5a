"""What every run does once, done once for all runs that are forks: the parent of forks imports this last."""

from __future__ import annotations

import sys

IMPORTED_BY_A_START = frozenset(sys.modules)
"""What a run has imported before it reads its data."""

import deepspeed  # noqa: E402, F401 - accelerate imports it when transformers stores a model
import pyarrow.parquet  # noqa: E402, F401 - the data of most runs is a table
from transformers.conversion_mapping import get_checkpoint_conversion_mapping  # noqa: E402 - after the record

get_checkpoint_conversion_mapping("qwen2")  # it compiles hundreds of regular expressions, and keeps them
