"""What each prim computes on the machine."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import pytest
from host import COMPILER, FOLDER, HostModelError
from small_kernel import arrive_by_copies, bulk, run
from sparse_rows import bf16_bits, bf16_value, e4m3_table

from dsagen.render import templates_folder

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++")


def test_load_under_a_condition() -> None:
    out, _ = run(
        "const Words4 w = ptx::load_global_16_if(t % 2 == 0, in + (t % 2 == 0 ? 4 * t : 1 << 20));"
        "out[t] = ptx::float_of(w.x) + ptx::float_of(w.w);"
    )
    t = np.arange(64)
    assert np.array_equal(out[:64], np.where(t % 2 == 0, 8 * t + 3, 0))
    with pytest.raises(HostModelError, match=r"load_global_16_if .*is in no tensor"):
        run("ptx::load_global_16_if(t == 9, in + 256);")


def test_eight_bytes_of_shared_memory() -> None:
    out, _ = run(
        "ptx::store_shared_8(tile + 8 * t, static_cast<u64>(t) << 32 | 7u); ptx::barrier_sync(0, 64);"
        "const Words4 w = ptx::load_shared_16(tile + 16 * (t / 2)); out[t] = w.x + (t % 2 ? w.w : w.y);"
    )
    assert np.array_equal(out[:64], 7 + np.arange(64))
    out, _ = run(
        "ptx::store_shared_4(tile + 4 * t, t); ptx::barrier_sync(0, 64);"
        "const Words2 w = ptx::load_shared_8(tile + 8 * (t / 2)); out[t] = t % 2 ? w.y : w.x;"
    )
    assert np.array_equal(out[:64], np.arange(64))
    with pytest.raises(HostModelError, match=r"load_shared_8 .*is not a multiple of 8"):
        run("ptx::load_shared_8(tile + 4);")
    with pytest.raises(HostModelError, match="is not a multiple of 8"):
        run("ptx::store_shared_8(tile + 4 + 8 * t, 0);")


def test_shuffles_votes_and_barriers() -> None:
    out, counts = run(
        "out[t] = ptx::shuffle(t, 5); out[64 + t] = ptx::shuffle_xor(t, 3); "
        "out[128 + t] = ptx::ballot(lane % 2) == 0xaaaaaaaau;\n"
        "const bool a = ptx::barrier_any(0, 64, t == 40);\nconst bool b = ptx::barrier_any(0, 64, false); "
        "out[192 + t] = a + 2 * b;"
    )
    t = np.arange(64)
    assert np.array_equal(out, np.concatenate([t // 32 * 32 + 5, t ^ 3, np.ones(64), np.ones(64)]))
    assert (counts.barriers, counts.collectives) == (2, 6)


@pytest.mark.parametrize("seed", range(5))
def test_bulk_copies_land_when_waited_for(seed: int) -> None:
    out, _ = run(bulk(), seed=seed)
    assert np.array_equal(out[:64], 7 + 4 + np.arange(64) % 16)


@pytest.mark.parametrize("seed", range(5))
def test_arrivals_by_copies(seed: int) -> None:
    out, _ = run(arrive_by_copies(), seed=seed)
    assert np.array_equal(out[:64], 4 * (np.arange(64) ^ 33))


def test_barrier_phases_hand_a_buffer_to_and_fro() -> None:
    """One warp writes a word per round, the other reads it and frees it: two barriers, phases by parity."""
    out, _ = run("""
      const u32 full = ptx::shared_address(&shared.landed[0]), empty = full + 8;
      if (t == 0) ptx::mbarrier_init(full, 1), ptx::mbarrier_init(empty, 32);
      ptx::barrier_sync(0, 64);
      for (int i = 0; i < 7; ++i) {
        if (t == 0) {
          if (i > 0) ptx::mbarrier_wait(empty, (i - 1) & 1);
          ptx::store_shared_4(tile, 100 + i);
          ptx::mbarrier_arrive(full);
        } else if (t >= 32) {
          ptx::mbarrier_wait(full, i & 1);
          out[32 * i + lane] = ptx::load_shared_4(tile);
          ptx::mbarrier_arrive(empty);
        }
      }
    """)
    assert np.array_equal(out[:224], np.repeat(100 + np.arange(7), 32))


def test_copies_land_when_waited_for() -> None:
    """Two groups; the first is complete while the second is in flight; zero bytes zero-fill."""
    out, _ = run(
        "ptx::copy_async_16(tile + 16 * t, in + 4 * t, t < 16 ? 16 : 0); ptx::copy_async_commit(); "
        "ptx::copy_async_commit();"
        "ptx::copy_async_wait<1>(); out[t] = ptx::float_of(ptx::load_shared_4(tile + 16 * t));"
    )
    assert np.array_equal(out[:64], np.where(np.arange(64) < 16, np.arange(64) * 4, 0))


def mma_by_hand(kind: str, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Loads A by ldmatrix and B by ldmatrix.trans from row-major shared tiles, as the PTX manual describes."""
    both = np.concatenate([a.reshape(-1), b.reshape(-1)]).view(np.float32)  # 16x16 and 16x8 16-bit elements
    body = """
      ptx::store_shared_16(tile + 16 * t, t < 48 ? ptx::load_global_16(in + 4 * t) : Words4{});
      ptx::barrier_sync(0, 64);
      const Words4 a = ptx::load_matrix_x4(tile + (lane % 16) * 32 + (lane / 16) * 16);
      u32 b0, b1;
      ptx::load_matrix_x2_trans(b0, b1, tile + 512 + (lane % 16) * 16);
      float d[4] = {1.0f, 2.0f, 3.0f, 4.0f};
      ptx::mma_KIND(d, a.x, a.y, a.z, a.w, b0, b1);
      const int r = lane / 4, c = 2 * (lane % 4);
      if (t < 32) out[r * 8 + c] = d[0], out[r * 8 + c + 1] = d[1],
        out[(r + 8) * 8 + c] = d[2], out[(r + 8) * 8 + c + 1] = d[3];
    """
    out, _ = run(body.replace("KIND", kind), np.concatenate([both, np.zeros(64, np.float32)]))
    return out[:128].reshape(16, 8)


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_matrix_product(kind: str) -> None:
    random = np.random.default_rng(3)
    a, b = random.standard_normal((16, 16)), random.standard_normal((16, 8))
    pack: Callable[[np.ndarray], np.ndarray]
    if kind == "f16":
        pack, value = lambda x: x.astype(np.float16).view(np.uint16), lambda x: x.view(np.float16).astype(np.float64)
    else:
        pack, value = bf16_bits, bf16_value
    start = np.tile([[1.0, 2.0]], (16, 4)) + np.repeat([0, 2], 8)[:, None]
    assert np.abs(mma_by_hand(kind, pack(a), pack(b)) - (start + value(pack(a)) @ value(pack(b)))).max() < 1e-6


