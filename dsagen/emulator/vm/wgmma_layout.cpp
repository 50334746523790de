// Where the elements of an operand lie that a matrix descriptor describes.
//
// An operand is rows (of A, or columns of B) of 32 bytes along k. As the PTX text lays it out, in bytes from the start,
// with p the bytes between neighbouring rows of a swizzle's pattern (128, 64 or 32), L and S the leading and the stride
// offset of the descriptor, r the row, k the dim:
//   k-major            r / 8 S + r % 8 p + k
//   k-major, none      r / 8 S + r % 8 16 + k / 16 L + k % 16                 (k in bytes)
//   MN-major           r / W L + r % W 2 + k % 8 p + k / 8 S                  (W = p / 2 elements of 16 bits)
//   MN-major, none     r / 8 S + r % 8 2 + k % 8 16 + k / 8 L
// The swizzle then exchanges chunks of 16 bytes by bits of the address itself, not of the offset: bits 4 and up by those
// from 7 on, less the base offset. So an H200 does it wherever the operand starts.
#include "wgmma.h"

namespace vm {
namespace {

struct Descriptor {
  u32 start, leading, stride, mode, base;
};
// By mode: none, 128, 64, 32 bytes.
constexpr u32 kPatternBytes[] = {16, 128, 64, 32}, kSwizzleMask[] = {0, 7, 3, 1}, kNone = 0;
constexpr u64 kReservedBits = 0x3ffull << 52 | 7ull << 46 | 3ull << 30 | 3ull << 14;

Descriptor decode(u64 bits, const char* what) {
  const auto shown = static_cast<unsigned long long>(bits);
  if (bits & kReservedBits)
    fail("wgmma: descriptor %#llx of %s has bits set that are reserved (14-15, 30-31, 46-48, 52-61)", shown, what);
  const Descriptor out{static_cast<u32>(bits & 0x3fff) << 4, static_cast<u32>(bits >> 16 & 0x3fff) << 4,
                       static_cast<u32>(bits >> 32 & 0x3fff) << 4, static_cast<u32>(bits >> 62),
                       static_cast<u32>(bits >> 49 & 7)};
  if (out.mode == kNone && out.base != 0)
    fail("wgmma: descriptor %#llx of %s has the base offset %u, and no swizzle that it would change", shown, what, out.base);
  return out;
}

}  // namespace

void add_chunks(u64 descriptor, u32 rows, bool transposed, const char* what, std::vector<u32>& addresses) {
  const Descriptor d = decode(descriptor, what);
  const u32 pattern = kPatternBytes[d.mode], mask = kSwizzleMask[d.mode];
  const size_t before = addresses.size();
  addresses.resize(before + 2 * rows);
  u32* next = addresses.data() + before;
  const auto add = [&](u32 offset) {
    const u32 address = d.start + offset;
    *next++ = address ^ ((address >> 7) - d.base & mask) << 4;
  };
  if (!transposed) {
    const u32 half = d.mode == 0 ? d.leading : kChunkBytes;
    for (u32 r = 0; r < rows; r++)
      for (u32 c = 0; c < 2; c++) add(r / 8 * d.stride + r % 8 * pattern + c * half);
    return;
  }
  const u32 width = pattern / 2;
  for (u32 r = 0; r < rows; r += 8)
    for (u32 k = 0; k < 16; k++) {
      if (d.mode == 0)
        add(r / 8 * d.stride + k % 8 * kChunkBytes + k / 8 * d.leading);
      else
        add(r / width * d.leading + r % width * 2 + k % 8 * pattern + k / 8 * d.stride);
    }
}

}  // namespace vm
