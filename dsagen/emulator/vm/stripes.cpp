// Stores of a warp in which several lanes fill 16 bytes: checked and kept as one write.
#include "machine.h"

namespace vm {
namespace {

// Lanes that write the words of 16 bytes, as flags of an access.
struct Stripe {
  u64 granule;
  u32 words;  // bit each
  u32 flags, lanes;
};

// The stripes of a store, where it consists of nothing else; their number, or 0.
u32 find_stripes(u32 mask, const u64* offsets, u32 bytes, u64 size, Stripe* stripes) {
  const u32 most = static_cast<u32>(__builtin_popcount(mask)) * bytes / 16;
  u8 slots[64] = {};  // by hash of the granule: 1 + its stripe
  u32 count = 0, filled = 0;
  for (u32 m = mask; m != 0; m &= m - 1) {
    const u32 lane = static_cast<u32>(__builtin_ctz(m));
    const u64 offset = offsets[lane], granule = offset / 16;
    if ((offset & (bytes - 1)) != 0 || offset >= size) return 0;
    u32 slot = static_cast<u32>(granule) * 0x9e3779b1u >> 26;
    while (slots[slot] != 0 && stripes[slots[slot] - 1].granule != granule) slot = (slot + 1) % 64;
    if (slots[slot] == 0) {
      if (count == most) return 0;
      stripes[count] = {granule, 0, kStriped, 0};
      slots[slot] = static_cast<u8>(++count);
    }
    Stripe& stripe_of = stripes[slots[slot] - 1];
    for (u32 word = static_cast<u32>(offset % 16 / 4), end = word + bytes / 4; word != end; word++) {
      if (stripe_of.words >> word & 1) return 0;
      stripe_of.words |= 1u << word;
      stripe_of.flags |= stripe(word, lane);
      filled++;
    }
    stripe_of.lanes |= 1u << lane;
  }
  return filled == 4 * count ? count : 0;
}

}  // namespace

// False, and nothing has changed, where something that was there before is not known to the whole warp.
bool Order::put_striped(const Warp& w, Shadow& shadow, u32 granule, const Access& written) {
  u32 count;
  const Unit* units = shadow.coarse(granule, count);
  if (units == nullptr) return false;
  const Clock& seen = clocks_[w.index].common.views[kSeen];
  for (u32 n = 0; n < count; n++) {
    const Access& last = units[n].write;
    const Sharers& sharers = units[n].sharers;
    if (last.time != 0) {
      if (last.cta != linear_) return false;
      // What a lane has written itself is known to it.
      const bool same = last.agent == written.agent &&
                        (count == 1 ? last.flags == written.flags : last.lane == word_of(written, n).lane);
      if (!same && !seen.knows_all(last.agent, last.time)) return false;
    }
    if (sharers.lanes == 0) continue;
    if (sharers.agent == kMany) {
      if (!knows_list(w.index, sharers, shadow)) return false;
    } else if (sharers.cta != linear_ || sharers.time == kInFlight || !seen.knows_all(sharers.agent, sharers.time)) {
      return false;
    }
  }
  shadow.put_striped(granule, written);
  return true;
}

u32 Order::store_together(const Warp& w, u32 mask, const u64* offsets, u32 bytes, u32 region, u64 size) {
  Stripe stripes[kLanes];
  const u32 count = find_stripes(mask, offsets, bytes, size & ~u64{15}, stripes);
  u32 done = 0;
  Access written = now(w, 0);
  for (u32 n = 0; n < count; n++) {
    const Stripe& one = stripes[n];
    written.flags = one.flags;
    written.lane = static_cast<u8>(__builtin_ctz(one.lanes));
    bool put;
    if (region == kNoRegion) {
      put = put_striped(w, *shadow_, static_cast<u32>(one.granule), written);
    } else {
      constexpr u32 kGranules = GlobalOrder::kPageBytes / 16;
      GlobalOrder::Page& page = global_->page(region, one.granule / kGranules);
      std::unique_lock<std::mutex> guard(page.lock, std::defer_lock);
      if (global_->locks) guard.lock();
      put = put_striped(w, *page.shadow, static_cast<u32>(one.granule % kGranules), written);
    }
    if (put) done |= one.lanes;
  }
  return done;
}

}  // namespace vm
