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

// D, A, B, C of m16n8k16 (or k8 with half the A and B registers), fp32 accumulators.
template <int K, float (*VALUE)(u16)>
void mma(Warp& w, const Ins& i, u32 mask) {
  VM_OPERANDS;
  if (!gather(w, mask, w.born)) return;
  if (mask != kFullMask) fail("mma in a warp of fewer than 32 threads");
  constexpr int kA = K / 4, kB = K / 8;
  const u16 *xa = x + 4, *xb = xa + kA, *xc = xb + kB;
  float a[16][K], b[K][8], d[16][8];
  for (int z = 0; z < kA; z++) {
    const u32* row = w.row(xa[z]);
    for (int l = 0; l < kLanes; l++) {
      float* to = &a[l / 4 + 8 * (z & 1)][2 * (l % 4) + 8 * (z >> 1)];
      to[0] = VALUE(static_cast<u16>(row[l]));
      to[1] = VALUE(static_cast<u16>(row[l] >> 16));
    }
  }
  for (int z = 0; z < kB; z++) {
    const u32* row = w.row(xb[z]);
    for (int l = 0; l < kLanes; l++) {
      b[2 * (l % 4) + 8 * z][l / 4] = VALUE(static_cast<u16>(row[l]));
      b[2 * (l % 4) + 1 + 8 * z][l / 4] = VALUE(static_cast<u16>(row[l] >> 16));
    }
  }
  for (int z = 0; z < 4; z++) {
    const u32* row = w.row(xc[z]);
    for (int l = 0; l < kLanes; l++) d[l / 4 + 8 * (z >> 1)][2 * (l % 4) + (z & 1)] = get<float>(row, l);
  }
  for (int m = 0; m < 16; m++)
    for (int k = 0; k < K; k++)
      for (int n = 0; n < 8; n++) d[m][n] += a[m][k] * b[k][n];
  for (int z = 0; z < 4; z++) {
    u32* row = w.row(x[z]);
    for (int l = 0; l < kLanes; l++) put<float>(row, l, d[l / 4 + 8 * (z >> 1)][2 * (l % 4) + (z & 1)]);
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
