"""Which machine instruction an opcode becomes: one row per form.

A row is (pattern of the opcode, name in the machine, operands). In name and operands `{1}`, `{2}`, .. are the pattern's
groups, `{w}` twice the bits of the last group. Operands, in the order of the PTX text, each with its bits where it is a
register: `d32` destination, `s32` source, `p` and `q` predicate destination and source, `i` a literal, `A` a 32-bit
shared or `G` a 64-bit global address, `-` one that is dropped. `p?` takes a sink where the text has none, `=n` is the
constant n, which the text does not have. Forms that a row cannot describe have a function in forms.py.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

# Integer types: the sign only matters where a pattern keeps it.
_U = {"b": "u", "u": "u", "s": "s"}


@dataclass(frozen=True)
class Rule:
    """A row of the table. `imm` is the instruction's constant, `flags` its other one."""

    pattern: re.Pattern[str]
    name: str
    operands: str
    imm: int = 0
    flags: int = 0

    def fill(self, match: re.Match[str]) -> tuple[str, list[str]]:
        """Machine name and operand kinds for a matched opcode."""
        groups = ["" if group is None else group.strip(".").replace(".", "_") for group in match.groups()]
        last = groups[-1] if groups and groups[-1].isdigit() else "0"
        name = self.name.format("", *groups, w=2 * int(last))
        kinds = self.operands.format("", *groups, w=2 * int(last)).split()
        return re.sub(r"_+", "_", name).strip("_"), kinds


def _rule(pattern: str, name: str, operands: str, imm: int = 0, flags: int = 0) -> Rule:
    return Rule(re.compile(pattern + r"\Z"), name, operands, imm, flags)


_INTEGER = (
    _rule(r"(add|sub)\.[us](16|32|64)", "{1}_b{2}", "d{2} s{2} s{2}"),
    _rule(r"(min|max|div|rem)\.([us])(16|32|64)", "{1}_{2}{3}", "d{3} s{3} s{3}"),
    _rule(r"mul\.lo\.[us](16|32|64)", "mul_lo_b{1}", "d{1} s{1} s{1}"),
    _rule(r"mul\.hi\.([us])(16|32|64)", "mul_hi_{1}{2}", "d{2} s{2} s{2}"),
    _rule(r"mul\.wide\.([us])(16|32)", "mul_wide_{1}{2}", "d{w} s{2} s{2}"),
    _rule(r"mad\.lo\.[us](16|32|64)", "mad_lo_b{1}", "d{1} s{1} s{1} s{1}"),
    _rule(r"mad\.hi\.([us])(16|32|64)", "mad_hi_{1}{2}", "d{2} s{2} s{2} s{2}"),
    _rule(r"mad\.wide\.([us])(16|32)", "mad_wide_{1}{2}", "d{w} s{2} s{2} s{w}"),
    _rule(r"(abs|neg)\.s(16|32|64)", "{1}_s{2}", "d{2} s{2}"),
    _rule(r"not\.b(16|32|64)", "not_b{1}", "d{1} s{1}"),
    _rule(r"(and|or|xor)\.b(16|32|64)", "{1}_b{2}", "d{2} s{2} s{2}"),
    _rule(r"(and|or|xor)\.pred", "{1}_pred", "p q q"),
    _rule(r"not\.pred", "not_pred", "p q"),
    _rule(r"shl\.b(16|32|64)", "shl_b{1}", "d{1} s{1} s32"),
    _rule(r"shr\.[ub](16|32|64)", "shr_u{1}", "d{1} s{1} s32"),
    _rule(r"shr\.s(16|32|64)", "shr_s{1}", "d{1} s{1} s32"),
    _rule(r"(popc|clz)\.b(32|64)", "{1}_b{2}", "d32 s{2}"),
    _rule(r"brev\.b(32|64)", "brev_b{1}", "d{1} s{1}"),
    _rule(r"bfind\.([us])(32|64)", "bfind_{1}{2}", "d32 s{2}"),
    _rule(r"bfind\.shiftamt\.([us])(32|64)", "bfind_shift_{1}{2}", "d32 s{2}"),
    _rule(r"fns\.b32", "fns_b32", "d32 s32 s32 s32"),
    _rule(r"bmsk\.(clamp|wrap)\.b32", "bmsk_{1}", "d32 s32 s32"),
    _rule(r"szext\.(clamp|wrap)\.([us]32)", "szext_{1}_{2}", "d32 s32 s32"),
    _rule(r"cnot\.b(16|32|64)", "not_logical_b{1}", "d{1} s{1}"),
    _rule(r"sad\.([us])(16|32|64)", "sad_{1}{2}", "d{2} s{2} s{2} s{2}"),
    _rule(r"mul24\.(lo|hi)\.([us]32)", "mul_24_{1}_{2}", "d32 s32 s32"),
    _rule(r"(add|sub)\.sat\.s32", "{1}_sat_s32", "d32 s32 s32"),
    _rule(r"mad\.hi\.sat\.s32", "mad_hi_sat_s32", "d32 s32 s32 s32"),
    _rule(r"prmt\.b32", "prmt_b32", "d32 s32 s32 s32"),
    _rule(r"shf\.([lr])\.(wrap|clamp)\.b32", "shf_{1}_{2}", "d32 s32 s32 s32"),
    _rule(r"bfe\.([us])(32|64)", "bfe_{1}{2}", "d{2} s{2} s32 s32"),
    _rule(r"bfi\.b(32|64)", "bfi_b{1}", "d{1} s{1} s{1} s32 s32"),
    _rule(r"lop3\.b32", "lop3_b32", "d32 s32 s32 s32 i"),
    _rule(r"dp4a\.([us]32)\.([us]32)", "dp4a_{1}_{2}", "d32 s32 s32 s32"),
    _rule(r"dp2a\.(lo|hi)\.([us]32)\.([us]32)", "dp2a_{1}_{2}_{3}", "d32 s32 s32 s32"),
    _rule(r"selp\.[usbf](16|32|64)", "selp_b{1}", "d{1} s{1} s{1} q"),
)

