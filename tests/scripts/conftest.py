"""The programs of `scripts/` import each other by name: their folder goes on the import path."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "scripts"))
