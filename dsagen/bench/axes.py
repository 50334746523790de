"""A sweep by data: batches, query tokens, widths, head counts and KV formats in place of those of a spec."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

from dsagen.bench.data import DecodeCase
from dsagen.errors import SpecError
from dsagen.spec import DeploymentSpec

_CASE_AXES = ("batch", "s_q", "topk")


@dataclass(frozen=True)
class SweepAxes:
    """Values by axis; an empty one leaves what the spec, or the case list, has."""

    batch: tuple[int, ...] = ()
    s_q: tuple[int, ...] = ()
    topk: tuple[int, ...] = ()
    heads: tuple[int, ...] = ()
    kv: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return any((self.batch, self.s_q, self.topk, self.heads, self.kv))

    def specs(self, spec: DeploymentSpec) -> list[DeploymentSpec]:
        """The spec with each head count and KV format; SpecError for one that it cannot have."""
        found = []
        for heads, kv in product(self.heads or (None,), self.kv or (None,)):
            changes = {name: value for name, value in (("heads", heads), ("kv", kv)) if value is not None}
            if changes:
                suffix = "_".join(f"{name}{value}" for name, value in changes.items())
                found.append(spec.replace(**changes, name=f"{spec.name}_{suffix}"))
            else:
                found.append(spec)
        return found

    def cases(self, cases: Sequence[DecodeCase]) -> list[DecodeCase]:
        """The cases with each batch, s_q and topk that is given; SpecError for a shape that cannot be drawn."""
        found: list[DecodeCase] = []
        for case in cases:
            own = [getattr(self, name) or (getattr(case, name),) for name in _CASE_AXES]
            for values in product(*own):
                found.append(replace(case, **dict(zip(_CASE_AXES, values, strict=True))))
        return list(dict.fromkeys(found))


def parse_values(option: str, text: str | None) -> tuple[int, ...]:
    """Whole numbers of 1 and more from "1,4,16"; SpecError that names the option otherwise."""
    if text is None:
        return ()
    values = []
    for part in text.split(","):
        if not part.strip().isascii() or not part.strip().isdigit() or int(part) < 1:
            raise SpecError(f"{option} {text!r}: {part!r} is no whole number of 1 or more; expected such as 1,4,16")
        values.append(int(part))
    return tuple(dict.fromkeys(values))
