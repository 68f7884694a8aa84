"""The command `explain`."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

import click

from .command import HelpfulCommand, common_options, layer_option, store_option
from .opened import STORE_VARIABLES, open_below, open_store, resolve
from .output import Output

if TYPE_CHECKING:
    from ..explain import Explanation
    from ..plan import BuildPlan
    from ..scan import Entry
    from ..store import Store

__all__ = ["explain_command"]

_KEY = re.compile(r"[0-9a-f]{1,64}")


@click.command(
    "explain",
    cls=HelpfulCommand,
    examples=(
        "llbf16-aot explain dsv4",
        "llbf16-aot explain 3f2a9c1b",
        "llbf16-aot explain my-routers.yaml --target sm_90a --json",
    ),
    variables=STORE_VARIABLES,
)
@click.argument("what", metavar="KEY|MANIFEST")
@click.option(
    "--target",
    "targets",
    metavar="TARGET",
    multiple=True,
    help="Explain for this target, in place of the manifest's own; repeatable.",
)
@store_option
@layer_option
@common_options
@click.pass_obj
def explain_command(
    output: Output,
    *,
    what: str,
    targets: tuple[str, ...],
    store_path: Path | None,
    layer_paths: tuple[Path, ...] | None,
) -> None:
    """Tell why an artifact is present, stale or absent, field by field.

    KEY is the digest of an entry, or the beginning of one. For a MANIFEST, a path or a name, every
    artifact that it needs is explained; an absent one is compared with the nearest entry.
    """
    from ..explain import explain_entry
    from ..toolchain import toolchain

    store, layers = open_store(store_path), open_below(layer_paths)
    known = _entries((store, *layers))
    if _is_key(what):
        digest = resolve(what, known, store=store)
        found = explain_entry(known[digest], known, toolchain())
        output.result({"store": str(store.root), "artifacts": [_data(found)]}, str(found))
        return
    plan, explained = _explain_manifest(what, targets, store, known)
    counts = {status: sum(e.status.value == status for e in explained) for status in _STATUSES}
    text = "\n\n".join(str(found) for found in explained)
    summary = ", ".join(f"{number} {status}" for status, number in counts.items() if number)
    if plan.gaps:
        summary += f"; no kernel for {len(plan.gaps)} problems"
    output.result(
        {
            "store": str(store.root),
            "manifests": plan.manifests,
            "counts": counts,
            "artifacts": [_data(found) for found in explained],
        },
        f"{text}\n\n{summary}" if text else summary,
    )


_STATUSES = ("present", "stale", "absent", "damaged")


def _is_key(what: str) -> bool:
    """Whether a word is a digest, and no manifest that somebody named like one."""
    from ..manifest import packaged_manifests

    return (
        _KEY.fullmatch(what) is not None
        and what not in packaged_manifests()
        and not os.path.exists(what)
    )


def _entries(sources: tuple[Store, ...]) -> dict[str, Entry]:
    """The entries of all stores by digest, of each the first against which nothing speaks."""
    from ..scan import scan

    found: dict[str, Entry] = {}
    for source in sources:
        for entry in scan(source).entries:
            before = found.get(entry.digest)
            if before is None or (before.reason is not None and entry.reason is None):
                found[entry.digest] = entry
    return found


def _explain_manifest(
    name: str, targets: tuple[str, ...], store: Store, known: dict[str, Entry]
) -> tuple[BuildPlan, list[Explanation]]:
    from ..explain import explain_item
    from ..manifest import Manifest
    from ..plan import plan_build

    plan = plan_build(Manifest.load(name), store=store, targets=targets)
    return plan, [explain_item(item, known, plan.compiler) for item in plan.items]


def _data(found: Explanation) -> dict[str, object]:
    import msgspec

    data: dict[str, object] = msgspec.to_builtins(found)
    return data