_F2 = r"(?:\.rn)?(\.ftz)?\.f32"
_FLOAT = (
    _rule(rf"(add|sub|mul){_F2}", "{1}_{2}_f32", "d32 s32 s32"),
    _rule(r"(?:fma|mad)\.rn(\.ftz)?\.f32", "fma_{1}_f32", "d32 s32 s32 s32"),
    _rule(r"div\.(?:rn|full|approx)(\.ftz)?\.f32", "div_{1}_f32", "d32 s32 s32"),
    _rule(r"(min|max)(\.ftz)?\.f32", "{1}_{2}_f32", "d32 s32 s32"),
    _rule(r"(abs|neg)(\.ftz)?\.f32", "{1}_{2}_f32", "d32 s32"),
    _rule(r"(rcp|sqrt|rsqrt)\.(?:rn|approx)(\.ftz)?\.f32", "{1}_{2}_f32", "d32 s32"),
    _rule(r"(ex2|lg2)\.approx(\.ftz)?\.f32", "{1}_{2}_f32", "d32 s32"),
    _rule(r"sin\.approx(\.ftz)?\.f32", "sin_{1}_f32", "d32 s32"),
    _rule(r"(cos|tanh)\.approx(?:\.ftz)?\.f32", "{1}_f32", "d32 s32"),
    _rule(r"copysign\.f(32|64)", "copysign_f{1}", "d{1} s{1} s{1}"),
    *(
        _rule(rf"testp\.{kind}\.f(32|64)", "testp_f{1}", "p s{1}", imm)
        for imm, kind in enumerate(("finite", "infinite", "number", "notanumber", "normal", "subnormal"))
    ),
    _rule(r"(add|sub|mul|div)(?:\.rn)?\.f64", "{1}_f64", "d64 s64 s64"),
    _rule(r"(min|max)\.f64", "{1}_f64", "d64 s64 s64"),
    _rule(r"(abs|neg)\.f64", "{1}_f64", "d64 s64"),
    _rule(r"(rcp|sqrt|rsqrt)\.(?:rn|approx\.ftz|approx)\.f64", "{1}_f64", "d64 s64"),
    _rule(r"(?:fma|mad)\.rn\.f64", "fma_f64", "d64 s64 s64 s64"),
    _rule(r"(add|sub|mul)(?:\.rn)?\.(b?f16)", "{1}_{2}", "d16 s16 s16"),
    _rule(r"(add|sub|mul)(?:\.rn)?\.(b?f16x2)", "{1}_{2}", "d32 s32 s32"),
    _rule(r"fma\.rn\.(b?f16)", "fma_{1}", "d16 s16 s16 s16"),
    _rule(r"fma\.rn\.(b?f16x2)", "fma_{1}", "d32 s32 s32 s32"),
    _rule(r"(neg|abs)\.b?f16", "{1}_f16", "d16 s16"),
    _rule(r"(neg|abs)\.b?f16x2", "{1}_f16x2", "d32 s32"),
)

