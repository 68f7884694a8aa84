"""The command line: a thin layer over the builder and the store."""

from __future__ import annotations

from .app import main

__all__ = ["main"]
