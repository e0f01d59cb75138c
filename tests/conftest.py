"""Settings for all tests: generated cases have no deadline, for a busy machine is no fault of the code."""

from __future__ import annotations

import os

from hypothesis import settings

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
settings.register_profile("project", deadline=None, print_blob=True)
settings.load_profile("project")
