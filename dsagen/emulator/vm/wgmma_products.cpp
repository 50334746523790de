// What wgmma.mma_async computes, for the four warps of a warpgroup, w = warp, r = lane / 4, c = lane % 4.
// Register i of D: row 16 w + r + 8 (i >> 1 & 1), column 8 (i >> 2) + 2 c + (i & 1), two of a row in one where it is f16.
// Register z of A, of e elements: row 16 w + r + 8 (z & 1), dims e c .. e c + e - 1 (+ 4 e where z >> 1).
#include "wgmma_products.h"

#include "products.h"

namespace vm {
namespace {

// How sums are built, by type as kUnpack has them: 0 in fp32, one product after the other; else as tensor cores align
// them, with so many bits below the leading one of the largest of all products and of what they are added to, the rest
// cut off. fp8 was measured on an H200; whether the largest is taken before or after a product is normalised was not.
constexpr int kFractionBits[] = {0, 0, 0, 13, 13};

// The columns of one 8 x 8 block of D, rows of the warp's half `half`.
struct Block {
  Row8 sum[8];
  void load(Warp& w, const WgmmaForm& form, const u16* d, u32 block, u32 half) {
    float values[2 * kLanes];
    if (form.narrow) {
      unpack_f16(w.row(d[2 * block + half]), values);
    } else {
      const float *even = reinterpret_cast<const float*>(w.row(d[4 * block + 2 * half])),
                  *odd = reinterpret_cast<const float*>(w.row(d[4 * block + 2 * half + 1]));
      for (int l = 0; l < kLanes; l++) values[2 * l] = even[l], values[2 * l + 1] = odd[l];
    }
    std::memcpy(sum, values, sizeof sum);
  }
  void store(Warp& w, const WgmmaForm& form, const u16* d, u32 block, u32 half) const {
    float values[2 * kLanes];
    std::memcpy(values, sum, sizeof sum);
    if (form.narrow) {
      u32* to = w.row(d[2 * block + half]);
      for (int l = 0; l < kLanes; l++)
        to[l] = half_bits(values[2 * l]) | static_cast<u32>(half_bits(values[2 * l + 1])) << 16;
      return;
    }
    u32 *even = w.row(d[4 * block + 2 * half]), *odd = w.row(d[4 * block + 2 * half + 1]);
    for (int l = 0; l < kLanes; l++) {
      even[l] = bits_as<u32>(canonical(values[2 * l]));
      odd[l] = bits_as<u32>(canonical(values[2 * l + 1]));
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
  for (int k = 0; k < K; k++)
    for (int n = 0; n < 8; n++) sum[n] = add_product(sum[n], a[n][k], b[k]);
}

// Whole numbers of the unit below the largest summand; false where one is infinite or no number.
template <int K>
bool add_aligned(Row8& sum, const float* a, const Row8* b, int fraction_bits) {
  const auto magnitude = [](Row8 x) { return reinterpret_cast<Order8>(x) & 0x7fffffff; };
  Row8 products[K];
  Order8 largest = magnitude(sum);
  for (int k = 0; k < K; k++) {
    products[k] = a[k] * b[k];
    const Order8 size = magnitude(products[k]);
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
  for (int k = 0; k < K; k++) total += __builtin_convertvector(products[k] * units_of_one, Order8);
  sum = __builtin_convertvector(total, Row8) * unit;
  return true;
}

template <int K>
void add_block(Row8* sum, const float (*a)[K], const Row8* b, int fraction_bits) {
  if (fraction_bits == 0) return add_in_order<K>(sum, a, b);
  for (int n = 0; n < 8; n++)
    if (!add_aligned<K>(sum[n], a[n], b, fraction_bits))
      for (int k = 0; k < K; k++) sum[n] = add_product(sum[n], a[n][k], b[k]);
}

}  // namespace

template <int K>
void multiply(Warp* warps, const WgmmaForm& form, const WgmmaOperands& o) {
  float a[kRowsOfA][K];
  load_a<K>(warps, form, o, a);
  for (u32 block = 0; block < form.columns / 8; block++) {
    Row8 b[K];
    load_b<K>(form, o.b + block * 8 * kRowBytes, b);
    for (u32 n = 0; n < 2 * kGroupWarps; n++) {
      Block d{};
      if (o.adds) d.load(warps[n / 2], form, o.d, block, n % 2);
      add_block<K>(d.sum, a + 8 * n, b, kFractionBits[form.a_type]);
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
