"""What the commands that look into stores share: opening them, and finding an entry by its key."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import AotError, NotFoundError, UsageError

if TYPE_CHECKING:
    from ..store import Store

__all__ = ["STORE_VARIABLES", "hint_command", "open_below", "open_store", "quoted", "resolve"]

STORE_VARIABLES = ("LLBF16_AOT_STORE", "LLBF16_AOT_LAYERS")

_SHOWN_CANDIDATES = 8


def open_store(store_path: Path | None) -> Store:
    """The writable store."""
    from ..environment import Environment
    from ..store import Store

    return Store(Environment().store_location(store_path).root)


def open_below(layer_paths: tuple[Path, ...] | None) -> tuple[Store, ...]:
    """The read-only stores below it, first to last."""
    from ..environment import Environment
    from ..store import Store

    return tuple(map(Store, Environment().layers if layer_paths is None else layer_paths))


def resolve(beginning: str, known: Iterable[str], *, store: Store, what: str = "entry") -> str:
    """The one digest with this beginning; NotFoundError names the candidates if there are more."""
    if not re.fullmatch(r"[0-9a-f]{1,64}", beginning):
        raise UsageError(
            f"{beginning!r} is no digest and no beginning of one",
            hint=f"see the digests with: {hint_command(store, 'list')}",
        )
    found = sorted({digest for digest in known if digest.startswith(beginning)})
    if len(found) == 1:
        return found[0]
    if not found:
        raise NotFoundError(
            f"the store at {quoted(store)} has no {what} {beginning}",
            hint=f"see the entries with: {hint_command(store, 'list')}",
        )
    shown = "\n".join(f"- {digest}" for digest in found[:_SHOWN_CANDIDATES])
    more = len(found) - _SHOWN_CANDIDATES
    raise NotFoundError(
        f"{len(found)} entries begin with {beginning}:\n{shown}"
        + (f"\n- and {more} more" if more > 0 else ""),
        hint="give more digits",
    )


def quoted(store: Store) -> str:
    """The store's path as it can be pasted into a shell."""
    from ..files import command

    return command(str(store.root))


def hint_command(store: Store, *words: str) -> str:
    """A command that can be pasted and works on this very store."""
    from ..environment import Environment
    from ..files import command

    try:
        found = Environment().store_location().root
    except AotError:
        found = None
    given = () if found == store.root else ("--store", str(store.root))
    return command("llbf16-aot", *words, *given)
