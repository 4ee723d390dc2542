"""One thread per process, in the tests and in the scripts that they start: many small runs share the cores."""

import os

os.environ["OMP_NUM_THREADS"] = "1"
