// ldmatrix, stmatrix and mma.sync.
// Lane l, r = l / 4, c = l % 4. A of m16n8k16: register z holds row r + 8 (z & 1), k = 2c, 2c + 1 (+ 8 where z >> 1).
// B: register z holds column r, k = 2c, 2c + 1 (+ 8 z). C and D: register z holds row r + 8 (z >> 1), column 2c + (z & 1).
#include "numerics.h"

namespace vm {
namespace {

// flags: bits 0-2 space, 3-5 how many matrices, 6 transposed.
struct MatrixFormat {
  Space space;
  u32 count;
  bool transposed;
  explicit MatrixFormat(u32 flags) : space(static_cast<Space>(flags & 7)), count(flags >> 3 & 7), transposed(flags >> 6 & 1) {}
};

u64 row_address(Warp& w, const MatrixFormat& format, const u16* x, int lane) {
  return format.space == kShared ? narrow_address(w, x, lane) : wide_address(w, x, lane);
}

// Destinations, then the address.
void ldmatrix(Warp& w, const Ins& i, u32 mask) {
  VM_OPERANDS;
  if (!gather(w, mask, w.born)) return;
  if (mask != kFullMask) fail("ldmatrix in a warp of fewer than 32 threads");
  const MatrixFormat format(i.flags);
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
  if (mask != kFullMask) fail("stmatrix in a warp of fewer than 32 threads");
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

using Row8 = float __attribute__((vector_size(32)));

// The 64 values of a register of pairs, lane after lane: row r of an 8 x 8 block is values 8r to 8r + 7.
template <float (*VALUE)(u16)>
inline void unpack_pairs(const u32* row, float* to) {
  float low[kLanes], high[kLanes];
  for (int l = 0; l < kLanes; l++) low[l] = VALUE(static_cast<u16>(row[l]));
  for (int l = 0; l < kLanes; l++) high[l] = VALUE(static_cast<u16>(row[l] >> 16));
  for (int l = 0; l < kLanes; l++) to[2 * l] = low[l], to[2 * l + 1] = high[l];
}

// D, A, B, C of m16n8k16 (or k8 with half the A and B registers), fp32 accumulators.
template <int K, float (*VALUE)(u16)>
void mma(Warp& w, const Ins& i, u32 mask) {
  VM_OPERANDS;
  if (!gather(w, mask, w.born)) return;
  if (mask != kFullMask) fail("mma in a warp of fewer than 32 threads");
  constexpr int kA = K / 4, kB = K / 8;
  const u16 *xa = x + 4, *xb = xa + kA, *xc = xb + kB;
  float a[kA][64], b[K][8], block[64], results[2][64];
  for (int z = 0; z < kA; z++) unpack_pairs<VALUE>(w.row(xa[z]), a[z]);
  for (int z = 0; z < kB; z++) {
    unpack_pairs<VALUE>(w.row(xb[z]), block);
    for (int n = 0; n < 8; n++)
      for (int k = 0; k < 8; k++) b[8 * z + k][n] = block[8 * n + k];
  }
  for (int half = 0; half < 2; half++) {
    float sums[64];
    const u32 *even = w.row(xc[2 * half]), *odd = w.row(xc[2 * half + 1]);
    for (int l = 0; l < kLanes; l++) sums[2 * l] = get<float>(even, l), sums[2 * l + 1] = get<float>(odd, l);
    for (int m = 0; m < 8; m++) {
      Row8 sum, column;
      std::memcpy(&sum, sums + 8 * m, sizeof sum);
      for (int k = 0; k < K; k++) {
        std::memcpy(&column, b[k], sizeof column);
        sum += a[half + 2 * (k / 8)][8 * m + k % 8] * column;
      }
      std::memcpy(sums + 8 * m, &sum, sizeof sum);
    }
    // A result may lie in the row of a source of the other half, so both are written at the end.
    std::memcpy(results[half], sums, sizeof sums);
  }
  for (int half = 0; half < 2; half++) {
    const float* sums = results[half];
    u32 *even = w.row(x[2 * half]), *odd = w.row(x[2 * half + 1]);
    for (int l = 0; l < kLanes; l++) put<float>(even, l, sums[2 * l]), put<float>(odd, l, sums[2 * l + 1]);
  }
  w.cta->counters[kMatrixProducts]++;
}

const Register registers[] = {{"ldmatrix", ldmatrix},
                              {"stmatrix", stmatrix},
                              {"mma_k16_f16", mma<16, half_value>},
                              {"mma_k16_bf16", mma<16, bf16_value>},
                              {"mma_k8_f16", mma<8, half_value>},
                              {"mma_k8_bf16", mma<8, bf16_value>}};

}  // namespace
}  // namespace vm
