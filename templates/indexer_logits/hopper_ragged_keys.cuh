// A block's ring of keys that lie in one piece: tiles of e4m3 codes in rows of 128 B, swizzled for the tensor cores, and
// their scales. The warpgroups copy tiles in turn and all of them multiply each, so that a key comes once a unit.
#pragma once
#include "prims/ptx/bulk.cuh"
#include "prims/ptx/convert.cuh"
#include "prims/ptx/copy_word.cuh"
#include "prims/ptx/mbarrier.cuh"
#include "prims/ptx/memory.cuh"
#include "prims/ptx/thread.cuh"
#include "prims/ptx/wgmma.cuh"
#include "prims/types.cuh"

namespace indexer_logits {

template <class C, class S, class Params>
struct SharedKeyRing {
  static constexpr int kGroups = C::kWarps / 4, kDim = C::kDim, kRowBytes = 128, kTileBytes = C::kTileKeys * kRowBytes;
  static constexpr int kChunks = kDim / 16, kRowsAtOnce = 128 / kChunks;
  static_assert(C::kTileKeys == 128 && kRowsAtOnce % 8 == 0, "a thread copies the scale of a key, and its rows differ by whole eights");

  const Params& p;
  S& shared;
  int group, thread;  // the thread's warpgroup, and its number there

  // Threads of a warp set the barriers up, each those of a stage; a barrier of the block follows.
  DSA_DEVICE SharedKeyRing(const Params& params, S& shared_, int group_)
      : p(params), shared(shared_), group(group_), thread(ptx::thread_index() % 128) {
    static_assert(C::kStages <= 32, "a thread for each stage");
    if (group != 0 || thread >= C::kStages) return;
    ptx::mbarrier_init(landed(thread), 128);
    ptx::mbarrier_init(freed(thread), C::kWarps);
  }

  // Starts copying the first of `count` tiles, whose keys are first .. end - 1: of the last one there may be fewer.
  DSA_DEVICE void start(u32 first, u32 end_, u32 count) {
    next = first, end = end_, left = count;
#pragma unroll 1
    for (int i = 0; i < C::kAhead; ++i) fill();
  }

  // One tile more, where there is one, is on its way into the place of the one that was taken kStages before it.
  DSA_DEVICE void fill() {
    if (left == 0) return;
    if (filler == group) {
      ptx::mbarrier_wait(freed(to), to_parity ^ 1);
      p.wide_copies != 0 ? copy_rows<16>() : copy_rows<4>();
      const u32 key = next + thread;
      const u8* scale = p.scales + static_cast<i64>(key < end ? key : end - 1) * p.scale_stride_bytes;
      ptx::copy_async_4(ptx::shared_address(&shared.scales[to][0]) + 4 * thread, scale, key < end ? 4 : 0);
      ptx::mbarrier_arrive_after_copies(landed(to));
    }
    filler = filler + 1 == kGroups ? 0 : filler + 1;
    next += C::kTileKeys, --left;
    if (++to == C::kStages) to = 0, to_parity ^= 1;
  }

  // Returns once the oldest tile is there for products.
  DSA_DEVICE void await() const {
    ptx::mbarrier_wait(landed(from), from_parity);
    ptx::fence_proxy_async();
  }

  // The oldest tile: keys from its `first`-th on as the operand of a product, and the scale of its `place`-th one.
  DSA_DEVICE u64 operand(u32 first) const { return ptx::swizzled_operand(codes(from) + first * kRowBytes); }
  DSA_DEVICE float scale(u32 place) const {
    return ptx::float_of(ptx::load_shared_4(ptx::shared_address(&shared.scales[from][0]) + 4 * place));
  }

  // The warp is done with the oldest tile; whole warps come here.
  DSA_DEVICE void release() {
    ptx::warp_sync();
    if (thread % 32 == 0) ptx::mbarrier_arrive(freed(from));
    if (++from == C::kStages) from = 0, from_parity ^= 1;
  }

 private:
  u32 to = 0, to_parity = 0, from = 0, from_parity = 0;  // of the tile to fill, and of the oldest one
  u32 next, end, left;                                   // first key of the tile to fill, end of all, tiles to fill
  int filler = 0;                                        // the group that copies it

  DSA_DEVICE u32 codes(u32 of) const { return ptx::shared_address(&shared.keys[0][0]) + of * kTileBytes; }
  DSA_DEVICE u32 landed(u32 of) const { return ptx::shared_address(&shared.landed[0]) + 8 * of; }
  DSA_DEVICE u32 freed(u32 of) const { return ptx::shared_address(&shared.freed[0]) + 8 * of; }

  // The thread's 16 bytes of every kRowsAtOnce-th row, kBytes a copy; zeros behind the last key.
  template <int kBytes>
  DSA_DEVICE void copy_rows() const {
    const u32 first = static_cast<u32>(thread / kChunks), chunk = static_cast<u32>(thread % kChunks);
    const u32 target = ptx::swizzled_address(codes(to), first, chunk);
    const u8* source = p.keys + 16 * chunk;
#pragma unroll
    for (int row = 0; row < C::kTileKeys; row += kRowsAtOnce) {
      const u32 key = next + first + row;
      const u8* from = source + static_cast<i64>(key < end ? key : end - 1) * p.key_stride_bytes;
#pragma unroll
      for (int i = 0; i < 16; i += kBytes) {
        const u32 at = target + row * kRowBytes + i;
        if constexpr (kBytes == 16) ptx::copy_async_16(at, from, key < end ? 16 : 0);
        else ptx::copy_async_4(at, from + i, key < end ? 4 : 0);
      }
    }
  }
};

}  // namespace indexer_logits
