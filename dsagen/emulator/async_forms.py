"""mbarriers, bulk and tensor copies, and what threads of a cluster do in each other's shared memory."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from dsagen.emulator.operations import Arg, Lowering, Op, Unsupported, constant, items
from dsagen.emulator.syntax import Addr, Instruction, Operand, Sym

Form = Callable[[Lowering, Instruction, re.Match[str]], list[Op]]

# Flags of vm/mbarrier.cpp: an arrival or wait orders nothing, it does so beyond the CTA, it may reach another one.
_RELAXED, _CLUSTER_SCOPE, _ANY_CTA = 1, 2, 4
# The imm of an arrival there.
_DROP, _INCOMPLETE = 1, 2
# Flags of vm/bulk.cpp, and the bits from which a reduction is described.
_MULTICAST, _OWN_CTA, _REDUCES = 1, 2, 4
_REDUCTION_SHIFT = 8
_OPERATIONS = ("add", "min", "max", "and", "or", "xor", "exch", "cas", "inc", "dec")
# As enum Type of vm/atomics.cpp, with the bytes of an element.
_TYPES = {"b32": (0, 4), "u32": (0, 4), "s32": (1, 4), "b64": (0, 8), "u64": (0, 8), "s64": (1, 8)}
_TYPES |= {"f32": (2, 4), "f64": (3, 8), "f16": (4, 2), "bf16": (5, 2)}
# Operations that each type has, in shared and in global memory.
_IN_SHARED = {"b32": "and or xor", "u32": "add min max inc dec", "s32": "add min max", "u64": "add"}
_IN_GLOBAL = _IN_SHARED | {"b64": "and or xor", "u64": "add min max", "s64": "min max", "f32": "add", "f64": "add"}
_IN_GLOBAL |= {"f16": "add min max", "bf16": "add min max"}


def _scope(semantics: str | None, scope: str | None) -> int:
    if semantics == "relaxed":
        return _RELAXED
    return _CLUSTER_SCOPE if scope == "cluster" else 0


def _any_cta(space: str | None) -> int:
    return _ANY_CTA if space == ".shared::cluster" else 0


def _arrive(lowering: Lowering, ins: Instruction, match: re.Match[str]) -> list[Op]:
    drop, expects, incomplete, semantics, scope, space = match.groups()
    state, address, *rest = ins.operands
    flags = _scope(semantics, scope) | _any_cta(space)
    result = lowering.destination(state, 64)
    if len(rest) > 1 or (expects and (not rest or incomplete)) or (incomplete and (not rest or flags)):
        raise Unsupported
    # Another CTA's state is not to be had.
    if flags & _ANY_CTA and result.role != "trash":
        raise Unsupported
    count = lowering.source(rest[0], 32) if rest else Arg("use", constant(1, 32))
    args = [result, *lowering.address(address, wide=False), count]
    kind = (_DROP if drop else 0) | (_INCOMPLETE if incomplete else 0)
    return [Op("mbarrier_arrive_expect" if expects else "mbarrier_arrive", args, imm=kind, flags=flags)]


def _expect(lowering: Lowering, ins: Instruction, match: re.Match[str]) -> list[Op]:
    address, count = ins.operands
    args = [*lowering.address(address, wide=False), lowering.source(count, 32)]
    return [Op("mbarrier_expect", args, imm=1 if match[1] == "expect" else -1, flags=_any_cta(match[2]))]


def _wait(lowering: Lowering, ins: Instruction, match: re.Match[str]) -> list[Op]:
    parity, semantics, scope = match[1], match[2], match[3]
    # How long it may suspend the thread is no matter here.
    done, address, phase, *hint = ins.operands
    if len(hint) > 1:
        raise Unsupported
    value = lowering.source(phase, 32 if parity else 64)
    args = [lowering.predicate_result(done), *lowering.address(address, wide=False), value]
    return [Op("mbarrier_wait", args, imm=0 if parity else 1, flags=_scope(semantics, scope))]


def _reduction(operation: str | None, kind: str | None, known: dict[str, str]) -> int:
    """The flags of a reduction, 0 where there is none."""
    if operation is None or kind is None:
        return 0
    if operation not in known.get(kind, "").split():
        raise Unsupported
    number, size = _TYPES[kind]
    log_bytes = size.bit_length() - 1
    return _REDUCES | (_OPERATIONS.index(operation) | number << 4 | log_bytes << 8) << _REDUCTION_SHIFT


def _rest(operands: Sequence[Operand], hint: str | None) -> list[Operand]:
    """The operands without a cache policy, which is no matter here."""
    return list(operands[:-1] if hint else operands)


def _load(lowering: Lowering, ins: Instruction, match: re.Match[str]) -> list[Op]:
    space, multicast, hint = match.groups()
    to, source, size, barrier, *ranks = _rest(ins.operands, hint)
    args = [*lowering.address(to, wide=False), *lowering.address(source, wide=True), lowering.source(size, 32)]
    args += lowering.address(barrier, wide=False)
    return [Op("copy_bulk", [*args, _ranks(lowering, multicast, ranks)], flags=_load_flags(space, multicast))]


def _ranks(lowering: Lowering, multicast: str | None, ranks: Sequence[Operand]) -> Arg:
    if len(ranks) != (1 if multicast else 0):
        raise Unsupported
    return lowering.source(ranks[0], 16) if ranks else Arg("use", constant(0, 32))


def _load_flags(space: str, multicast: str | None) -> int:
    return (_MULTICAST if multicast else 0) | (_OWN_CTA if space == "cta" else 0)


def _exchange(lowering: Lowering, ins: Instruction, match: re.Match[str]) -> list[Op]:
    reduces, operation, kind = match.groups()
    if (operation is not None) != (reduces is not None):
        raise Unsupported
    to, source, size, barrier = ins.operands
    args = [*lowering.address(to, wide=False), *lowering.address(source, wide=False), lowering.source(size, 32)]
    args += lowering.address(barrier, wide=False)
    return [Op("copy_bulk_exchange", args, flags=_reduction(operation, kind, _IN_SHARED))]


def _store(lowering: Lowering, ins: Instruction, match: re.Match[str]) -> list[Op]:
    reduces, hint, operation, noftz, kind = match.groups()
    # Sums of halves say that they keep subnormals.
    keeps = operation == "add" and kind in ("f16", "bf16")
    if (operation is not None) != (reduces is not None) or bool(noftz) != keeps:
        raise Unsupported
    to, source, size = _rest(ins.operands, hint)
    args = [*lowering.address(to, wide=True), *lowering.address(source, wide=False), lowering.source(size, 32)]
    return [Op("copy_bulk_store", args, flags=_reduction(operation, kind, _IN_GLOBAL))]


def _tensor(lowering: Lowering, operand: Operand, rank: int) -> tuple[list[Arg], list[Arg]]:
    """The address of a tensor map, and the coordinates beside it."""
    if not isinstance(operand, Addr) or len(operand.coordinates) != rank:
        raise Unsupported
    return lowering.address(operand, wide=True), [lowering.source(item, 32) for item in operand.coordinates]


def _tensor_load(lowering: Lowering, ins: Instruction, match: re.Match[str]) -> list[Op]:
    rank, space, multicast, hint = int(match[1]), match[2], match[3], match[4]
    to, tensor, barrier, *ranks = _rest(ins.operands, hint)
    tensor_map, coordinates = _tensor(lowering, tensor, rank)
    args = [*lowering.address(to, wide=False), *tensor_map, *lowering.address(barrier, wide=False)]
    args += [_ranks(lowering, multicast, ranks), *coordinates]
    return [Op("copy_bulk_tensor", args, imm=rank, flags=_load_flags(space, multicast))]


def _tensor_store(lowering: Lowering, ins: Instruction, match: re.Match[str]) -> list[Op]:
    reduces, rank, operation, hint = match[1], int(match[2]), match[3], match[4]
    if (operation is not None) != (reduces is not None):
        raise Unsupported
    tensor, source = _rest(ins.operands, hint)
    tensor_map, coordinates = _tensor(lowering, tensor, rank)
    # The type is the tensor map's.
    flags = _REDUCES | _OPERATIONS.index(operation) << _REDUCTION_SHIFT if operation else 0
    args = [*tensor_map, *lowering.address(source, wide=False), *coordinates]
    return [Op("copy_bulk_tensor_store", args, imm=rank, flags=flags)]


def _prefetch(lowering: Lowering, ins: Instruction, match: re.Match[str]) -> list[Op]:
    address, size = _rest(ins.operands, match[1])
    return [Op("copy_bulk_prefetch", [*lowering.address(address, wide=True), lowering.source(size, 32)])]


def _prefetch_tensor(lowering: Lowering, ins: Instruction, match: re.Match[str]) -> list[Op]:
    (tensor,) = _rest(ins.operands, match[2])
    tensor_map, coordinates = _tensor(lowering, tensor, int(match[1]))
    return [Op("copy_bulk_prefetch", [*tensor_map, *coordinates], imm=int(match[1]))]


def _store_words(lowering: Lowering, ins: Instruction, match: re.Match[str]) -> list[Op]:
    count, bits = int(match[1] or 1), int(match[2])
    to, value, barrier = ins.operands
    values = items(value)
    if len(values) != count or count * bits > 128:
        raise Unsupported
    args = [*lowering.address(to, wide=False), *lowering.address(barrier, wide=False)]
    args += [lowering.source(item, bits) for item in values]
    log_bytes = 2 if bits == 32 else 3
    return [Op("copy_words", args, imm=count, flags=log_bytes << 8 << _REDUCTION_SHIFT)]


def _reduce_words(lowering: Lowering, ins: Instruction, match: re.Match[str]) -> list[Op]:
    operation, kind = match.groups()
    to, value, barrier = ins.operands
    args = [*lowering.address(to, wide=False), *lowering.address(barrier, wide=False)]
    args.append(lowering.source(value, 8 * _TYPES[kind][1]))
    return [Op("copy_words", args, imm=1, flags=_reduction(operation, kind, _IN_SHARED))]


def _mov_predicate(lowering: Lowering, ins: Instruction, match: re.Match[str]) -> list[Op]:
    to, value = ins.operands
    result = lowering.predicate_result(to)
    if isinstance(value, Sym) and value.name == "%is_explicit_cluster":
        return [Op("explicit_cluster", [result])]
    return [Op("mov_pred", [result, lowering.predicate(value)])]


_SPACE = r"(\.shared(?:::(?:cta|cluster))?)?"
_BYTES = r"\.mbarrier::complete_tx::bytes"
_HINT = r"(\.L2::cache_hint)?"
_OPERATION = rf"\.({'|'.join(_OPERATIONS)})"
_TYPE = rf"\.({'|'.join(_TYPES)})"

ASYNC_FORMS: tuple[tuple[str, Form], ...] = (
    (
        r"mbarrier\.arrive(_drop)?(\.expect_tx)?(\.noComplete)?(?:\.(release|relaxed)\.(cta|cluster))?"
        rf"{_SPACE}\.b64",
        _arrive,
    ),
    (rf"mbarrier\.(expect|complete)_tx(?:\.relaxed\.(?:cta|cluster))?{_SPACE}\.b64", _expect),
    (
        r"mbarrier\.(?:try|test)_wait(\.parity)?(?:\.(acquire|relaxed)\.(cta|cluster))?(?:\.shared(?:::cta)?)?\.b64",
        _wait,
    ),
    (rf"cp\.async\.bulk\.shared::(cta|cluster)\.global{_BYTES}(\.multicast::cluster)?{_HINT}", _load),
    (rf"cp\.(reduce\.)?async\.bulk\.shared::cluster\.shared::cta{_BYTES}(?:{_OPERATION}{_TYPE})?", _exchange),
    (
        rf"cp\.(reduce\.)?async\.bulk\.global\.shared::cta\.bulk_group{_HINT}(?:{_OPERATION}(\.noftz)?{_TYPE})?",
        _store,
    ),
    (
        rf"cp\.async\.bulk\.tensor\.([1-5])d\.shared::(cta|cluster)\.global(?:\.tile)?{_BYTES}"
        rf"(\.multicast::cluster)?{_HINT}",
        _tensor_load,
    ),
    (
        rf"cp\.(reduce\.)?async\.bulk\.tensor\.([1-5])d\.global\.shared::cta(?:{_OPERATION})?(?:\.tile)?\.bulk_group"
        rf"{_HINT}",
        _tensor_store,
    ),
    (rf"cp\.async\.bulk\.prefetch\.L2\.global{_HINT}", _prefetch),
    (rf"cp\.async\.bulk\.prefetch\.tensor\.([1-5])d\.L2\.global(?:\.tile)?{_HINT}", _prefetch_tensor),
    (rf"st\.async(?:\.weak)?\.shared::cluster{_BYTES}(?:\.v([24]))?\.[busf](32|64)", _store_words),
    (rf"red\.async(?:\.relaxed\.cluster)?\.shared::cluster{_BYTES}{_OPERATION}{_TYPE}", _reduce_words),
    (r"mov\.pred", _mov_predicate),
)
