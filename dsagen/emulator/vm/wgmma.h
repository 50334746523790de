// Operands of wgmma.mma_async: where they lie, and what is computed of them.
#pragma once
#include "machine.h"

namespace vm {

// Rows of A, and of both operands as bytes: 16 elements of 16 bits, 32 of 8, 8 of 32.
constexpr u32 kRowsOfA = 64, kMostColumns = 256, kRowBytes = 32, kChunkBytes = 16;

// flags of the instruction; its imm is the number of columns.
struct WgmmaForm {
  u32 columns;
  u32 a_type, b_type;      // as kUnpack has them; of whole numbers 1: signed
  bool narrow;             // the accumulator is f16
  bool a_in_registers;
  bool negative;           // of the product
  bool a_transposed, b_transposed;
  bool saturating;
  WgmmaForm(const Ins& i)
      : columns(static_cast<u32>(i.imm)), a_type(i.flags & 15), b_type(i.flags >> 4 & 15), narrow(i.flags >> 8 & 1),
        a_in_registers(i.flags >> 9 & 1), negative(i.flags >> 10 & 1), a_transposed(i.flags >> 11 & 1),
        b_transposed(i.flags >> 12 & 1), saturating(i.flags >> 13 & 1) {}
  u32 results() const { return columns / (narrow ? 4 : 2); }
};

// Appends the addresses of an operand's chunks of 16 bytes: of rows, both halves of each row after the other; of a
// transposed one of each 8 rows, dim after dim. Throws where the descriptor is not one that the machine knows.
void add_chunks(u64 descriptor, u32 rows, bool transposed, const char* what, std::vector<u32>& addresses);

// What a product is computed of. `a` is null where A lies in registers, whose slots are then `a_slots`.
struct WgmmaOperands {
  const u8 *a, *b;
  const u16 *d, *a_slots;
  bool adds;  // to what the accumulators hold
};

}  // namespace vm
