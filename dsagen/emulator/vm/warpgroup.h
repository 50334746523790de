// Four warps that multiply matrices together, and what their products do while nobody waits.
//
// A product's values are there at once, since compilers copy accumulators ahead of the wait. Its reads of shared memory
// last until the wait for its group: with checks for races they are kept as reads of the warpgroup, an agent of its own
// whose times are the groups; without, the operands are compared at the wait with what they were.
// Included by machine.h.
#pragma once

namespace vm {

constexpr u32 kGroupWarps = 4;

// What a warp has committed of its products. Groups count from 1.
struct ProductGroups {
  u32 committed = 0, waited = 0;
  u32 last = 0;  // the group of the last product
};

// Operands of a product that may still be read.
struct OperandsInUse {
  u32 group, pc;
  std::vector<u32> addresses;  // of 16 bytes each
  std::vector<u8> bytes;
};

struct Warpgroup {
  u32 arrived = 0, pc = 0;  // warps, a bit each, that stand at a product until the others come; and where
  std::vector<OperandsInUse> in_use, spare;
};

}  // namespace vm
