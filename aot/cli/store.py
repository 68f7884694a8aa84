"""The commands that look into a store: `list`, `show`, `verify` and `path`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import click

from .command import HelpfulCommand, common_options, store_option
from .output import Output

if TYPE_CHECKING:
    from ..artifact import Artifact, Record
    from ..store import Store

__all__ = ["list_command", "path_command", "show_command", "verify_command"]

_STORE_VARIABLE = ("LLBF16_AOT_STORE",)
_SHOWN_CANDIDATES = 8


@click.command(
    "list",
    cls=HelpfulCommand,
    examples=(
        "llbf16-aot list",
        "llbf16-aot list --store /opt/kernels --json",
    ),
    variables=_STORE_VARIABLE,
)
@store_option
@common_options
@click.pass_obj
def list_command(output: Output, *, store_path: Path | None) -> None:
    """List every artifact of the store, verified, one a line.

    A damaged entry stands in the list as such; what is wrong with it is told on stderr.
    """
    from ..artifact import Artifact
    from ..plan import KEY_HEADER, key_cells
    from ..text import short, size, table

    store = _open(store_path)
    rows: list[tuple[str, ...]] = []
    entries: list[dict[str, object]] = []
    for digest in store.digests():
        found = store.get(digest)
        if isinstance(found, Artifact):
            record = found.record
            rows.append((short(digest), *key_cells(record.key), size(record.cubin.size_bytes)))
            entries.append({"digest": digest, "record": _record_data(record)})
        else:
            rows.append((short(digest), found.reason.value, *[""] * len(KEY_HEADER)))
            output.warn(f"{short(digest)} cannot be used: {found.detail}")
            entries.append({"digest": digest, "reason": found.reason.value, "detail": found.detail})
    if not rows:
        output.note(f"the store at {_quoted(store)} has no entries")
    text = table(("artifact", *KEY_HEADER, "size"), rows) if rows else ""
    output.result({"store": str(store.root), "entries": entries}, text)


@click.command(
    "show",
    cls=HelpfulCommand,
    examples=(
        "llbf16-aot show 3f2a9c1b",
        "llbf16-aot show 3f2a9c1b --json",
    ),
    variables=_STORE_VARIABLE,
)
@click.argument("digest", metavar="KEY")
@store_option
@common_options
@click.pass_obj
def show_command(output: Output, *, digest: str, store_path: Path | None) -> None:
    """Show one artifact: key, launch, resources and origin.

    KEY is the digest of the artifact's key, or the beginning of it that only one has.
    """
    store = _open(store_path)
    found = _find(store, digest)
    record = found.record
    output.result(
        {
            "digest": found.digest,
            "record": _record_data(record),
            "cubin_path": str(store.cubin_path(record)),
        },
        _record_text(found, store.cubin_path(record)),
    )


@click.command(
    "verify",
    cls=HelpfulCommand,
    examples=(
        "llbf16-aot verify",
        "llbf16-aot verify 3f2a9c1b --store /opt/kernels",
    ),
    variables=_STORE_VARIABLE,
)
@click.argument("digests", metavar="[KEY...]", nargs=-1)
@store_option
@common_options
@click.pass_obj
def verify_command(output: Output, *, digests: tuple[str, ...], store_path: Path | None) -> None:
    """Read every byte of the entries; fail if one was changed.

    Without KEY all entries are verified. Exit code 4 if one is damaged.
    """
    from ..artifact import Artifact
    from ..errors import DamagedEntryError
    from ..text import counted, short, table

    store = _open(store_path)
    chosen = tuple(_resolve(store, d) for d in digests) if digests else store.digests()
    rows: list[tuple[str, str, str]] = []
    entries: list[dict[str, object]] = []
    damaged = 0
    for digest in dict.fromkeys(chosen):
        found = store.get(digest)
        if isinstance(found, Artifact):
            rows.append((short(digest), "ok", str(found.record.key)))
            entries.append({"digest": digest, "ok": True, "reason": "", "detail": ""})
        else:
            damaged += 1
            rows.append((short(digest), found.reason.value, found.detail))
            entries.append(
                {
                    "digest": digest,
                    "ok": False,
                    "reason": found.reason.value,
                    "detail": found.detail,
                }
            )
    data = {"store": str(store.root), "entries": entries}
    text = table(("artifact", "state", "kernel, or what is wrong"), rows) if rows else ""
    if damaged:
        output.fail(
            DamagedEntryError(
                f"{damaged} of {counted(len(rows), 'entry')} of {_quoted(store)} cannot be used",
                hint=f"replace what is damaged with: {_command(store, 'build', 'MANIFEST')}",
            ),
            data,
            text,
        )
    if not rows:
        output.note(f"the store at {_quoted(store)} has no entries")
    output.result(data, text)


@click.command(
    "path",
    cls=HelpfulCommand,
    examples=(
        "llbf16-aot path",
        "cuobjdump -sass $(llbf16-aot path 3f2a9c1b)",
    ),
    variables=_STORE_VARIABLE,
)
@click.argument("digest", metavar="[KEY]", required=False)
@store_option
@common_options
@click.pass_obj
def path_command(output: Output, *, digest: str | None, store_path: Path | None) -> None:
    """Print where the store is, or where one cubin lies.

    The store need not exist yet.
    """
    store = _open(store_path)
    path = store.root if digest is None else store.cubin_path(_find(store, digest).record)
    output.result({"path": str(path)}, str(path))


def _open(store_path: Path | None) -> Store:
    from ..environment import Environment
    from ..store import Store

    return Store(Environment().store_location(store_path).root)


def _resolve(store: Store, beginning: str) -> str:
    """The one digest with this beginning; NotFoundError names the candidates if there are more."""
    from ..errors import NotFoundError, UsageError

    if not re.fullmatch(r"[0-9a-f]{1,64}", beginning):
        raise UsageError(
            f"{beginning!r} is no digest and no beginning of one",
            hint=f"see the digests with: {_command(store, 'list')}",
        )
    found = [digest for digest in store.digests() if digest.startswith(beginning)]
    if len(found) == 1:
        return found[0]
    if not found:
        raise NotFoundError(
            f"the store at {_quoted(store)} has no entry {beginning}",
            hint=f"see the entries with: {_command(store, 'list')}",
        )
    shown = "\n".join(f"- {digest}" for digest in found[:_SHOWN_CANDIDATES])
    more = len(found) - _SHOWN_CANDIDATES
    raise NotFoundError(
        f"{len(found)} entries begin with {beginning}:\n{shown}"
        + (f"\n- and {more} more" if more > 0 else ""),
        hint="give more digits",
    )


def _find(store: Store, beginning: str) -> Artifact:
    from ..artifact import Artifact
    from ..errors import DamagedEntryError

    digest = _resolve(store, beginning)
    found = store.get(digest)
    if isinstance(found, Artifact):
        return found
    raise DamagedEntryError(
        f"the entry {digest} of {_quoted(store)} cannot be used: {found.detail}",
        hint=f"replace what is damaged with: {_command(store, 'build', 'MANIFEST')}",
    )


def _quoted(store: Store) -> str:
    """The store's path as it can be pasted into a shell."""
    from ..files import command

    return command(str(store.root))


