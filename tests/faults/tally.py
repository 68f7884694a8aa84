"""The tally of one test of the bar: what it tried, and everything that was not as promised."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

__all__ = ["Tally"]


@dataclass
class Tally:
    """Counts of one row, gathered by one test.

    `lost` are entries that were promised and are gone, `wrong` are wrong answers of any kind,
    `unhealed` is damage that the next ordinary run left, `notes` are measured figures. A
    test ends with exactly one of `clean` and `found`.
    """

    row: str
    control: bool
    tried: int = 0
    lost: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    unhealed: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    judged: bool = False

    @property
    def findings(self) -> list[str]:
        """All that was not as promised."""
        return [
            f"{kind}: {text}"
            for kind in ("lost", "wrong", "unhealed")
            for text in getattr(self, kind)
        ]

    def clean(self, *, at_least: int) -> None:
        """Fail where anything was found, or fewer than `at_least` faults were tried."""
        assert not self.control, "a control must find its planted bug"
        self.judged = True
        assert self.findings == [], self._listed()
        assert self.tried >= at_least, f"{self.row}: only {self.tried} tried, wanted {at_least}"

    def found(self) -> None:
        """Fail where the planted bug was not found: then the harness proves nothing."""
        assert self.control, "only a control ends with `found`"
        self.judged = True
        if not self.findings:
            pytest.fail(f"{self.row}: the planted bug was not found in {self.tried} tries")

    def _listed(self) -> str:
        shown = self.findings[:10]
        return f"{self.row}: {len(self.findings)} findings in {self.tried} tries:\n" + "\n".join(
            shown
        )

    def to_data(self) -> dict[str, Any]:
        """Numbers and notes for the recorder."""
        return {
            "notes": self.notes,
            "tried": self.tried,
            "lost": len(self.lost),
            "wrong": len(self.wrong),
            "unhealed": len(self.unhealed),
        }
