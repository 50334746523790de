// What a warp's lanes compute together.
#include "state.h"

#include <cstring>
#include <vector>

namespace host {
namespace {

float half_value(uint32_t bits) {
  static const std::vector<float> table = [] {
    std::vector<float> t(65536);
    for (uint32_t b = 0; b < 65536; ++b) {
      const auto half = static_cast<uint16_t>(b);
      _Float16 x;
      std::memcpy(&x, &half, 2);
      t[b] = static_cast<float>(x);
    }
    return t;
  }();
  return table[bits & 0xffff];
}

float bfloat_value(uint32_t bits) {
  const uint32_t word = bits << 16;
  float x;
  std::memcpy(&x, &word, 4);
  return x;
}

// Exact products; the sum with the accumulator is rounded once to fp32.
template <float (*value)(uint32_t)>
void mma(Lane* lanes) {
  double a[16][16], b[16][8], d[16][8];
  for (int l = 0; l < kWarp; ++l) {
    const int r = l / 4, c = l % 4;
    const uint32_t* in = lanes[l].exchange.in;
    for (int e = 0; e < 2; ++e) {
      a[r][2 * c + e] = value(in[0] >> (16 * e));
      a[r + 8][2 * c + e] = value(in[1] >> (16 * e));
      a[r][2 * c + 8 + e] = value(in[2] >> (16 * e));
      a[r + 8][2 * c + 8 + e] = value(in[3] >> (16 * e));
      b[2 * c + e][r] = value(in[4] >> (16 * e));
      b[2 * c + 8 + e][r] = value(in[5] >> (16 * e));
      d[r][2 * c + e] = lanes[l].exchange.accumulator[e];
      d[r + 8][2 * c + e] = lanes[l].exchange.accumulator[2 + e];
    }
  }
  for (int row = 0; row < 16; ++row)
    for (int k = 0; k < 16; ++k)
      for (int column = 0; column < 8; ++column) d[row][column] += a[row][k] * b[k][column];
  for (int l = 0; l < kWarp; ++l)
    for (int e = 0; e < 4; ++e)
      lanes[l].exchange.accumulator[e] = static_cast<float>(d[l / 4 + e / 2 * 8][2 * (l % 4) + e % 2]);
}

void load_matrices(Lane* lanes, int count, bool transposed, Op op, int line) {
  uint16_t rows[4][8][8];
  for (int l = 0; l < 8 * count; ++l) {
    m.current = &lanes[l];  // for the message
    const uint32_t address = lanes[l].exchange.in[0];
    const uint8_t* row = shared_bytes(address, 16, 16, name_of(op), line);
    note_read(address, 16, lanes[l].index / kWarp, 0xffffffffu, name_of(op), line);
    std::memcpy(rows[l / 8][l % 8], row, 16);
  }
  for (int l = 0; l < kWarp; ++l)
    for (int i = 0; i < count; ++i) {
      const int major = l / 4, minor = 2 * (l % 4);
      const uint32_t low = transposed ? rows[i][minor][major] : rows[i][major][minor];
      const uint32_t high = transposed ? rows[i][minor + 1][major] : rows[i][major][minor + 1];
      lanes[l].exchange.out[i] = low | high << 16;
    }
}

void shuffle(Lane* lanes, Op op, int line) {
  for (int l = 0; l < kWarp; ++l) {
    const uint32_t operand = lanes[l].exchange.in[1];
    const uint32_t source = op == Op::kShuffle ? operand % kWarp : static_cast<uint32_t>(l) ^ operand;
    if (source >= kWarp) fail("%s (line %d): lane %u does not exist", name_of(op), line, source);
    lanes[l].exchange.out[0] = lanes[source].exchange.in[0];
  }
}

void ballot(Lane* lanes) {
  uint32_t mask = 0;
  for (int l = 0; l < kWarp; ++l) mask |= (lanes[l].exchange.in[0] != 0 ? 1u : 0u) << l;
  for (int l = 0; l < kWarp; ++l) lanes[l].exchange.out[0] = mask;
}

void sum(Lane* lanes) {
  uint32_t total = 0;
  for (int l = 0; l < kWarp; ++l) total += lanes[l].exchange.in[0];
  for (int l = 0; l < kWarp; ++l) lanes[l].exchange.out[0] = total;
}

void warp_sync(Lane* lanes, int line) {
  std::vector<Lane*> all;
  for (int l = 0; l < kWarp; ++l) all.push_back(&lanes[l]);
  join_warps(all, "warp_sync", line);
}

void same_operand(Lane* lanes, Op op, int line) {
  for (int l = 1; l < kWarp; ++l)
    if (lanes[l].exchange.in[0] != lanes[0].exchange.in[0])
      fail("%s (line %d): the warp diverges, its lanes 0 and %d pass %u and %u", name_of(op), line, l, lanes[0].exchange.in[0],
           lanes[l].exchange.in[0]);
}

}  // namespace

const char* name_of(Op op) {
  switch (op) {
    case Op::kShuffle: return "shuffle";
    case Op::kShuffleXor: return "shuffle_xor";
    case Op::kBallot: return "ballot";
    case Op::kSum: return "warp_sum";
    case Op::kElectOne: return "elect_one";
    case Op::kWarpSync: return "warp_sync";
    case Op::kRegistersRaise: return "registers_raise";
    case Op::kRegistersLower: return "registers_lower";
    case Op::kLoadMatrixX4: return "load_matrix_x4";
    case Op::kLoadMatrixX4Trans: return "load_matrix_x4_trans";
    case Op::kLoadMatrixX2Trans: return "load_matrix_x2_trans";
    case Op::kMmaF16: return "mma_f16";
    case Op::kMmaBf16: return "mma_bf16";
  }
  return "?";
}

void execute(Op op, Lane* lanes, int line) {
  switch (op) {
    case Op::kShuffle:
    case Op::kShuffleXor: shuffle(lanes, op, line); break;
    case Op::kBallot: ballot(lanes); break;
    case Op::kSum: sum(lanes); break;
    case Op::kElectOne:
      for (int l = 0; l < kWarp; ++l) lanes[l].exchange.out[0] = l == m.elected;
      break;
    case Op::kWarpSync: warp_sync(lanes, line); break;
    case Op::kRegistersRaise:
    case Op::kRegistersLower: same_operand(lanes, op, line); break;
    case Op::kLoadMatrixX4: load_matrices(lanes, 4, false, op, line); break;
    case Op::kLoadMatrixX4Trans: load_matrices(lanes, 4, true, op, line); break;
    case Op::kLoadMatrixX2Trans: load_matrices(lanes, 2, true, op, line); break;
    case Op::kMmaF16: mma<half_value>(lanes); break;
    case Op::kMmaBf16: mma<bfloat_value>(lanes); break;
  }
}

}  // namespace host