_INT = r"(u8|s8|u16|s16|u32|s32|u64|s64)"
_CONVERT = (
    _rule(r"cvt\.(rni|rzi|rmi|rpi)\.([us](16|32|64))\.f(32|64)", "cvt_{1}_{2}_f{4}", "d{3} s{4}"),
    _rule(r"cvt\.(rni|rzi|rmi|rpi)\.f(32|64)\.f\2", "cvt_{1}_f{2}_f{2}", "d{2} s{2}"),
    _rule(r"cvt\.rn\.f(32|64)\.([us](16|32|64))", "cvt_rn_f{1}_{2}", "d{1} s{3}"),
    _rule(r"cvt\.rn\.f32\.([us]8)", "cvt_rn_f32_{1}", "d32 s16"),
    _rule(r"cvt\.f64\.f32", "cvt_f64_f32", "d64 s32"),
    _rule(r"cvt\.rn\.f32\.f64", "cvt_rn_f32_f64", "d32 s64"),
    _rule(r"cvt\.sat\.f32\.f32", "cvt_sat_f32_f32", "d32 s32"),
    _rule(r"cvt\.f32\.(b?f16)", "cvt_f32_{1}", "d32 s16"),
    _rule(r"cvt\.rn\.(b?f16)\.f32", "cvt_rn_{1}_f32", "d16 s32"),
    _rule(r"cvt\.rn\.(b?f16x2)\.f32", "cvt_rn_{1}_f32", "d32 s32 s32"),
    _rule(r"cvt\.rn\.f16x2\.e4m3x2", "cvt_rn_f16x2_e4m3x2", "d32 s16"),
)

_FLOAT_REDUCTIONS = [rf"{kind}{rest}" for rest in ("", r"\.abs", r"\.NaN", r"\.abs\.NaN") for kind in ("min", "max")]
_WARP = (
    *(
        _rule(rf"shfl\.sync\.{mode}\.b32", "shfl", "d32|p? s32 s32 s32 s32", imm)
        for imm, mode in enumerate(("up", "down", "bfly", "idx"))
    ),
    *(_rule(rf"vote\.sync\.{mode}\.pred", "vote", "p q s32", imm) for imm, mode in enumerate(("all", "any", "uni"))),
    _rule(r"vote\.sync\.ballot\.b32", "vote", "d32 q s32", 3),
    _rule(r"elect\.sync", "elect", "d32|p? s32"),
    _rule(r"bar\.warp\.sync", "bar_warp_sync", "s32"),
    _rule(r"match\.any\.sync\.b(32|64)", "match_any_b{1}", "d32 s{1} s32"),
    _rule(r"match\.all\.sync\.b(32|64)", "match_all_b{1}", "d32|p? s{1} s32"),
    *(
        _rule(rf"redux\.sync\.{kind}\.f32", "redux", "d32 s32 s32", 8, flags)
        for flags, kind in enumerate(_FLOAT_REDUCTIONS)
    ),
    *(
        _rule(rf"redux\.sync\.{kind}", "redux", "d32 s32 s32", imm)
        for imm, kind in enumerate((r"add\.[us]32", r"min\.s32", r"max\.s32", r"min\.u32", r"max\.u32", r"and\.b32"))
    ),
    _rule(r"redux\.sync\.or\.b32", "redux", "d32 s32 s32", 6),
    _rule(r"redux\.sync\.xor\.b32", "redux", "d32 s32 s32", 7),
    _rule(r"activemask\.b32", "activemask", "d32"),
    _rule(r"ret(?:\.uni)?|exit", "exit", ""),
    _rule(r"trap", "trap", ""),
    _rule(r"brkpt", "trap", "", 1),
    _rule(r"pmevent(?:\.mask)?", "nothing", "-"),
    _rule(r"nanosleep\.u32", "pause", "-"),
    _rule(r"movmatrix\.sync\.aligned\.m8n8\.trans\.b16", "movmatrix", "d32 s32"),
)

