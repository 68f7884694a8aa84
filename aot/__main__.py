"""`python -m llbf16_aot` is the command `llbf16-aot`."""

from __future__ import annotations

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