def test_transposed_matrix_load() -> None:
    rows = np.arange(4 * 8 * 8, dtype=np.uint16)
    out, _ = run(
        "ptx::store_shared_16(tile + 16 * t, t < 32 ? ptx::load_global_16(in + 4 * t) : Words4{}); "
        "ptx::barrier_sync(0, 64);\n"
        "const Words4 w = ptx::load_matrix_x4_trans(tile + 16 * lane); const u32 v[4] = {w.x, w.y, w.z, w.w};\n"
        "if (t < 32) for (int i = 0; i < 4; "
        "++i) out[64 * i + 2 * t] = v[i] & 0xffff, out[64 * i + 2 * t + 1] = v[i] >> 16;",
        np.concatenate([rows.view(np.float32), np.zeros(128, np.float32)]),
    )
    # Lane l: column l / 4, rows 2 (l % 4) and the next: row-major order of the transposed matrix.
    assert np.array_equal(out, rows.reshape(4, 8, 8).transpose(0, 2, 1).reshape(-1))


def test_conversions() -> None:
    special = [
        0.0,
        -0.0,
        1.0,
        65504.0,
        65520.0,
        1e-7,
        2.0**-24,
        2.0**-25,
        3e38,
        np.inf,
        -np.inf,
        np.nan,
        1.00390625,
        1.01171875,
    ]
    values = np.resize(np.array(special, np.float32), 256)
    body = "out[t] = ptx::float_of(ptx::pack_bf16(in[t], in[t + 1]));"
    bits = run(body, values)[0][:64].view(np.uint32)
    low, high = values[:64], values[1:65]
    nan = np.isnan
    assert np.array_equal(bits & 0xFFFF, np.where(nan(low), 0x7FFF, bf16_bits(low)))
    assert np.array_equal(bits >> 16, np.where(nan(high), 0x7FFF, bf16_bits(high)))
    bits = run(body.replace("pack_bf16", "pack_f16"), values)[0][:64].view(np.uint32)
    with np.errstate(over="ignore"):
        assert np.array_equal(bits & 0xFFFF, np.where(nan(low), 0x7FFF, low.astype(np.float16).view(np.uint16)))
    codes = np.resize(np.arange(256, dtype=np.uint8), 1024).view(np.float32)
    out, _ = run(
        "u32 low, high; ptx::e4m3_to_f16(reinterpret_cast<const u32*>(in)[t], low, high);"
        "out[2 * t] = ptx::float_of(low); out[2 * t + 1] = ptx::float_of(high);",
        codes,
    )
    assert np.array_equal(out[:128].view(np.float16).astype(np.float64), e4m3_table(), equal_nan=True)


