// What threads know of each other (happens-before), and what is kept of each piece of memory to check accesses by it.
//
// An agent is a warp, the 16-byte copies that a warp has started, the products of a warpgroup, or an mbarrier. Times of a
// warp tick when it releases; times of its copies are their order of issue, lane by lane; times of products are the groups
// that they are committed in; times of an mbarrier are its phases. An access has the
// time, the agent and the lane of who did it; a thread knows of it once a chain of releases and acquires, barriers
// mostly, has brought it a clock that reaches there. A clock keeps one number for each agent, and 32 where lanes
// differ.
// Included by machine.h.
#pragma once
#include <algorithm>
#include <array>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <unordered_map>

namespace vm {

struct Cta;
struct Warp;
struct Launch;
struct Region;

using LaneTimes = std::array<u32, kLanes>;
constexpr u32 kInFlight = ~0u;
constexpr u32 kNoRegion = ~0u;

class Clock {
 public:
  bool knows(u32 agent, u32 lane, u32 time) const {
    if (agent >= all_.size()) return false;
    if (time <= all_[agent]) return true;
    return wide_[agent] != 0 && time <= lanes_[wide_[agent] - 1][lane];
  }
  bool knows_all(u32 agent, u32 time) const { return agent < all_.size() && time <= all_[agent]; }
  void raise_all(u32 agent, u32 time);
  void raise(u32 agent, u32 lane, u32 time);
  void merge(const Clock& other);
  // Whether merging would change nothing.
  bool covers(const Clock& other) const;
  void clear();
  bool empty() const { return all_.empty(); }

 private:
  LaneTimes& widened(u32 agent);
  void narrow(u32 agent);
  void grow(size_t agents);

  std::vector<u32> all_;   // by agent
  std::vector<u16> wide_;  // by agent: 0, or 1 + where its lanes' times are
  std::vector<LaneTimes> lanes_;
};

// Ways in which something can be known.
enum View : u32 {
  kSeen,       // it happens before
  kProxied,    // and a fence.proxy.async lies in between
  kPublished,  // and a fence of gpu scope does: a relaxed write makes it known to other CTAs
  kPublishedCta,      // and a fence of any scope does: a relaxed write makes it known to the CTA
  kPending,    // a relaxed read has found it; a fence makes it happen before
  kViews
};

// Clocks of all views, of the threads of one CTA; what is known of other CTAs apart.
struct Knowledge {
  Clock views[kViews];
  // By CTA. Threads of a CTA that meet have it in common until one of them learns more.
  std::shared_ptr<std::map<u32, Knowledge>> foreign;
  std::map<u32, Knowledge>& own_foreign();  // to be changed
  const Knowledge* of(u32 cta) const;  // another one's, if anything

  void merge(u32 home, const Knowledge& other, u32 other_home);
  void learn(u32 home, u32 cta, View view, const Clock& clock);
  void see_in(View view);  // what is known is from now on known in that way as well
  void assign(const Knowledge& other);  // of the same CTA, and no less
  void clear();
  bool knows(u32 home, View view, u32 cta, u32 agent, u32 lane, u32 time) const;
};

}  // namespace vm

#include "shadow.h"

namespace vm {

// What accesses by relaxed and by acquiring instructions find at an address.
struct SyncPlace {
  u64 version = 0;  // counts strong writes
  std::map<u32, Clock> wide;                   // by whose time: for all CTAs
  std::map<u32, std::map<u32, Clock>> narrow;  // the same, for one CTA
};

// What a CTA's last strong access of an address was, and which version it found or made.
struct Look {
  Access access{};
  u64 version = 0;
};

// Both, of addresses of shared memory. The places stay for the next CTA.
class SharedPlaces {
 public:
  struct Row {
    u64 offset = 0;
    u32 next = 0;  // of the same word, 1 + its number
    SyncPlace place;
    Look look;
  };
  void reset(u32 bytes) {
    first_.assign(bytes / 4 + 1, 0);
    used_ = 0;
  }
  Row* find(u64 offset);
  Row& at(u64 offset);

