// ldmatrix, stmatrix, movmatrix and mma.sync.
// Lane l, r = l / 4, c = l % 4. With w elements in a register of A or B: register z of A holds row r + 8 (z & 1), dims
// w c .. w c + w - 1 (+ 4 w where z >> 1); of B column r, dims w c .. (+ 4 w z). C and D: register z holds row
// r + 8 (z >> 1), column 2 c + (z & 1).
#include "products.h"

namespace vm {
namespace {

void require_full_warp(u32 mask, const char* what) {
  if (mask != kFullMask) fail("%s in a warp of fewer than 32 threads", what);
}

// flags: bits 0-2 space, 3-5 how many matrices, 6 transposed, 7-8 form (0 8 x 8 of 16 bits, 1 8 x 16 bytes, 2 16 x 16
// bytes), 9-10 source (0 bytes, 1 16 times 4 bits, 2 16 times 6 bits).
struct MatrixFormat {
  Space space;
  u32 count;
  bool transposed;
  u32 form, packing;
  explicit MatrixFormat(u32 flags)
      : space(static_cast<Space>(flags & 7)), count(flags >> 3 & 7), transposed(flags >> 6 & 1), form(flags >> 7 & 3),
        packing(flags >> 9 & 3) {}
};

u64 row_address(Warp& w, const MatrixFormat& format, const u16* x, int lane) {
  return format.space == kShared ? narrow_address(w, x, lane) : wide_address(w, x, lane);
}

// Sixteen elements of 4 or 6 bits, each into a byte: 4 bits in the middle, 6 bits at the bottom.
void spread(u32 packing, const u8* from, u8* to) {
  for (int n = 0; n < 16; n++) {
    if (packing == 0) {
      to[n] = from[n];
    } else if (packing == 1) {
      to[n] = static_cast<u8>((from[n / 2] >> 4 * (n % 2) & 15) << 2);
    } else {
      const int bit = 6 * n;
      const u32 two = from[bit / 8] | static_cast<u32>(bit / 8 < 11 ? from[bit / 8 + 1] : 0) << 8;
      to[n] = static_cast<u8>(two >> bit % 8 & 63);
    }
  }
}

// Bytes: rows of 16, 8 of them, or 16 that come transposed in two registers.
void ldmatrix_bytes(Warp& w, const u16* x, const MatrixFormat& format) {
  const u32 height = format.form == 2 ? 16 : 8, registers = format.form == 2 ? 2 * format.count : format.count;
  u8 rows[32][16];
  for (u32 n = 0; n < height * format.count; n++) {
    const int lane = static_cast<int>(n);
    const u64 address = row_address(w, format, x + registers, lane);
    spread(format.packing, access(w, format.space, address, 16, false, lane), rows[n]);
  }
  for (u32 z = 0; z < registers; z++) {
    u32* d = w.row(x[z]);
    for (u32 l = 0; l < kLanes; l++) {
      const u32 r = l / 4, c = 4 * (l % 4);
      u32 out = 0;
      for (u32 n = 0; n < 4; n++) {
        const u32 byte = format.form == 2 ? rows[16 * (z / 2) + c + n][r + 8 * (z % 2)] : rows[8 * z + r][c + n];
        out |= byte << 8 * n;
      }
      d[l] = out;
    }
  }
}

// Destinations, then the address.
void ldmatrix(Warp& w, const Ins& i, u32 mask) {
  VM_OPERANDS;
  if (!gather(w, mask, w.born)) return;
  require_full_warp(mask, "ldmatrix");
  const MatrixFormat format(i.flags);
  if (format.form != 0) return ldmatrix_bytes(w, x, format);
  u16 rows[32][8];
  for (u32 n = 0; n < 8 * format.count; n++) {
    const int lane = static_cast<int>(n);
    std::memcpy(rows[n], access(w, format.space, row_address(w, format, x + format.count, lane), 16, false, lane), 16);
  }
  for (u32 z = 0; z < format.count; z++) {
    u32* d = w.row(x[z]);
    for (int l = 0; l < kLanes; l++) {
      const int r = l / 4, c = 2 * (l % 4);
      const u16(*matrix)[8] = rows + 8 * z;
      d[l] = format.transposed ? matrix[c][r] | static_cast<u32>(matrix[c + 1][r]) << 16
                               : matrix[r][c] | static_cast<u32>(matrix[r][c + 1]) << 16;
    }
  }
}

// The address, then the sources.
void stmatrix(Warp& w, const Ins& i, u32 mask) {
  VM_OPERANDS;
  if (!gather(w, mask, w.born)) return;
  require_full_warp(mask, "stmatrix");
  const MatrixFormat format(i.flags);
  u16 rows[32][8];
  for (u32 z = 0; z < format.count; z++) {
    const u32* a = w.row(x[3 + z]);
    for (int l = 0; l < kLanes; l++)
      for (int h = 0; h < 2; h++) {
        const int r = l / 4, c = 2 * (l % 4) + h;
        rows[8 * z + (format.transposed ? c : r)][format.transposed ? r : c] = static_cast<u16>(a[l] >> 16 * h);
      }
  }
  w.cta->progress++;
  for (u32 n = 0; n < 8 * format.count; n++) {
    const int lane = static_cast<int>(n);
    std::memcpy(access(w, format.space, row_address(w, format, x, lane), 16, true, lane), rows[n], 16);
  }
}

// An 8 x 8 matrix of 16 bits, transposed. Operands: d, a.
void movmatrix(Warp& w, const Ins& i, u32 mask) {
  VM_OPERANDS;
  if (!gather(w, mask, w.born)) return;
  require_full_warp(mask, "movmatrix");
  u16 matrix[8][8];
  for (int l = 0; l < kLanes; l++)
    for (int h = 0; h < 2; h++) matrix[l / 4][2 * (l % 4) + h] = static_cast<u16>(w.row(x[1])[l] >> 16 * h);
  u32* d = w.row(x[0]);
  for (int l = 0; l < kLanes; l++) {
    const int r = l / 4, c = 2 * (l % 4);
    d[l] = matrix[c][r] | static_cast<u32>(matrix[c + 1][r]) << 16;
  }
}

// ---- products ----

// B as K rows of 8 columns, from registers that hold columns of 4 W dims.
template <int K, int W>
void load_b(Warp& w, const u16* x, Unpack unpack, Row8* b) {
  for (int z = 0; z < K / (4 * W); z++) {
    float block[kLanes * W];
    unpack(w.row(x[z]), block);
    if constexpr (W == 1) {
      for (int k = 0; k < 4; k++)
        for (int n = 0; n < 8; n++) b[4 * z + k][n] = block[4 * n + k];
    } else {
      for (int k = 0; k < 4 * W; k += 8) transpose(block + k, 4 * W, b + 4 * W * z + k);
    }
  }
}

// D, A, B, C; imm: how many dims (the template), flags: bits 0-3 type of A, 4-7 type of B, 8 C and D are f16.
template <int K, int W>
void mma(Warp& w, const Ins& i, u32 mask) {
  VM_OPERANDS;
  if (!gather(w, mask, w.born)) return;
  require_full_warp(mask, "mma");
  const bool narrow = i.flags >> 8 & 1;
  const int results = narrow ? 2 : 4;
  constexpr int kHalves = K / (4 * W), kA = 2 * kHalves;
  const u16 *xa = x + results, *xb = xa + kA, *xc = xb + kHalves;
  float a[kA][kLanes * W], sums[2][2 * kLanes];
  Row8 b[K];
  for (int z = 0; z < kA; z++) kUnpack[i.flags & 15](w.row(xa[z]), a[z]);
  load_b<K, W>(w, xb, kUnpack[i.flags >> 4 & 15], b);
  for (int half = 0; half < 2; half++) {
    if (narrow) {
      unpack_f16(w.row(xc[half]), sums[half]);
    } else {
      const u32 *even = w.row(xc[2 * half]), *odd = w.row(xc[2 * half + 1]);
      float* to = sums[half];
      for (int l = 0; l < kLanes; l++) to[2 * l] = get<float>(even, l), to[2 * l + 1] = get<float>(odd, l);
    }
    // All rows at once: one alone would wait for its own sums.
    Row8 sum[8];
    std::memcpy(sum, sums[half], sizeof sum);
    for (int k = 0; k < K; k++) {
      const float* from = a[half + 2 * (k / (4 * W))] + k % (4 * W);
      for (int n = 0; n < 8; n++) sum[n] = add_product(sum[n], from[n * 4 * W], b[k]);
    }
    std::memcpy(sums[half], sum, sizeof sum);
  }
  // A result may lie in the row of a source of the other half, so both are written at the end.
  for (int half = 0; half < 2; half++) {
    const float* from = sums[half];
    if (narrow) {
      u32* d = w.row(x[half]);
      for (int l = 0; l < kLanes; l++)
        d[l] = half_bits(from[2 * l]) | static_cast<u32>(half_bits(from[2 * l + 1])) << 16;
    } else {
      u32 *even = w.row(x[2 * half]), *odd = w.row(x[2 * half + 1]);
      for (int l = 0; l < kLanes; l++) {
        put<float>(even, l, canonical(from[2 * l]));
        put<float>(odd, l, canonical(from[2 * l + 1]));
      }
    }
  }
  w.cta->counters[kMatrixProducts]++;
}

// Whole numbers; flags: 1 A is signed, 2 B is signed, 4 sums saturate.
template <int K>
void mma_bytes(Warp& w, const Ins& i, u32 mask) {
  VM_OPERANDS;
  if (!gather(w, mask, w.born)) return;
  require_full_warp(mask, "mma");
  constexpr int kHalves = K / 16, kA = 2 * kHalves;
  const u16 *xa = x + 4, *xb = xa + kA, *xc = xb + kHalves;
  const auto byte_of = [](u32 word, u32 n, bool is_signed) {
    const u32 byte = word >> 8 * n & 0xff;
    return is_signed ? static_cast<i64>(static_cast<i8>(byte)) : static_cast<i64>(byte);
  };
  u32 out[4][kLanes];
  for (u32 z = 0; z < 4; z++)
    for (u32 l = 0; l < kLanes; l++) {
      const u32 row = l / 4, column = 2 * (l % 4) + (z & 1);
      i64 sum = static_cast<i32>(w.row(xc[z])[l]);
      for (u32 k = 0; k < K; k++) {
        const u32 lane = k % 16 / 4, half = k / 16;
        const u32 a = w.row(xa[2 * half + (z >> 1)])[4 * row + lane], b = w.row(xb[half])[4 * column + lane];
        sum += byte_of(a, k % 4, i.flags & 1) * byte_of(b, k % 4, i.flags & 2);
      }
      if (i.flags & 4) sum = sum < INT32_MIN ? INT32_MIN : sum > INT32_MAX ? INT32_MAX : sum;
      out[z][l] = static_cast<u32>(sum);
    }
  for (u32 z = 0; z < 4; z++) std::memcpy(w.row(x[z]), out[z], sizeof out[z]);
  w.cta->counters[kMatrixProducts]++;
}

const Register registers[] = {{"ldmatrix", ldmatrix},
                              {"stmatrix", stmatrix},
                              {"movmatrix", movmatrix},
                              {"mma_k16_w2", mma<16, 2>},
                              {"mma_k8_w2", mma<8, 2>},
                              {"mma_k8_w1", mma<8, 1>},
                              {"mma_k4_w1", mma<4, 1>},
                              {"mma_k32_w4", mma<32, 4>},
                              {"mma_k16_w4", mma<16, 4>},
                              {"mma_bytes_k32", mma_bytes<32>},
                              {"mma_bytes_k16", mma_bytes<16>}};

}  // namespace
}  // namespace vm
