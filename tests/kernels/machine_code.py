"""Readers of PTX and SASS for the tests of the kernels."""

from __future__ import annotations

import importlib.util
import re
import subprocess
from pathlib import Path

import pytest


def cluster_barriers(ptx: str) -> list[str]:
    """Every cluster barrier instruction with its modifiers, in order."""
    return re.findall(r"barrier\.cluster\.(?:arrive|wait)[.a-z:]*", ptx)


def sass_of(cubin: bytes, folder: Path) -> list[str]:
    """The instructions of a cubin, one a line; skips the test where nvdisasm is not installed."""
    spec = importlib.util.find_spec("nvidia.cu13")
    places = list(spec.submodule_search_locations or ()) if spec is not None else []
    tools = [tool for place in places if (tool := Path(place) / "bin" / "nvdisasm").exists()]
    if not tools:
        pytest.skip("nvdisasm is not installed: pip install nvidia-cuda-nvdisasm")
    path = folder / "kernel.cubin"
    path.write_bytes(cubin)
    output = subprocess.run(
        [tools[0], "-c", path], check=True, capture_output=True, text=True
    ).stdout
    return [line for line in output.splitlines() if re.match(r"\s+/\*[0-9a-f]+\*/", line)]
