// Tensor maps, as dsagen/tensor_map.py writes them for the emulator: opaque to kernels, which pass them on.
#include "tensor_map.h"

namespace vm {
namespace {

// The same layout there.
#pragma pack(push, 1)
struct Map {
  char magic[8];
  u8 rank, type, swizzle_bytes, element_bytes;
  u32 fills_with_nan;
  u64 address;
  u32 last[5];  // sizes less 1
  u64 strides[4];
  u16 box[5];
  u8 steps[5];
};
#pragma pack(pop)
constexpr u32 kMapBytes = 128;
// Bytes by which a box may lie off the tensor's beginning in the first dimension, wherever it lies.
constexpr i64 kUnit = 16;
static_assert(sizeof(Map) <= kMapBytes);
const char kMagic[] = "dsagenTM";

// By the number of a type in the map: of the atomic operation on it (vm/atomics.cpp); kNone where there is none.
constexpr u32 kNone = 15;
enum Type : u32 { kUnsigned, kSigned, kFloat, kDouble, kHalf, kBrain };
// uint8, uint16, uint32, int32, uint64, int64, float16, float32, float64, bfloat16; float32 flushed, of which no device has
// been asked; tfloat32 and the same flushed
constexpr u32 kTypes[] = {kNone, kNone, kUnsigned, kSigned, kUnsigned, kSigned, kHalf, kFloat,
                          kDouble, kBrain, kNone, kNone, kNone};
constexpr u32 kFirstTf32 = 11;

const u8* map_bytes(Warp& w, int lane, u64 address) {
  if (address % 64 != 0) fail("tensor map at %#llx: no multiple of 64", static_cast<unsigned long long>(address));
  const Launch& launch = *w.cta->launch;
  if ((address & ~(kWindowBytes - 1)) != kParamWindow)
    return global_bytes(*w.cta, address, kMapBytes, false, w.grid_waited >> lane & 1);
  const u64 offset = address - kParamWindow;
  if (offset > launch.param_bytes || launch.param_bytes - offset < kMapBytes)
    fail("tensor map at parameter byte %llu: there are %u", static_cast<unsigned long long>(offset),
         launch.param_bytes);
  return launch.params + offset;
}

}  // namespace

Box read_box(Warp& w, int lane, u64 address, const i32* at, u32 rank, bool stores) {
  w.cta->fault_lane = static_cast<u32>(lane);
  Map map;
  std::memcpy(&map, map_bytes(w, lane, address), sizeof map);
  if (std::memcmp(map.magic, kMagic, sizeof map.magic) != 0)
    fail("the tensor map at %#llx was not encoded for the emulator (dsagen.tensor_map)",
         static_cast<unsigned long long>(address));
  if (map.rank != rank) fail("a tensor map of rank %u where the instruction has %u coordinates", map.rank, rank);
  if (static_cast<i64>(at[0]) * map.element_bytes % kUnit != 0)
    fail("cp.async.bulk.tensor: coordinate %d of the first dimension, of elements of %u bytes: its bytes are no "
         "multiple of 16, which a device answers with an illegal instruction", at[0], map.element_bytes);
  Box box{};
  box.rank = rank;
  box.element_bytes = map.element_bytes;
  box.swizzle = map.swizzle_bytes;
  box.type = map.type;
  box.fills_with_nan = map.fills_with_nan != 0;
  // As an H200 stores: elements that are none of the tensor's, up to the end of the 16 bytes that its last one is of.
  box.in_units = stores;
  box.rounds = map.type >= kFirstTf32;
  box.address = map.address;
  for (u32 n = 0; n < rank; n++) {
    box.sizes[n] = static_cast<u64>(map.last[n]) + 1;
    box.strides[n] = n == 0 ? map.element_bytes : map.strides[n - 1];
    // There is no step within a row.
    box.steps[n] = n == 0 ? 1 : map.steps[n];
    box.counts[n] = (map.box[n] + box.steps[n] - 1) / box.steps[n];
    box.at[n] = at[n];
  }
  return box;
}

u32 reduction_flags(const Box& box, u32 operation) {
  const u32 type = kTypes[box.type];
  if (type == kNone) fail("a reduction of elements that have none: type %u of the tensor map", box.type);
  return static_cast<u32>(__builtin_ctz(box.element_bytes)) << 3 | 1u << 5 | operation << 16 | type << 20;
}

}  // namespace vm
