"""The commands that look into a store: `list`, `show`, `verify` and `path`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from .command import HelpfulCommand, common_options, layer_option, store_option
from .opened import STORE_VARIABLES, hint_command, open_below, open_store, quoted, resolve
from .output import Output

if TYPE_CHECKING:
    from ..artifact import Artifact
    from ..errors import AotError
    from ..repair import Repair
    from ..scan import Entry
    from ..store import Miss, Store

__all__ = ["list_command", "path_command", "show_command", "verify_command"]


@click.command(
    "list",
    cls=HelpfulCommand,
    examples=(
        "llbf16-aot list",
        "llbf16-aot list --store /opt/kernels --json",
    ),
    variables=STORE_VARIABLES,
)
@store_option
@layer_option
@common_options
@click.pass_obj
def list_command(
    output: Output, *, store_path: Path | None, layer_paths: tuple[Path, ...] | None
) -> None:
    """List every artifact of the store and its layers, one a line.

    Records are read and checked, cubins are looked for: `verify` reads those, too. A damaged entry
    stands in the list as such; what is wrong with it is told on stderr.
    """
    from ..scan import uncollected

    with uncollected():
        _list(output, open_store(store_path), open_below(layer_paths))


def _list(output: Output, store: Store, layers: tuple[Store, ...]) -> None:
    from ..plan import KEY_HEADER, key_cells
    from ..text import short, size, table

    found = _listed((store, *layers))
    rows: list[tuple[str, ...]] = []
    entries: list[dict[str, object]] = []
    some_pinned = any(entry.pinned for entry, _ in found)
    for entry, source in found:
        data: dict[str, object] = {
            "digest": entry.digest,
            "from": str(source.root),
            "pinned": entry.pinned,
        }
        extra = (("pinned" if entry.pinned else "",) if some_pinned else ()) + (
            (str(source.root),) if layers else ()
        )
        if entry.record is not None and entry.reason is None:
            record = entry.record
            weight = size(record.cubin.size_bytes)
            rows.append((short(entry.digest), *key_cells(record.key), weight, *extra))
            data["record"] = record
        else:
            reason = "damaged" if entry.reason is None else entry.reason.value
            rows.append((short(entry.digest), reason, *[""] * len(KEY_HEADER), *extra))
            output.warn(f"{short(entry.digest)} cannot be used: {entry.detail}")
            data |= {"reason": reason, "detail": entry.detail}
        entries.append(data)
    if not rows:
        output.note(f"the store at {quoted(store)} has no entries")
    header = ["artifact", *KEY_HEADER, "size"]
    header += ["pin"] if some_pinned else []
    header += ["from"] if layers else []
    result = {
        "store": str(store.root),
        "layers": [str(layer.root) for layer in layers],
        "entries": entries,
    }
    output.result(result, table(header, rows) if rows else "")


@click.command(
    "show",
    cls=HelpfulCommand,
    examples=(
        "llbf16-aot show 3f2a9c1b",
        "llbf16-aot show 3f2a9c1b --json",
    ),
    variables=STORE_VARIABLES,
)
@click.argument("digest", metavar="KEY")
@store_option
@layer_option
@common_options
@click.pass_obj
def show_command(
    output: Output, *, digest: str, store_path: Path | None, layer_paths: tuple[Path, ...] | None
) -> None:
    """Show one artifact: key, launch, resources and origin.

    KEY is the digest of the artifact's key, or the beginning of it that only one has.
    """
    from ..pins import pins

    store, layers = open_store(store_path), open_below(layer_paths)
    found, source = _find((store, *layers), digest)
    record = found.record
    pinned = found.digest in pins(source)
    path = source.cubin_path(record)
    output.result(
        {
            "digest": found.digest,
            "from": str(source.root),
            "pinned": pinned,
            "record": record,
            "cubin_path": str(path),
        },
        _record_text(found, path, pinned=pinned),
    )


@click.command(
    "verify",
    cls=HelpfulCommand,
    examples=(
        "llbf16-aot verify",
        "llbf16-aot verify 3f2a9c1b --store /opt/kernels",
        "llbf16-aot verify --repair",
    ),
    variables=STORE_VARIABLES,
)
@click.argument("digests", metavar="[KEY...]", nargs=-1)
@click.option(
    "--repair",
    is_flag=True,
    help="Remove what is damaged in the store, so that the next build makes it anew.",
)
@store_option
@layer_option
@common_options
@click.pass_obj
def verify_command(
    output: Output,
    *,
    digests: tuple[str, ...],
    repair: bool,
    store_path: Path | None,
    layer_paths: tuple[Path, ...] | None,
) -> None:
    """Read every byte of the entries; fail if one was changed.

    Without KEY all entries are verified. Exit code 4 if one is damaged or not to be trusted, else 5
    if one cannot be read. With --repair what is damaged is removed, and exit code 0 says that
    nothing damaged is left. Layers are never repaired.
    """
    from ..repair import repair as repair_store
    from ..text import counted, table

    store, layers = open_store(store_path), open_below(layer_paths)
    sources = (store, *layers)
    chosen = tuple(dict.fromkeys(resolve(d, _digests(sources), store=store) for d in digests))
    mended = None
    if repair and store.root.exists():
        mended = repair_store(store, frozenset(chosen) if digests else None)
    rows: list[tuple[str, ...]] = []
    entries: list[dict[str, object]] = []
    bad: list[tuple[Miss, Store]] = []
    for source in sources:
        there = source.digests()
        for digest in chosen or (() if digests else there):
            if digest not in there:
                continue
            row, data, miss = _verified(source, digest)
            rows.append((*row, str(source.root)) if layers else row)
            entries.append(data)
            bad += [] if miss is None else [(miss, source)]
    header = ["artifact", "state", "kernel, or what is wrong", *(["from"] if layers else [])]
    text = table(header, rows) if rows else ""
    data = {"store": str(store.root), "entries": entries}
    if mended is not None:
        data["repaired"] = _repair_data(mended)
        text = "\n\n".join(filter(None, (_repair_text(mended), text)))
    if bad:
        output.fail(_verify_error(bad, counted(len(rows), "entry"), store), data, text)
    if not rows:
        output.note(f"the store at {quoted(store)} has no entries")
    output.result(data, text)


@click.command(
    "path",
    cls=HelpfulCommand,
    examples=(
        "llbf16-aot path",
        "cuobjdump -sass $(llbf16-aot path 3f2a9c1b)",
    ),
    variables=STORE_VARIABLES,
)
@click.argument("digest", metavar="[KEY]", required=False)
@store_option
@layer_option
@common_options
@click.pass_obj
def path_command(
    output: Output,
    *,
    digest: str | None,
    store_path: Path | None,
    layer_paths: tuple[Path, ...] | None,
) -> None:
    """Print where the store is, or where one cubin lies.

    The store need not exist yet.
    """
    store = open_store(store_path)
    path = store.root
    if digest is not None:
        found, source = _find((store, *open_below(layer_paths)), digest)
        path = source.cubin_path(found.record)
    output.result({"path": str(path)}, str(path))


def _digests(sources: tuple[Store, ...]) -> set[str]:
    return {digest for source in sources for digest in source.digests()}


def _listed(sources: tuple[Store, ...]) -> list[tuple[Entry, Store]]:
    """Each entry once, sorted, from the first store where nothing speaks against it."""
    from ..scan import scan

    found: dict[str, tuple[Entry, Store]] = {}
    for source in sources:
        for entry in scan(source).entries:
            before = found.get(entry.digest)
            if before is None or (before[0].reason is not None and entry.reason is None):
                found[entry.digest] = (entry, source)
    return [found[digest] for digest in sorted(found)]


def _find(sources: tuple[Store, ...], beginning: str) -> tuple[Artifact, Store]:
    """The first sound artifact of an entry, and the store that has it."""
    from ..artifact import Artifact
    from ..errors import DamagedEntryError
    from ..store import MissReason

    store = sources[0]
    digest = resolve(beginning, _digests(sources), store=store)
    details = []
    for source in sources:
        found = source.get(digest)
        if isinstance(found, Artifact):
            return found, source
        if found.reason is not MissReason.ABSENT:
            details.append((source, found.detail))
    where, detail = details[0] if details else (store, "it went away meanwhile")
    raise DamagedEntryError(
        f"the entry {digest} of {quoted(where)} cannot be used: {detail}",
        hint=f"replace what is damaged with: {hint_command(store, 'build', 'MANIFEST')}",
    )


def _verified(
    source: Store, digest: str
) -> tuple[tuple[str, str, str], dict[str, object], Miss | None]:
    """A row, data, and what is wrong with one entry."""
    from ..artifact import Artifact
    from ..text import short

    found = source.get(digest)
    data: dict[str, object] = {"digest": digest, "from": str(source.root)}
    if isinstance(found, Artifact):
        data |= {"ok": True, "reason": "", "detail": ""}
        return (short(digest), "ok", str(found.record.key)), data, None
    data |= {"ok": False, "reason": found.reason.value, "detail": found.detail}
    return (short(digest), found.reason.value, found.detail), data, found


def _verify_error(bad: list[tuple[Miss, Store]], of: str, store: Store) -> AotError:
    from ..errors import DamagedEntryError, StoreError
    from ..store import MissReason

    message = f"{len(bad)} of {of} of {quoted(bad[0][1])} cannot be used"
    build = hint_command(store, "build", "MANIFEST")
    if all(miss.reason is MissReason.UNREADABLE for miss, _ in bad):
        return StoreError(message, hint=f"mend what the system says, or run: {build}")
    if any(source is not store for _, source in bad):
        return DamagedEntryError(message, hint=f"install the layer anew, or run: {build}")
    return DamagedEntryError(message, hint=f"replace what is damaged with: {build}")


def _repair_data(mended: Repair) -> dict[str, object]:
    import msgspec

    data: dict[str, object] = msgspec.to_builtins(mended)
    return data


def _repair_text(mended: Repair) -> str:
    lines = [f"removed the entry {miss.digest}: {miss.detail}" for miss in mended.entries]
    lines += [f"removed the damaged file {path}" for path in mended.blobs]
    lines += [f"left {miss.digest}: {miss.detail}" for miss in mended.left]
    return "\n".join(lines) or "nothing to repair"


def _record_text(found: Artifact, path: Path, *, pinned: bool) -> str:
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
            ("pinned", "yes" if pinned else "no"),
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