def _command(store: Store, *words: str) -> str:
    """A command that can be pasted and works on this very store."""
    from ..environment import Environment
    from ..errors import AotError
    from ..files import command

    try:
        found = Environment().store_location().root
    except AotError:
        found = None
    given = () if found == store.root else ("--store", str(store.root))
    return command("llbf16-aot", *words, *given)


def _record_data(record: Record) -> dict[str, object]:
    import msgspec

    data: dict[str, object] = msgspec.to_builtins(record)
    return data


def _record_text(found: Artifact, path: Path) -> str:
    from ..plan import kernel_text
    from ..text import size, table

    record = found.record
    key, launch, resources = record.key, record.launch, record.resources
    provenance = record.provenance
    grid = ", ".join(
        str(dim.blocks)
        if dim.extent.value == "one"
        else f"ceil({dim.extent.value} / {dim.tile})"
        + (f" * {dim.blocks}" if dim.blocks > 1 else "")
        for dim in launch.grid
    )
    sections: dict[str, list[tuple[str, str]]] = {
        "key": [
            ("digest", found.digest),
            ("kernel", key.backend),
            ("tile", kernel_text(key)),
            ("types", f"{key.x_dtype.value} x {key.weight_dtype.value} -> {key.out_dtype.value}"),
            ("layout", key.layout.value),
            ("alignment", f"{key.alignment_bytes} bytes"),
            ("epilogue", key.epilogue.value),
            ("dependent launch", "on" if key.pdl else "off"),
            ("target", key.target),
        ],
        "launch": [
            ("symbol", launch.symbol),
            ("grid", grid),
            ("block", " x ".join(map(str, launch.block))),
            ("cluster", " x ".join(map(str, launch.cluster))),
            ("dynamic shared memory", size(launch.dynamic_shared_bytes)),
            ("attributes", ", ".join(a.value for a in launch.attributes) or "none"),
            ("parameters", ", ".join(f"{p.source.value}@{p.offset_bytes}" for p in launch.params)),
        ],
        "resources": [
            ("registers", f"{resources.registers} a thread"),
            ("static shared memory", size(resources.static_shared_bytes)),
            ("spills", f"{resources.local_bytes} bytes a thread"),
        ],
        "origin": [
            ("builder", provenance.builder_version),
            *sorted(provenance.toolchain.items()),
            ("options", " ".join(provenance.options) or "none"),
            ("kernel sources", provenance.kernel_source_digest),
        ],
        "cubin": [
            ("size", f"{size(record.cubin.size_bytes)} ({record.cubin.size_bytes} bytes)"),
            ("sha256", record.cubin.digest),
            ("path", str(path)),
        ],
    }
    return "\n\n".join(
        f"{name}\n" + table(("", "", ""), (("", *row) for row in rows)).lstrip("\n")
        for name, rows in sections.items()
    )
