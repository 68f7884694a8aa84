"""The commands that take entries out of a store, or keep them in it: `prune`, `rm` and `pin`."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ..errors import AotError, UsageError
from .command import HelpfulCommand, common_options, store_option
from .opened import hint_command, open_store, quoted, resolve
from .output import Output

if TYPE_CHECKING:
    from ..prune import PruneOutcome, PrunePlan
    from ..store import Store

__all__ = ["pin_command", "prune_command", "rm_command"]

_VARIABLES = ("LLBF16_AOT_STORE",)

_SIZE = re.compile(r"(?P<number>[0-9]{1,15}(?:\.[0-9]{1,3})?) ?(?P<unit>[KMGT]i?B?|B|)", re.I)
_AGE = re.compile(r"(?P<number>[0-9]{1,9}) ?(?P<unit>s|m|h|d|w)", re.I)
_POWERS = {"": 0, "b": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}


def parse_size(text: str) -> int:
    """Bytes of a size such as `500M`, `1.5GiB` or `4096`: units are powers of 1024."""
    found = _SIZE.fullmatch(text)
    if found is None:
        raise UsageError(f"{text!r} is no size", hint="write a size as 500M, 2GiB or 1048576")
    return int(float(found["number"]) * 1024 ** _POWERS[found["unit"].lower()[:1]])


def parse_age(text: str) -> float:
    """Seconds of an age such as `90d`, `12h` or `2w`."""
    found = _AGE.fullmatch(text)
    if found is None:
        raise UsageError(f"{text!r} is no age", hint="write an age as 30d, 12h, 15m or 2w")
    return float(int(found["number"]) * _SECONDS[found["unit"].lower()])


@click.command(
    "prune",
    cls=HelpfulCommand,
    examples=(
        "llbf16-aot prune --max-size 500M --dry-run",
        "llbf16-aot prune --older-than 90d --yes",
        "llbf16-aot prune --unreferenced-by dsv4 --unreferenced-by my-routers.yaml",
    ),
    variables=_VARIABLES,
)
@click.option("--max-size", metavar="SIZE", help="Let at most this stay, as 500M or 2GiB.")
@click.option(
    "--older-than", metavar="AGE", help="Remove what was not built or kept for so long, as 90d."
)
@click.option(
    "--unreferenced-by",
    "manifests",
    metavar="MANIFEST",
    multiple=True,
    help="Remove what none of these manifests needs; repeatable.",
)
@click.option("--dry-run", is_flag=True, help="Print what would be removed, and remove nothing.")
@click.option("-y", "--yes", is_flag=True, help="Remove without asking.")
@store_option
@common_options
@click.pass_obj
def prune_command(
    output: Output,
    *,
    max_size: str | None,
    older_than: str | None,
    manifests: tuple[str, ...],
    dry_run: bool,
    yes: bool,
    store_path: Path | None,
) -> None:
    """Remove entries that are too old, too many or not needed.

    Goes by the time when an entry was published or last kept by a build; what was used longest ago
    goes first. Pinned entries stay. Without a rule only files go that no entry needs. Loading an
    artifact leaves no trace: pin what servers use, or name its manifest.
    """
    from ..prune import PruneRules, plan_prune, read_clock
    from ..scan import scan

    store = open_store(store_path)
    rules = PruneRules(
        max_bytes=None if max_size is None else parse_size(max_size),
        older_than_s=None if older_than is None else parse_age(older_than),
        needed=_needed(manifests) if manifests else None,
    )
    plan = plan_prune(scan(store), rules, read_clock(store), store=store.root)
    outcome = None if dry_run else _carry_out(output, plan, store, yes=yes)
    data, text = _result(plan, outcome)
    if plan.over_bytes:
        output.fail(
            AotError(
                f"pinned entries keep the store {plan.over_bytes} bytes above the limit",
                hint=f"see the pins with: {hint_command(store, 'list')}",
            ),
            data,
            text,
        )
    output.result(data, text)


@click.command(
    "rm",
    cls=HelpfulCommand,
    examples=("llbf16-aot rm 3f2a9c1b", "llbf16-aot rm 3f2a9c1b 77d0 --dry-run"),
    variables=_VARIABLES,
)
@click.argument("digests", metavar="KEY...", nargs=-1, required=True)
@click.option("--dry-run", is_flag=True, help="Print what would be removed, and remove nothing.")
@store_option
@common_options
@click.pass_obj
def rm_command(
    output: Output, *, digests: tuple[str, ...], dry_run: bool, store_path: Path | None
) -> None:
    """Remove entries, and the files that only they need.

    KEY is a digest, or the beginning of one that only one entry has. A pinned entry is not removed.
    """
    from ..prune import Clock, execute_prune, plan_removal, read_clock
    from ..scan import scan

    store = open_store(store_path)
    found = scan(store)
    known = [entry.digest for entry in found.entries]
    chosen = tuple(dict.fromkeys(resolve(digest, known, store=store) for digest in digests))
    for entry in found.entries:
        if entry.digest in chosen and entry.pinned:
            raise AotError(
                f"the entry {entry.digest} is pinned",
                hint=f"take the pin away with: "
                f"{hint_command(store, 'pin', '--remove', entry.digest)}",
            )
    clock: Clock = read_clock(store)
    plan = plan_removal(found, chosen, clock, store=store.root)
    data, text = _result(plan, None if dry_run else execute_prune(plan, store))
    output.result(data, text)


@click.command(
    "pin",
    cls=HelpfulCommand,
    examples=(
        "llbf16-aot pin 3f2a9c1b",
        "llbf16-aot pin --manifest dsv4",
        "llbf16-aot pin --remove 3f2a9c1b",
    ),
    variables=_VARIABLES,
)
@click.argument("digests", metavar="[KEY...]", nargs=-1)
@click.option(
    "--manifest",
    "manifests",
    metavar="MANIFEST",
    multiple=True,
    help="Pin all that a manifest needs, built or not; repeatable.",
)
@click.option("--remove", is_flag=True, help="Take pins away.")
@store_option
@common_options
@click.pass_obj
def pin_command(
    output: Output,
    *,
    digests: tuple[str, ...],
    manifests: tuple[str, ...],
    remove: bool,
    store_path: Path | None,
) -> None:
    """Pin entries, so that no pruning removes them.

    KEY is a digest, or the beginning of one that only one entry has. Without KEY and manifest the
    pins are listed.
    """
    from ..pins import pin, pins, unpin

    store = open_store(store_path)
    before = pins(store)
    known = store.digests()
    places = (*known, *before) if remove else known
    chosen = {resolve(digest, places, store=store) for digest in digests}
    if manifests:
        chosen |= _needed(manifests)
    if remove and not chosen:
        raise UsageError("nothing to unpin", hint="name a KEY or a --manifest")
    if chosen:
        (unpin if remove else pin)(store, sorted(chosen))
    after = pins(store) if chosen else before
    absent = after.difference(known)
    rows = [f"{digest}  (no entry yet)" if digest in absent else digest for digest in sorted(after)]
    if not rows:
        output.note(f"the store at {quoted(store)} has no pins")
    output.result(
        {"store": str(store.root), "pins": sorted(after), "absent": sorted(absent)},
        "\n".join(rows),
    )


def _needed(manifests: tuple[str, ...]) -> frozenset[str]:
    """The digests that these manifests ask for, on their own targets."""
    from ..manifest import Manifest
    from ..plan import needed_digests

    return needed_digests(*(Manifest.load(name) for name in manifests))


def _carry_out(output: Output, plan: PrunePlan, store: Store, *, yes: bool) -> PruneOutcome | None:
    """Do it, after asking where somebody can answer; None where they said no."""
    from ..prune import execute_prune

    if plan.removals and not yes:
        if output.json or not (sys.stdin.isatty() and sys.stderr.isatty()):
            data, text = _result(plan, None)
            output.fail(
                UsageError(
                    f"{len(plan.removals)} entries would be removed, and nobody can be asked",
                    hint="say --yes to remove them, or --dry-run to see them only",
                ),
                data,
                text,
            )
        output.note(str(plan))
        if not click.confirm("remove them?", err=True):
            return None
    return execute_prune(plan, store)


def _result(plan: PrunePlan, outcome: PruneOutcome | None) -> tuple[dict[str, object], str]:
    """Plan and outcome as data and text."""
    import msgspec

    done: object = None if outcome is None else msgspec.to_builtins(outcome)
    text = str(plan) if outcome is None else f"{plan}\n{outcome}"
    return {"plan": plan.to_data(), "done": done}, text