 private:
  std::vector<u32> first_;  // by word, 1 + a row's number
  std::deque<Row> rows_;
  u32 used_ = 0;
};

enum class Semantics : u32 { kWeak, kRelaxed, kAcquire, kRelease, kBoth };

// What the CTAs of a launch share.
class GlobalOrder {
 public:
  GlobalOrder(const Launch& launch, const std::vector<Region>& regions);
  bool on = false;
  bool locks = false;  // CTAs run on several OS threads
  u32 views = 1;  // bit per view that the kernel's instructions can tell from kSeen
  bool has_groups = false;  // of bulk copies out of shared memory
  const std::vector<Region>& regions;

  static constexpr u32 kPageBytes = 1 << 14;
  struct Page {
    std::mutex lock;
    KeptShadow shadow = take_shadow(kPageBytes, 0);
  };
  Page& page(u32 region, u64 number);

  std::recursive_mutex lock;
  std::unordered_map<u64, SyncPlace> places;  // by global address

 private:
  std::vector<std::vector<std::unique_ptr<Page>>> pages_;
};

// The clocks of a warp's lanes: what all know, and what single ones know besides.
struct WarpClocks {
  bool differs = false;  // lanes' own clocks, copies and fences are not the same for all
  u32 time = 1;
  Knowledge common;
  std::unique_ptr<Knowledge> own[kLanes];
  u32 own_mask = 0;
  LaneTimes issued{};             // copies of each lane
  LaneTimes waited[kViews]{};     // of these, those that it has waited for, by view
  LaneTimes self[kViews]{};       // up to when its own accesses are known in a view

  void reset();  // what single lanes knew keeps its memory
};

std::string cta_name(const Launch& launch, u32 linear);

// Bytes for a message: of the shared memory of CTA `region`, or of a region.
struct Where {
  bool shared;
  u32 region;
  u64 offset;
  u32 bytes;
};

// A CTA's part in the order.
class Order {
 public:
  bool on = false;
  u32 warps = 0;
  // Set where lanes of one store meet: one of them performs it, which is fine if they agree.
  bool met = false;

