"""dsagen compiles a deployment's declaration to exactly the sparse-attention kernels that it needs.

`load(spec)` gives the kernels of a deployment on a device, `DeploymentSpec` is the declaration. All are imported on
first use, so that `import dsagen` is cheap and needs neither torch nor a toolkit nor a driver.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dsagen.runtime.api import Kernels, load
    from dsagen.runtime.emulated import EmulatorOptions
    from dsagen.runtime.sparse_decode import SparseDecodePlan
    from dsagen.spec import DeploymentSpec

__version__ = "0.1.0"

__all__ = ["DeploymentSpec", "EmulatorOptions", "Kernels", "SparseDecodePlan", "__version__", "load"]

_HOME = {
    "DeploymentSpec": "dsagen.spec",
    "EmulatorOptions": "dsagen.runtime.emulated",
    "Kernels": "dsagen.runtime.api",
    "SparseDecodePlan": "dsagen.runtime.sparse_decode",
    "load": "dsagen.runtime.api",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'dsagen' has no attribute {name!r}; it has {', '.join(__all__)}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