def test_arithmetic_has_one_nan() -> None:
    patterns = np.resize(np.array([0x7FC00000, 0xFFC00000, 0x7F800001, 0xFFFFFFFF, 0xFF800000], np.uint32), 256)
    # The last is -inf, and -inf from itself is NaN as well.
    out, _ = run("out[t] = ptx::float_of(ptx::bits_of(in[t] - in[t]));", patterns.view(np.float32))
    assert (out[:64].view(np.uint32) == 0x7FFFFFFF).all()


def test_exponential_and_logarithm() -> None:
    x = np.resize(
        np.array([0, 1, -1, 0.5, -125.5, -126.0, -126.1, -1e30, 127.9, 128.0, 1e30, -np.inf, np.inf], np.float32), 256
    )
    out, _ = run("out[t] = ptx::exp2_approx(in[t]); out[64 + t] = ptx::log2_approx(in[t]);", x)
    with np.errstate(all="ignore"):
        power = np.exp2(x[:64].astype(np.float64))
        assert np.allclose(out[:64], np.where(power < 2.0**-126, 0, power.astype(np.float32)), rtol=2e-7)
        assert np.allclose(out[64:128], np.log2(x[:64].astype(np.float64)), equal_nan=True)


# What warpgroups do together is run by the emulator only: a body of these products has no fragments to model.
# Nor does it run CTAs that wait for each other.
ON_THE_EMULATOR = (
    "barrier_arrive.cuh",
    "cluster.cuh",
    "cluster_barrier.cuh",
    "cluster_words.cuh",
    "store_matrix.cuh",
    "wgmma.cuh",
    "wgmma_e4m3.cuh",
    "wgmma_e4m3_shared.cuh",
)


def test_every_prim_has_a_model() -> None:
    """A prim without a model would only show as a compile error of some unit."""
    name = re.compile(r"^DSA_DEVICE [\w ]+?(\w+)\(", re.MULTILINE)
    for header in sorted((templates_folder() / "prims" / "ptx").glob("*.cuh")):
        if header.name in ON_THE_EMULATOR:
            continue
        model = FOLDER / "ptx" / header.name
        assert model.is_file(), f"{header.name} has no model"
        missing = set(name.findall(header.read_text())) - set(name.findall(model.read_text()))
        assert not missing, f"{header.name}: no model of {sorted(missing)}"


def test_pairs_and_opaque_values() -> None:
    body = """
      ptx::store_shared_8(ptx::opaque(tile) + 8 * t, u64{1} * t << 32 | (t + 100));
      u32 low, high;
      ptx::load_shared_8(low, high, tile + 8 * t);
      out[t] = static_cast<float>(low), out[64 + t] = static_cast<float>(high);
    """
    out, _ = run(body, prelude='#include "prims/ptx/load_pair.cuh"\n#include "prims/ptx/opaque.cuh"')
    assert (out[:64] == np.arange(100, 164)).all() and (out[64:128] == np.arange(64)).all()


def test_additions_need_no_order_among_each_other() -> None:
    body = """
      if (t < 8) ptx::store_shared_4(tile + 4 * t, 100);
      ptx::barrier_sync(0, 64);
      ptx::shared_add(tile, t);
      const u32 before = ptx::shared_fetch_add(tile + 4, 1);
      ptx::barrier_sync(0, 64);
      out[t] = static_cast<float>(ptx::load_shared_4(tile));
      out[64 + t] = static_cast<float>(before);
    """
    out, _ = run(body)
    assert (out[:64] == 100 + 63 * 32).all()
    assert sorted(out[64:128]) == list(range(100, 164))