  void reset(Cta& cta, u32 linear);
  // Barriers; masks are of the warp's lanes.
  void release(const Warp& w, u32 mask, Knowledge& into);
  void acquire(const Warp& w, u32 mask, const Knowledge& from);
  // The same where the times are those of another CTA, `home`.
  void release(const Warp& w, u32 mask, Knowledge& into, u32 home);
  void acquire(const Warp& w, u32 mask, const Knowledge& from, u32 home);
  // What a fence of a scope beyond the CTA has published, for a relaxed arrival.
  void release_published(const Warp& w, u32 mask, Knowledge& into, u32 home);
  // Whether a lane knows of anything that another CTA has done.
  bool knows_of(const Warp& w, u32 lane, u32 cta) const;
  // All lanes acquire what all of them have released into, and have nothing that is not in there.
  void acquire_all(const Warp& w, const Knowledge& from);
  void meet(const Warp& w, u32 mask);
  // Fences.
  void fence(const Warp& w, u32 mask, u32 scope);
  void fence_proxy(const Warp& w, u32 mask);
  // Accesses of memory.
  void shared(const Warp& w, u32 lane, u32 offset, u32 bytes, Touch touch, u32 flags = 0) {
    if (touch == Touch::kStrong ? !quick_strong(w, lane, offset, bytes, flags)
                                : !quick(w, lane, offset, bytes, touch == Touch::kWrite))
      visit_shared(w, lane, offset, bytes, touch, flags);
  }
  void global(const Warp& w, u32 lane, u32 region, u64 offset, u32 bytes, Touch touch, u32 flags = 0);
  // Of the shared memory of another CTA of the cluster.
  void remote(const Warp& w, u32 lane, Order& owner, u32 offset, u32 bytes, Touch touch, u32 flags);
  // A weak store of 4 or 8 bytes a lane, at offsets into shared memory (region kNoRegion) or a region of `size` bytes:
  // which lanes are done. Those are left that do not fill 16 bytes with others, or need a closer look.
  u32 store_together(const Warp& w, u32 mask, const u64* offsets, u32 bytes, u32 region, u64 size);
  // Whether strong accesses can make threads know of each other: the kernel has instructions for it.
  bool synchronises() const { return (views >> kPending & 1) != 0; }
  // Held while an atomic access finds, leaves and changes its word, so that others see it as one step.
  std::unique_lock<std::recursive_mutex> hold(bool global) const {
    std::unique_lock<std::recursive_mutex> guard(global_->lock, std::defer_lock);
    if (on && global && global_->locks) guard.lock();
    return guard;
  }
  // `owner` is null for global memory, else the CTA's in whose shared memory the address lies.
  void find(const Warp& w, u32 lane, Order* owner, u64 address, Semantics semantics, u32 scope);
  void leave(const Warp& w, u32 lane, Order* owner, u64 address, Semantics semantics, u32 scope, bool replaces);
  // Asynchronous copies into shared memory.
  u32 issue_copy(const Warp& w, u32 lane, u32 offset, u32 bytes);
  // Bulk copies (proxies.cpp). `flags` are of the write; nobody knows of it before it lands.
  void issue_bulk(const Warp& w, u32 lane, Order& owner, u32 offset, u32 bytes, u32 flags);
  void land_bulk(u32 offset, u32 bytes, u32 agent, u32 time);
  // A read of shared memory by a bulk copy, or a reduction there (kStrong): until time `time` of `agent`.
  void share_bulk(const Warp& w, u32 lane, Order& owner, u32 offset, u32 bytes, u32 cta, u32 agent, u32 time,
                  u32 flags);
  // Those that were in flight on an mbarrier of a CTA, by this instruction, are over at that time of it.
  void end_shared_bulk(u32 offset, u32 bytes, u32 cta, u32 agent, u32 time, u32 pc);
  // A read, write or reduction of global memory by a bulk copy, of the lane's group number `time`.
  void global_bulk(const Warp& w, u32 lane, u32 region, u64 offset, u64 bytes, Touch touch, u32 time);
  // Of the lane's groups, that many have been read, or done.
  void wait_groups(const Warp& w, u32 lane, u32 count, bool done);
  u32 reads_of_groups(u32 warp) const { return 2 * warps + warp; }
  u32 linear() const { return linear_; }
  // When a CTA of a cluster ends: what others did in its shared memory was to happen before.
  void leave_cluster(const Warp& w, u32 mask) { release(w, mask, exits_); }
  void note_visitor(const Warp& w, u32 lane, Order& owner) const;
  void require_others_done();
  void wait_copies(const Warp& w, u32 lane, u32 count);
  void release_copies(u32 warp, u32 lane, u32 count, Knowledge& into) const;
  u32 copies_issued(u32 warp, u32 lane) const { return clocks_[warp].issued[lane]; }
  // Products of a warpgroup, whose groups are times; see warpgroup_order.cpp.
  void read_by_warpgroup(const Warp& w, u32 time, const std::vector<u32>& addresses);
  void wait_for_warpgroup(const Warp& w, u32 time);
  // mbarriers are agents.
  u32 new_agent() { return next_agent_++; }
  // Whether the lane knows of the last write of a word, which is `found`.
  bool knows_write(const Warp& w, u32 lane, Order& owner, u32 offset, View view, Access& found);
  Access now(const Warp& w, u32 lane, u32 flags = 0) const;
  bool knows(const Warp& w, u32 lane, View view, const Access& access) const;

