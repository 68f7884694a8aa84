"""The command `schema`."""

from __future__ import annotations

import json

import click

from .command import HelpfulCommand, common_options
from .output import Output

__all__ = ["schema_command"]


@click.command(
    "schema",
    cls=HelpfulCommand,
    examples=(
        "llbf16-aot schema > llbf16-aot.schema.json",
        "# first line of a manifest, for editors that speak yaml-language-server:",
        "# yaml-language-server: $schema=llbf16-aot.schema.json",
    ),
)
@common_options
@click.pass_obj
def schema_command(output: Output) -> None:
    """Print the JSON Schema of manifests, for editors.

    The schema is of draft-07. With --json it stands in the field `manifest`.
    """
    from ..manifest_schema import json_schema

    schema = json_schema()
    output.result({"manifest": schema}, json.dumps(schema, indent=2))
