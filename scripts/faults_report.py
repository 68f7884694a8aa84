"""Writes the result of the reliability bar as JSON and as a table, with where it was run.

python scripts/faults_report.py ROWS.json docs/results/faults    faults.json and faults.md
python scripts/faults_report.py --tests                          tests elsewhere that hold a row
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from faults.bar import REFERENCES  # noqa: E402 - found only by the line above


def said(*command: str) -> str:
    """What a program prints, or nothing where it cannot be run."""
    try:
        ended = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return ended.stdout.strip()


def file_system(path: str) -> str:
    """The type of the file system that holds a path."""
    return (said("df", "--output=fstype", path).splitlines() or ["unknown"])[-1]


def machine() -> dict[str, Any]:
    """Where and on what the bar was run."""
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": said("git", "rev-parse", "HEAD"),
        "uncommitted_changes": bool(said("git", "status", "--porcelain")),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "strace": said("strace", "--version").partition("\n")[0].replace(" -- version", ""),
        "file_systems": {
            "stores on a disk": file_system("/tmp"),  # noqa: S108 - where pytest keeps its folders
            "stores in memory": file_system("/dev/shm"),  # noqa: S108
            "power loss": "ext4, data=ordered, on a loop device",
            "disk full": "tmpfs",
            "read-only": "bind mount, overlay, tmpfs",
        },
    }


def table(data: dict[str, Any]) -> str:
    """The rows as Markdown."""
    lines = [
        "# The reliability bar",
        "",
        f"{'Full' if data['full'] else 'CI'} size, {data['date']}, commit `{data['commit'][:12]}`"
        + (" with uncommitted changes" if data["uncommitted_changes"] else "")
        + f", Linux {data['kernel']}, Python {data['python']}, {data['strace'] or 'no strace'}.",
        "File systems: "
        + "; ".join(f"{name}: {kind}" for name, kind in data["file_systems"].items())
        + ".",
        "",
        "Made by `scripts/faults.sh --full`; what each harness does is told in",
        "[tests/faults/README.md](../../tests/faults/README.md). A control plants a bug, which its",
        "harness must find. Of a row that refers to tests elsewhere, their cases or reads count.",
        "",
        "| row | fault | tried | lost | wrong | unhealed | controls | skipped |",
        "|---|---|---:|---:|---:|---:|---|---|",
    ]
    for row in data["rows"]:
        found = {True: "found", False: "NOT FOUND", None: "-"}[row["control_found"]]
        lines.append(
            f"| {row['id']} | {row['fault']} | {row['tried']:,} | {row['lost']} | {row['wrong']} | "
            f"{row['unhealed']} | {row['controls']} {found} | {'; '.join(row['skipped'])} |"
        )
    notes = [f"- {row['id']}: {note}" for row in data["rows"] for note in row["notes"]]
    if notes:
        lines += ["", "Measured:", "", *notes]
    return "\n".join(lines) + "\n"


def main() -> int:
    if sys.argv[1:] == ["--tests"]:
        for name in sorted({f"tests/{one.test.partition('::')[0]}" for one in REFERENCES}):
            print(name)
        return 0
    rows, out = Path(sys.argv[1]), Path(sys.argv[2])
    data = {**json.loads(rows.read_text()), **machine()}
    out.parent.mkdir(parents=True, exist_ok=True)
    out.with_suffix(".json").write_text(json.dumps(data, indent=1) + "\n")
    out.with_suffix(".md").write_text(table(data))
    return 0


if __name__ == "__main__":
    sys.exit(main())