 private:
  static Knowledge& own(WarpClocks& clocks, u32 lane);
  void promote(const Warp& w, u32 mask, View view);
  bool knows_anything(const Warp& w, u32 lane, View view) const;
  void put(const Warp& w, u32 lane, View view, std::map<u32, Clock>& to) const;
  void visit_shared(const Warp& w, u32 lane, u32 offset, u32 bytes, Touch touch, u32 flags);
  bool quick(const Warp& w, u32 lane, u32 offset, u32 bytes, bool write);
  bool quick_strong(const Warp& w, u32 lane, u32 offset, u32 bytes, u32 flags);
  bool quick_read(const Sharers& me, Unit& unit, const Clock& seen);
  bool all_known(const Sharers& sharers, const Sharers& me, const Clock& seen) const;
  bool knows_list(u32 warp, const Sharers& sharers, Shadow& shadow) const;
  bool quick_write(const Sharers& me, Sharers& sharers, const Clock& seen);
  void issue(const Warp& w, u32 lane, Order& owner, u32 offset, u32 bytes, const Access& written);
  void require_fence(const Warp& w, u32 lane, const Unit& unit, const char* act, const Where& where) const;
  void share_unit(const Warp& w, u32 lane, Unit& unit, Shadow& shadow, const Sharers& me, const Where& where);
  bool put_striped(const Warp& w, Shadow& shadow, u32 granule, const Access& written);
  void check(const Warp& w, u32 lane, Unit& unit, Shadow& shadow, Touch touch, u32 flags, const Where& where);
  auto sees_all(const Warp& w) const;
  void check_unit(const Warp& w, u32 lane, Unit& unit, Shadow& shadow, Touch touch, u32 flags, const Where& where);
  void check_write(const Warp& w, u32 lane, Unit& unit, Touch touch, const Where& where);
  void check_sharers(const Warp& w, u32 lane, Unit& unit, Shadow& shadow, const char* act, const Where& where);
  void check_scopes(const Warp& w, u32 lane, Unit& unit, Shadow& shadow, u32 flags, const Where& where) const;
  void share(const Warp& w, u32 lane, Unit& unit, Shadow& shadow, Touch touch, u32 flags, const Where& where);
  void share_beside(SharerRow& others, const Warp& w, u32 lane, const Sharers& me) const;
  bool joins(const Warp& w, u32 lane, Sharers& other, u32 flags) const;
  bool ordered(const Warp& w, u32 lane, const Sharers& sharers, Access& culprit) const;
  u16 warpgroup_agent(u32 warp) const;
  bool known_to_warpgroup(u32 first, const Access& access) const;
  void require_known_to_warpgroup(u32 first, const Access& written, const Where& where);
  void share_with_warpgroup(const Warp& w, Unit& unit, const Sharers& me, const Where& where);
  bool has_looked(const Warp& w, u32 lane, const Where& where);
  Order& order_of(const Where& where) const;
  bool is_same_store(const Warp& w, const Access& other) const;
  std::string describe(const Where& where) const;
  [[noreturn]] void clash(u32 lane, const char* act, const Access& other, const char* did, const Where& where) const;
  template <class F>
  void each_view(F f) const {
    for (u32 v = 0; v < kViews; v++)
      if (views >> v & 1) f(static_cast<View>(v));
  }

  Cta* cta_ = nullptr;
  GlobalOrder* global_ = nullptr;
  u32 linear_ = 0, views = 1, next_agent_ = 0;
  u32 first_warpgroup_ = 0;  // agent
  std::vector<WarpClocks> clocks_;
  KeptShadow shadow_;
  SharedPlaces places_;
  std::unordered_map<u64, Look> looks_;  // by global address, or that of another CTA's shared memory
  // In a cluster: what the threads that have exited knew, and the last access of this shared memory by each lane of
  // other CTAs and by the bytes that each mbarrier has counted.
  Knowledge exits_;
  std::map<u64, Access> visitors_;
};

}  // namespace vm
