// Scales of cached values: how each kind is stored, and what a stored one multiplies by.
#pragma once
#include "prims/kv/codes.cuh"
#include "prims/ptx/convert.cuh"
#include "prims/ptx/global.cuh"
#include "prims/types.cuh"

namespace kv {

struct NoScale {
  static constexpr int kBytes = 0;
};

struct Fp32Scale {
  static constexpr int kBytes = 4;
  static DSA_DEVICE void store(u8* to, float scale) { ptx::store_global_4(to, ptx::bits_of(scale)); }
  static DSA_DEVICE float load(const u8* from) { return ptx::float_of(ptx::load_global_4(from)); }
};

// Powers of two from 2^-127 on, by their exponent; 255 is NaN.
struct Ue8m0Scale {
  static constexpr int kBytes = 1;
  static DSA_DEVICE void store(u8* to, float scale) { ptx::store_global_1(to, ptx::bits_of(scale) >> 23 & 0xff); }
  static DSA_DEVICE float load(const u8* from) {
    const u32 byte = ptx::load_global_1(from);
    return byte == 0xff ? ptx::float_of(kNan) : byte == 0 ? ptx::float_of(0x00400000u) : ptx::float_of(byte << 23);
  }
};

struct E4m3Scale {
  static constexpr int kBytes = 1;
  static DSA_DEVICE void store(u8* to, float scale) { ptx::store_global_1(to, e4m3_code(scale)); }
  // A set sign bit is no code of a scale, and reads as NaN.
  static DSA_DEVICE float load(const u8* from) {
    const u32 code = ptx::load_global_1(from);
    return code & 0x80 ? ptx::float_of(kNan) : float_of_e4m3(code);
  }
};

}  // namespace kv
