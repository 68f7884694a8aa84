"""The protocol between the builder and a compiler process: what both sides send, in one place.

A compiler process first writes a `Ready` as one JSON line. For each `Request`, one JSON line, it
writes a `Reply`, one JSON line, followed where `ok` by exactly `cubin_size` bytes of cubin and
`ptx_size` bytes of PTX. It ends at the end of its input.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from .key import CompileKey

__all__ = ["Compiled", "Ready", "Reply", "Request"]


class Compiled(NamedTuple):
    """Machine code of one key as the compiler returned it, not checked yet."""

    symbol: str
    cubin: bytes
    ptx: bytes


class Ready(msgspec.Struct, frozen=True):
    """The compiler process is up; `version` is the compiler's."""

    ready: bool
    version: str


class Request(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Compile this key."""

    key: CompileKey


class Reply(msgspec.Struct, frozen=True):
    """What became of a request: where not `ok`, `error` says why and no bytes follow."""

    ok: bool
    error: str = ""
    symbol: str = ""
    cubin_size: int = 0
    ptx_size: int = 0
