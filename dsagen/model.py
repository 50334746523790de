"""Model presets: what a spec need not say because the model fixes it.

A preset gives dims, the KV formats in use, the width of the index rows and the softmax scale. Everything but the
dims may be overridden in the spec; `custom` fixes nothing.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from dsagen.errors import SpecError


@dataclass(frozen=True)
class IndexPreset:
    """The lightning indexer of a model: heads, all of them on every rank, dims of a key, and the format of its cache.

    `keys` None: engines store them in more than one way, so a spec says which.
    """

    heads: int
    dim: int
    keys: str | None


@dataclass(frozen=True)
class ModelPreset:
    """One model. `kv` and `extra_kv` are KV-format families, the top-k figures capacities in index columns.

    `extra_kv` None: no second cache unless the spec declares one. `d_rope` counts rotary dims among the last of d_qk.
    `sm_scale` None: 1 / sqrt(d_qk). `index` None: a spec with an indexer declares all of it.
    """

    name: str
    summary: str
    d_qk: int | None
    d_v: int | None
    d_rope: int | None
    kv: str | None
    topk: int | None
    extra_kv: str | None = None
    extra_topk: int | None = None
    sm_scale: float | None = None
    index: IndexPreset | None = None


CUSTOM = "custom"

_V32_INDEX = IndexPreset(64, 128, "fp8")
_V4_INDEX = IndexPreset(64, 128, None)
_V41_INDEX = IndexPreset(32, 128, None)
_GLM5_INDEX = IndexPreset(32, 128, "fp8")

_PRESETS = (
    # 192 is the width before absorption; 0.1 ln 40 + 1 is the YaRN attention factor, once for q and once for k.
    ModelPreset("v32", "DeepSeek-V3.2", 576, 512, 64, "v32", 2048, sm_scale=0.1352337788608801, index=_V32_INDEX),
    # Main cache: the 128-token window; extra cache: up to 1024 compressed tokens (V4-Flash takes 512).
    ModelPreset("v4", "DeepSeek-V4", 512, 512, 64, "v4", 128, "v4", 1024, sm_scale=512**-0.5, index=_V4_INDEX),
    ModelPreset("v41", "DeepSeek-V4.1", 512, 512, 64, "v41", 128, "v41_fp4", 512, sm_scale=512**-0.5, index=_V41_INDEX),
    # One FP4 cache for window and selection: 128 + 512 columns.
    ModelPreset(
        "v41_fp4", "DeepSeek-V4.1, FP4 main cache", 512, 512, 64, "v41_fp4", 640, sm_scale=512**-0.5, index=_V41_INDEX
    ),
    ModelPreset("glm5", "GLM-5", 576, 512, 64, "v32", 2048, sm_scale=256**-0.5, index=_GLM5_INDEX),
    # 2048 selected columns and up to 3 of the incomplete pool, padded to 128 by engines.
    ModelPreset(
        "glm5_nope",
        "GLM-5.3-Flash, no rotary dims",
        512,
        512,
        0,
        "v32_nope",
        2176,
        sm_scale=256**-0.5,
        index=_GLM5_INDEX,
    ),
    ModelPreset(CUSTOM, "nothing preset: dims follow the KV format", None, None, None, None, None),
)

MODELS: dict[str, ModelPreset] = {preset.name: preset for preset in _PRESETS}


def model_preset(name: str) -> ModelPreset:
    """The preset of that name; SpecError with the nearest one otherwise."""
    try:
        return MODELS[name]
    except (KeyError, TypeError):
        close = difflib.get_close_matches(name.lower(), MODELS, n=1, cutoff=0.4) if isinstance(name, str) else []
        hint = f" (did you mean {close[0]}?)" if close else ""
        raise SpecError(f"unknown model {name!r}{hint}: known are {', '.join(MODELS)}") from None
