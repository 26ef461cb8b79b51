"""Speed and memory, as ratios of two things measured in one run: ``python -m benchmarks --help``."""

import os

os.environ["SAFEMERGE_CACHE"] = ""  # nothing that an earlier run worked out