_SHARED = r"(?:\.shared(?:::cta)?)?"
_ASYNC = (
    _rule(r"cp\.async\.commit_group", "copy_async_commit", ""),
    _rule(r"cp\.async\.wait_group", "copy_async_wait", "i"),
    _rule(r"cp\.async\.wait_all", "copy_async_wait", "", -1),
    _rule(rf"cp\.async\.mbarrier\.arrive\.noinc{_SHARED}\.b64", "copy_async_arrive", "A"),
    _rule(rf"cp\.async\.mbarrier\.arrive{_SHARED}\.b64", "copy_async_arrive", "A", 1),
    _rule(rf"mbarrier\.init{_SHARED}\.b64", "mbarrier_init", "A s32"),
    _rule(rf"mbarrier\.inval{_SHARED}\.b64", "mbarrier_inval", "A"),
    _rule(r"mbarrier\.pending_count\.b64", "mbarrier_pending", "d32 s64"),
    _rule(r"cp\.async\.bulk\.commit_group", "copy_bulk_commit", ""),
    _rule(r"cp\.async\.bulk\.wait_group", "copy_bulk_wait", "i"),
    _rule(r"cp\.async\.bulk\.wait_group\.read", "copy_bulk_wait", "i", 0, 1),
    *(
        _rule(rf"barrier\.cluster\.{text}{aligned}", name, "", 0, flags | (1 if aligned else 0))
        for text, name, flags in (
            (r"arrive(?:\.release)?", "barrier_cluster_arrive", 0),
            (r"arrive\.relaxed", "barrier_cluster_arrive", 2),
            (r"wait(?:\.acquire)?", "barrier_cluster_wait", 0),
        )
        for aligned in ("", r"\.aligned")
    ),
    _rule(r"wgmma\.fence\.sync\.aligned", "warpgroup_fence", ""),
    _rule(r"wgmma\.commit_group\.sync\.aligned", "warpgroup_commit", ""),
    _rule(r"wgmma\.wait_group\.sync\.aligned", "warpgroup_wait", "i"),
    _rule(r"mapa(?:\.shared::cluster)?\.u32", "mapa", "d32 s32 s32"),
    _rule(r"mapa\.u64", "mapa", "d64 s64 s32", 1),
    _rule(r"getctarank\.shared::cluster\.u32", "cta_rank", "d32 s32"),
    _rule(r"getctarank\.u64", "cta_rank", "d32 s64"),
    _rule(r"fence\.proxy\.async[\w.:]*", "fence_proxy", ""),
    _rule(r"fence\.mbarrier_init\.release\.cluster", "fence_mbarrier_init", ""),
    _rule(r"fence\.proxy\.[\w.:]+", "nothing", "-? -?"),
    _rule(r"(?:fence(?:\.(?:sc|acq_rel))?|membar)\.cta", "fence", "", 0),
    _rule(r"(?:fence(?:\.(?:sc|acq_rel))?|membar)\.(?:cluster|gpu|gl|sys)", "fence", "", 1),
    _rule(r"griddepcontrol\.launch_dependents", "nothing", ""),
    _rule(r"griddepcontrol\.wait", "grid_wait", ""),
    _rule(r"setmaxnreg\.(?:inc|dec)\.sync\.aligned\.u32", "set_registers", "i"),
    _rule(r"prefetch[\w.:]*|discard[\w.:]*|applypriority[\w.:]*", "nothing", "- -?"),
)

RULES: tuple[Rule, ...] = (*_INTEGER, *_FLOAT, *_CONVERT, *_WARP, *_ASYNC)


def find_rule(opcode: str) -> tuple[Rule, str, list[str]] | None:
    """The row for an opcode, with machine name and operand kinds filled in."""
    for rule in RULES:
        match = rule.pattern.match(opcode)
        if match is not None:
            name, kinds = rule.fill(match)
            return rule, name, kinds
    return None
