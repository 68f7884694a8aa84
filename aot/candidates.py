"""The plan of a candidate build: everything that a tuning run wants to measure."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

from .errors import UsageError
from .key import CompileKey
from .plan import PROBE_MODEL, BuildPlan, manifest_targets, plan_keys
from .problem import DType, Problem, Target
from .search import candidate_keys, probe_keys

if TYPE_CHECKING:
    from .layers import ArtifactSource
    from .manifest import Manifest

__all__ = ["plan_candidates"]


def plan_candidates(
    *manifests: Manifest,
    store: ArtifactSource,
    targets: Iterable[Target | str] = (),
    force: bool = False,
    backends: Collection[str] = (),
) -> BuildPlan:
    """Decide what to compile so that every tile of the manifests' routers can be measured.

    Where `backends` names families, only tiles of theirs.

    Tiles are measured with fp32 output and dependent launch, whatever the routers ask for: the
    output's type and the launch change what a call costs, not which tile is best. Routers whose x
    is fp32 are left out: no tile of theirs is tuned. Has no needs, so a build of it proves no
    coverage. Raises what `plan_build` raises.
    """
    keys: dict[str, CompileKey] = {}
    models: dict[str, dict[str, None]] = {}
    for manifest, wanted in manifest_targets(manifests, targets):
        for key in probe_keys(wanted):
            keys[key.digest()] = key
            models[key.digest()] = {PROBE_MODEL: None}
        for target in wanted:
            for router in manifest.routers:
                if router.x_dtype is not DType.BF16:
                    continue
                problems = (
                    Problem(
                        tokens,
                        router.experts,
                        router.hidden,
                        DType.FP32,
                        True,
                        weight_dtype=router.weight_dtype,
                    )
                    for tokens in router.tokens
                )
                for key in candidate_keys(problems, target, backends=backends):
                    digest = key.digest()
                    keys[digest] = key
                    models.setdefault(digest, {})[router.model] = None
    if backends and not any(key.backend in backends for key in keys.values()):
        raise UsageError(
            f"no candidate of {', '.join(backends)} for these manifests",
            hint="name other kernel families, or leave out --backend",
        )
    return plan_keys(keys, models, manifests, store=store, force=force, needs=())
