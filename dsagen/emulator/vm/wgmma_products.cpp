// What wgmma.mma_async computes, for the four warps of a warpgroup, w = warp, r = lane / 4, c = lane % 4.
// Register i of D: row 16 w + r + 8 (i >> 1 & 1), column 8 (i >> 2) + 2 c + (i & 1), two of a row in one where it is f16.
// Register z of A, of e elements: row 16 w + r + 8 (z & 1), dims e c .. e c + e - 1 (+ 4 e where z >> 1).
#include "wgmma_products.h"

#include "products.h"

namespace vm {
namespace {

// How sums are built, by type as kUnpack has them: 0 in fp32, one product after the other; else as tensor cores align
// them: of every summand so many bits below the largest exponent, the rest cut off, and as many of an fp32 sum below its
// own leading one. A product's exponent is the sum of its factors', whose significands may make up to 4; that of a
// subnormal factor is the least one. So it is on an H200 to the bit, for 16-bit types and tf32 with 25 and then 23 bits.
constexpr int kFractionBits[] = {0, 0, 0, 13, 13};
// Exponents of fp32 of the smallest normal number of a type.
constexpr i32 kLeastExponents[] = {127 - 14, 1, 1, 127 - 6, 127 - 14};

inline Order8 magnitude(Row8 x) { return reinterpret_cast<Order8>(x) & 0x7fffffff; }

// The power of two of each value of a type, 0 of 0. Infinity and NaN stay what multiplies to an exponent of all ones.
inline Row8 powers(Row8 x, u32 type) {
  const Order8 bits = reinterpret_cast<Order8>(x) & 0x7f800000, least = Order8{} + (kLeastExponents[type] << 23);
  const Order8 power = bits < least ? least : bits;
  return reinterpret_cast<Row8>(magnitude(x) == 0 ? Order8{} : power);
}

inline Row8 canonical(Row8 x) { return x == x ? x : Row8{} + not_a_number(); }

// The columns of one 8 x 8 block of D, rows of the warp's half `half`. Two rows of a block are 8 lanes of two registers.
struct Block {
  Row8 sum[8];
  void load(Warp& w, const WgmmaForm& form, const u16* d, u32 block, u32 half) {
    if (form.narrow) {
      float values[2 * kLanes];
      unpack_f16(w.row(d[2 * block + half]), values);
      std::memcpy(sum, values, sizeof sum);
      return;
    }
    const u32 *even = w.row(d[4 * block + 2 * half]), *odd = w.row(d[4 * block + 2 * half + 1]);
#pragma GCC unroll 4
    for (int n = 0; n < 4; n++) {
      Row8 e, o;
      std::memcpy(&e, even + 8 * n, sizeof e);
      std::memcpy(&o, odd + 8 * n, sizeof o);
      sum[2 * n] = __builtin_shuffle(e, o, Order8{0, 8, 1, 9, 2, 10, 3, 11});
      sum[2 * n + 1] = __builtin_shuffle(e, o, Order8{4, 12, 5, 13, 6, 14, 7, 15});
    }
  }
  void store(Warp& w, const WgmmaForm& form, const u16* d, u32 block, u32 half) const {
    if (form.narrow) {
      float values[2 * kLanes];
      std::memcpy(values, sum, sizeof sum);
      u32* to = w.row(d[2 * block + half]);
      for (int l = 0; l < kLanes; l++)
        to[l] = half_bits(values[2 * l]) | static_cast<u32>(half_bits(values[2 * l + 1])) << 16;
      return;
    }
    u32 *even = w.row(d[4 * block + 2 * half]), *odd = w.row(d[4 * block + 2 * half + 1]);
#pragma GCC unroll 4
    for (int n = 0; n < 4; n++) {
      const Row8 a = canonical(sum[2 * n]), b = canonical(sum[2 * n + 1]);
      const Row8 e = __builtin_shuffle(a, b, Order8{0, 2, 4, 6, 8, 10, 12, 14});
      const Row8 o = __builtin_shuffle(a, b, Order8{1, 3, 5, 7, 9, 11, 13, 15});
      std::memcpy(even + 8 * n, &e, sizeof e);
      std::memcpy(odd + 8 * n, &o, sizeof o);
    }
  }
};

// 256 bytes: 8 rows of K values, or K rows of 8 where the operand is transposed.
template <int K>
void unpack_rows(const u8* bytes, Unpack unpack, float* to) {
  unpack(reinterpret_cast<const u32*>(bytes), to);
  unpack(reinterpret_cast<const u32*>(bytes + 4 * kLanes), to + 4 * K);
}

template <int K>
void load_a(Warp* warps, const WgmmaForm& form, const WgmmaOperands& o, float (*a)[K]) {
  constexpr int kWidth = K / 8;
  const Unpack unpack = kUnpack[form.a_type];
  if (form.a_in_registers) {
    for (u32 w = 0; w < kGroupWarps; w++)
      for (u32 z = 0; z < 4; z++) {
        float values[kLanes * kWidth];
        unpack(warps[w].row(o.a_slots[z]), values);
        for (u32 r = 0; r < 8; r++)
          std::memcpy(a[16 * w + r + 8 * (z & 1)] + 4 * kWidth * (z >> 1), values + 4 * kWidth * r,
                      4 * kWidth * sizeof(float));
      }
  } else {
    for (u32 block = 0; block < kRowsOfA / 8; block++) {
      const u8* from = o.a + block * 8 * kRowBytes;
      if (!form.a_transposed) {
        unpack_rows<K>(from, unpack, a[8 * block]);
        continue;
      }
      float values[8 * K];
      unpack_rows<K>(from, unpack, values);
      for (int k = 0; k < K; k += 8) {
        Row8 rows[8];
        transpose(values + 8 * k, 8, rows);
        for (u32 r = 0; r < 8; r++) std::memcpy(a[8 * block + r] + k, &rows[r], sizeof rows[r]);
      }
    }
  }
  if (form.negative)
    for (u32 n = 0; n < kRowsOfA * K; n++) a[0][n] = -a[0][n];
}

template <int K>
void load_b(const WgmmaForm& form, const u8* from, Row8* b) {
  if (form.b_transposed) return unpack_rows<K>(from, kUnpack[form.b_type], reinterpret_cast<float*>(b));
  float values[8 * K];
  unpack_rows<K>(from, kUnpack[form.b_type], values);
  for (int k = 0; k < K; k += 8) transpose(values + k, K, b + k);
}

template <int K>
inline void add_in_order(Row8* sum, const float (*a)[K], const Row8* b) {
  // Sums stay in registers.
  Row8 s0 = sum[0], s1 = sum[1], s2 = sum[2], s3 = sum[3], s4 = sum[4], s5 = sum[5], s6 = sum[6], s7 = sum[7];
#pragma GCC unroll 4
  for (int k = 0; k < K; k++) {
    const Row8 row = b[k];
    s0 = add_product(s0, a[0][k], row), s1 = add_product(s1, a[1][k], row);
    s2 = add_product(s2, a[2][k], row), s3 = add_product(s3, a[3][k], row);
    s4 = add_product(s4, a[4][k], row), s5 = add_product(s5, a[5][k], row);
    s6 = add_product(s6, a[6][k], row), s7 = add_product(s7, a[7][k], row);
  }
  sum[0] = s0, sum[1] = s1, sum[2] = s2, sum[3] = s3, sum[4] = s4, sum[5] = s5, sum[6] = s6, sum[7] = s7;
}

#ifdef __AVX512DQ__
inline __m512 beside(Row8 left, Row8 right) {
  const __m512 wide = _mm512_castps256_ps512(reinterpret_cast<__m256>(left));
  return _mm512_insertf32x8(wide, reinterpret_cast<__m256>(right), 1);
}

// The same for two blocks side by side.
template <int K>
inline void add_wide_in_order(Row8* left, Row8* right, const float (*a)[K], const __m512* b) {
  __m512 sum[8];
#pragma GCC unroll 8
  for (int n = 0; n < 8; n++) sum[n] = beside(left[n], right[n]);
#pragma GCC unroll 4
  for (int k = 0; k < K; k++) {
    const __m512 row = b[k];
#pragma GCC unroll 8
    for (int n = 0; n < 8; n++) sum[n] = _mm512_fmadd_ps(_mm512_set1_ps(a[n][k]), row, sum[n]);
  }
#pragma GCC unroll 8
  for (int n = 0; n < 8; n++) {
    left[n] = reinterpret_cast<Row8>(_mm512_extractf32x8_ps(sum[n], 0));
    right[n] = reinterpret_cast<Row8>(_mm512_extractf32x8_ps(sum[n], 1));
  }
}
#endif

// Factors and their powers of two: a row of A, 8 columns of B.
template <int K>
struct Aligned {
  const float *a, *a_powers;
  const Row8 *b, *b_powers;
};

// Whole numbers of the unit below the largest exponent; false where one is infinite or no number.
template <int K>
bool add_aligned(Row8& sum, const Aligned<K>& of, int fraction_bits, bool narrow) {
  Order8 largest = magnitude(sum);
  for (int k = 0; k < K; k++) {
    const Order8 size = magnitude(of.a_powers[k] * of.b_powers[k]);
    largest = size > largest ? size : largest;
  }
  Order8 exponent = largest >> 23;
  for (int n = 0; n < 8; n++)
    if (exponent[n] == 255) return false;
  const Order8 least = Order8{} + fraction_bits + 1;
  exponent = exponent < least ? least : exponent;
  const auto unit = reinterpret_cast<Row8>((exponent - fraction_bits) << 23);
  const auto units_of_one = reinterpret_cast<Row8>((254 + fraction_bits - exponent) << 23);
  Order8 total = __builtin_convertvector(sum * units_of_one, Order8);
  for (int k = 0; k < K; k++) total += __builtin_convertvector(of.a[k] * of.b[k] * units_of_one, Order8);
  Row8 whole = __builtin_convertvector(total, Row8);
  // An f16 is rounded from all of the sum.
  const i32 kept = narrow ? -1 : -(1 << (23 - fraction_bits));
  whole = reinterpret_cast<Row8>(reinterpret_cast<Order8>(whole) & kept);
  sum = whole * unit;
  return true;
}

template <int K>
void add_aligned_blocks(Warp* warps, const WgmmaForm& form, const WgmmaOperands& o, const float (*a)[K]) {
  float a_powers[kRowsOfA][K];
  for (u32 n = 0; n < kRowsOfA * K; n += 8) {
    Row8 values;
    std::memcpy(&values, a[0] + n, sizeof values);
    values = powers(values, form.a_type);
    std::memcpy(a_powers[0] + n, &values, sizeof values);
  }
  for (u32 block = 0; block < form.columns / 8; block++) {
    Row8 b[K], b_powers[K];
    load_b<K>(form, o.b + block * 8 * kRowBytes, b);
    for (int k = 0; k < K; k++) b_powers[k] = powers(b[k], form.b_type);
    for (u32 row = 0; row < kRowsOfA; row += 8) {
      Block d{};
      if (o.adds) d.load(warps[row / 16], form, o.d, block, row / 8 % 2);
      for (u32 n = 0; n < 8; n++) {
        const Aligned<K> of{a[row + n], a_powers[row + n], b, b_powers};
        if (!add_aligned<K>(d.sum[n], of, kFractionBits[form.a_type], form.narrow))
          for (int k = 0; k < K; k++) d.sum[n] = add_product(d.sum[n], of.a[k], b[k]);
      }
      d.store(warps[row / 16], form, o.d, block, row / 8 % 2);
    }
  }
}

}  // namespace

template <int K>
void multiply(Warp* warps, const WgmmaForm& form, const WgmmaOperands& o) {
  float a[kRowsOfA][K];
  load_a<K>(warps, form, o, a);
  if (kFractionBits[form.a_type] != 0) return add_aligned_blocks<K>(warps, form, o, a);
  u32 block = 0;
#ifdef __AVX512DQ__
  for (; block + 2 <= form.columns / 8; block += 2) {
    Row8 b[2][K];
    __m512 wide[K];
    for (u32 side = 0; side < 2; side++) load_b<K>(form, o.b + (block + side) * 8 * kRowBytes, b[side]);
    for (int k = 0; k < K; k++) wide[k] = beside(b[0][k], b[1][k]);
    for (u32 n = 0; n < 2 * kGroupWarps; n++) {
      Block left{}, right{};
      if (o.adds) left.load(warps[n / 2], form, o.d, block, n % 2), right.load(warps[n / 2], form, o.d, block + 1, n % 2);
      add_wide_in_order<K>(left.sum, right.sum, a + 8 * n, wide);
      left.store(warps[n / 2], form, o.d, block, n % 2);
      right.store(warps[n / 2], form, o.d, block + 1, n % 2);
    }
  }
#endif
  for (; block < form.columns / 8; block++) {
    Row8 b[K];
    load_b<K>(form, o.b + block * 8 * kRowBytes, b);
    for (u32 n = 0; n < 2 * kGroupWarps; n++) {
      Block d{};
      if (o.adds) d.load(warps[n / 2], form, o.d, block, n % 2);
      add_in_order<K>(d.sum, a + 8 * n, b);
      d.store(warps[n / 2], form, o.d, block, n % 2);
    }
  }
}

template void multiply<8>(Warp*, const WgmmaForm&, const WgmmaOperands&);
template void multiply<16>(Warp*, const WgmmaForm&, const WgmmaOperands&);
template void multiply<32>(Warp*, const WgmmaForm&, const WgmmaOperands&);

void multiply_bytes(Warp* warps, const WgmmaForm& form, const WgmmaOperands& o) {
  const auto number = [](u8 byte, u32 is_signed) { return is_signed ? static_cast<i8>(byte) : static_cast<i32>(byte); };
  i32 a[kRowsOfA][kRowBytes], b[kRowBytes];
  for (u32 row = 0; row < kRowsOfA; row++)
    for (u32 k = 0; k < kRowBytes; k++) {
      const u32 lane = 4 * (row % 8) + k % 16 / 4, z = row / 8 % 2 + 2 * (k / 16);
      const u8 byte = form.a_in_registers ? static_cast<u8>(warps[row / 16].row(o.a_slots[z])[lane] >> 8 * (k % 4))
                                          : o.a[row * kRowBytes + k];
      a[row][k] = number(byte, form.a_type);
    }
  for (u32 column = 0; column < form.columns; column++) {
    for (u32 k = 0; k < kRowBytes; k++) b[k] = number(o.b[column * kRowBytes + k], form.b_type);
    for (u32 row = 0; row < kRowsOfA; row++) {
      i32 product = 0;
      for (u32 k = 0; k < kRowBytes; k++) product += a[row][k] * b[k];
      u32* d = warps[row / 16].row(o.d[4 * (column / 8) + 2 * (row / 8 % 2) + column % 2]);
      u32& to = d[4 * (row % 8) + column % 8 / 2];
      const i64 sum = (o.adds ? static_cast<i64>(static_cast<i32>(to)) : 0) + product;
      to = static_cast<u32>(!form.saturating ? sum : sum < INT32_MIN ? INT32_MIN : sum > INT32_MAX ? INT32_MAX : sum);
    }
  }
}

}  // namespace vm
