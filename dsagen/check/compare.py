"""Whether a result is right: places of NaN and infinities, absolute or relative error, cosine, error per scale group.

The elementwise and cosine gates are those that FlashMLA's own tests apply to sparse decode. They let a systematic error
pass where values are small, so each group of value dims that shares a scale is held to a relative Frobenius error too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

# Relative errors divide by |want| plus this.
_RELATIVE_FLOOR = 1e-6
# Groups whose RMS is below this share of the RMS of all rows and heads carry no information about relative error.
_NEGLIGIBLE_GROUP = 0.05
# Bound on the relative error of an fp32 logit, accumulated in about 40 truncating matrix steps.
_LOGIT_ERROR = 4e-6


# Scale groups from this width on have a norm that chance hardly makes small.
_WIDE_GROUP_DIMS = 64


@dataclass(frozen=True)
class Gates:
    """Limits of one comparison. An element passes with an absolute *or* a relative error below its gate.

    `group_error` bounds the relative Frobenius error of a scale group's dims over all rows and heads, `head_error`
    that of one row and head: a single token's probability and its output are each rounded to bf16, by up to 2^-8. A
    group of less than 64 dims may be off by more, see _head_problem. One row of one token may be what a group consists
    of, since many tokens average: off by 2^-8 in all its elements, and by 0.0017 where each is rounded by itself.
    `out_abs_rms` adds an absolute gate in units of its group's RMS, for values whose magnitude is not about 1, and
    `out_abs_spread` one in units of an element's spread, see `DecodeReference`: of few dims that chance makes small the
    RMS says nothing about an element among them whose tokens are large and cancel.
    `lse_limit` holds for every finite lse, whatever the relative gate allows.
    """

    out_abs: float = 1e-3
    out_rel: float = 2.01 * 2.0**-7
    out_cos: float = 5e-6
    out_abs_rms: float = 0.0
    out_abs_spread: float = 0.0
    group_error: float = 4.3e-3
    head_error: float = 2 * 2.0**-8
    lse_abs: float = 1e-6
    lse_rel: float = 8.01 * 2.0**-16
    lse_cos: float = 5e-6
    lse_limit: float = 1e-3

    def for_logits(self, peak: float) -> Gates:
        """Gates for logits up to `peak` and any number of elements.

        The logits' rounding shows in an lse that happens to be near 0; and among many elements one near 0 meets a
        probability and an output that were both rounded the same way, which is 2 * 2^-8 of its group's RMS.
        """
        return replace(self, lse_abs=self.lse_abs + _LOGIT_ERROR * peak, out_abs_rms=2 * 2.0**-8)

    def for_peak(self, peak: float) -> Gates:
        """Gates for values of any magnitude and logits up to `peak`, whose own rounding then shows in the weights."""
        logit_error = _LOGIT_ERROR * peak
        group_error = self.group_error + 2 * logit_error
        return replace(
            self.for_logits(peak),
            out_abs=0.0,
            # Probabilities are off by up to 2^-8 each and independently: 3 times that is 7 standard deviations.
            out_abs_rms=10 * logit_error,
            out_abs_spread=3 * 2.0**-8,
            out_cos=self.out_cos + group_error**2,
            group_error=group_error,
            head_error=self.head_error + 2 * logit_error,
            lse_limit=self.lse_limit + logit_error,
        )


@dataclass(frozen=True)
class Comparison:
    """Result of one tensor. `worst_rel` is over elements beyond the absolute gate; `problem` is empty on a pass."""

    worst_abs: float
    worst_rel: float
    cos: float
    worst_group: float
    problem: str

    @property
    def passed(self) -> bool:
        """Whether every gate held."""
        return not self.problem


@dataclass(frozen=True)
class DecodeComparison:
    """Both outputs of sparse decode."""

    out: Comparison
    lse: Comparison

    @property
    def passed(self) -> bool:
        """Whether both are right."""
        return self.out.passed and self.lse.passed

    @property
    def problem(self) -> str:
        """What is wrong, empty when nothing is."""
        named = (("out", self.out.problem), ("lse", self.lse.problem))
        return "; ".join(f"{name}: {text}" for name, text in named if text)


def compare_decode(
    out: Tensor,
    lse: Tensor,
    want_out: Tensor,
    want_lse: Tensor,
    group_dims: int,
    gates: Gates,
    spread: Tensor | None = None,
) -> DecodeComparison:
    """Compare out [rows, heads, d_v] and lse [rows, heads] with fp64 references; problems say (row, head[, dim]).

    `group_dims` is the width of a scale group, which divides d_v. Gates in units of the spread need it.
    """
    compared = _compare_out(out, want_out, group_dims, gates, spread)
    return DecodeComparison(compared, _compare_lse(lse, want_lse, gates))


def _compare_out(got: Tensor, want: Tensor, group_dims: int, gates: Gates, spread: Tensor | None) -> Comparison:
    got = got.double()
    grouped = want.nan_to_num(0.0, 0.0, 0.0).reshape(*want.shape[:2], -1, group_dims)
    norm = grouped.square().mean(3).sqrt()
    out_abs: float | Tensor = gates.out_abs
    if gates.out_abs_rms:
        out_abs = out_abs + gates.out_abs_rms * norm.repeat_interleave(group_dims, 2)
    if gates.out_abs_spread:
        assert spread is not None, "the reference was not asked for the spread"
        out_abs = out_abs + gates.out_abs_spread * spread.nan_to_num(0.0, 0.0, 0.0)
    plain = _compare(got, want, out_abs, gates.out_rel, gates.out_cos)
    if plain.problem or want.numel() == 0:
        return plain
    difference = (got - want).nan_to_num(0.0, 0.0, 0.0).reshape(grouped.shape)
    typical = norm.square().mean((0, 1), keepdim=True).sqrt()
    heavy = (norm > _NEGLIGIBLE_GROUP * typical) & (norm > 0)
    error = torch.where(heavy, difference.square().mean(3).sqrt() / norm.masked_fill(~heavy, 1.0), 0.0)
    whole = difference * heavy.unsqueeze(3)
    power = (norm * heavy).square().sum((0, 1)) * group_dims
    per_group = (whole.square().sum((0, 1, 3)) / power.masked_fill(power == 0, 1.0)).sqrt()
    problem = _group_problem(per_group, group_dims, gates) or _head_problem(error, group_dims, gates)
    return replace(plain, worst_group=float(per_group.max()), problem=problem)


def _dims(group: int, group_dims: int) -> str:
    return f"dims {group * group_dims}..{(group + 1) * group_dims - 1}"


def _group_problem(error: Tensor, group_dims: int, gates: Gates) -> str:
    worst, group = error.max(0)
    if float(worst) <= gates.group_error:
        return ""
    text = f"relative Frobenius error {float(worst):.3g} > {gates.group_error:.3g}"
    return f"all rows and heads, {_dims(int(group), group_dims)}: {text}"


def _head_problem(error: Tensor, group_dims: int, gates: Gates) -> str:
    # Tokens may cancel in all dims of a narrow group at once, which leaves less for the same error to be relative to. A
    # scale of its neighbour in e4m3 is off by 6 % or more.
    limit = gates.head_error * max(1.0, (_WIDE_GROUP_DIMS / group_dims) ** 0.5)
    worst, where = error.flatten().max(0)
    if float(worst) <= limit:
        return ""
    row, head, group = _unravel(int(where), error.shape)
    text = f"relative Frobenius error {float(worst):.3g} > {limit:.3g}"
    return f"row {row}, head {head}, {_dims(group, group_dims)}: {text}"


def _compare_lse(got: Tensor, want: Tensor, gates: Gates) -> Comparison:
    plain = _compare(got.double(), want, gates.lse_abs, gates.lse_rel, gates.lse_cos)
    if plain.problem or plain.worst_abs <= gates.lse_limit:
        return plain
    return replace(plain, problem=f"absolute error {plain.worst_abs:.3g} > {gates.lse_limit:.3g}")


def _compare(got: Tensor, want: Tensor, abs_gate: float | Tensor, rel_gate: float, cos_gate: float) -> Comparison:
    if got.shape != want.shape:
        return Comparison(0.0, 0.0, 0.0, 0.0, f"shape {tuple(got.shape)}, expected {tuple(want.shape)}")
    if got.numel() == 0:
        return Comparison(0.0, 0.0, 0.0, 0.0, "")
    special = _kind(got) != _kind(want)
    if bool(special.any()):
        return Comparison(0.0, 0.0, 0.0, 0.0, f"NaN or infinity differs in {_first(special, got, want)}")
    finite = want.isfinite()
    a, b = got.masked_fill(~finite, 0.0), want.masked_fill(~finite, 0.0)
    error = (a - b).abs()
    relative = torch.where(error < abs_gate, 0.0, error / (b.abs() + _RELATIVE_FLOOR))
    bad = relative >= rel_gate
    power = a.square().sum() + b.square().sum()
    cos = torch.where(power > 0, (a - b).square().sum() / power, 0.0)
    worst_abs, worst_rel, cosine, bad_count = torch.stack(
        (error.max(), relative.max(), cos, bad.sum().double())
    ).tolist()
    problem = ""
    if bad_count:
        problem = f"{int(bad_count)} of {bad.numel()} elements off, first {_first(bad, got, want)}"
    elif not cosine < cos_gate:
        problem = f"cosine distance {cosine:.3g} >= {cos_gate:.3g}"
    return Comparison(worst_abs, worst_rel, cosine, 0.0, problem)


def _kind(x: Tensor) -> Tensor:
    """0 finite, 1 NaN, 2 +inf, 3 -inf."""
    return x.isnan().to(torch.uint8) + 2 * x.isposinf().to(torch.uint8) + 3 * x.isneginf().to(torch.uint8)


def _first(bad: Tensor, got: Tensor, want: Tensor) -> str:
    where = _unravel(int(bad.flatten().to(torch.uint8).argmax()), bad.shape)
    return f"{where}: {float(got[where]):.6g}, expected {float(want[where]):.6g}"


def _unravel(flat: int, shape: torch.Size) -> tuple[int, ...]:
    index: list[int] = []
    for extent in reversed(shape):
        flat, rest = divmod(flat, extent)
        index.append(rest)
    return tuple(reversed(index))
