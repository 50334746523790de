// What threads know of each other (happens-before), and what is kept of each piece of memory to check accesses by it.
//
// An agent is a warp, the 16-byte copies that a warp has started, or an mbarrier. Times of a warp tick when it
// releases;
// times of its copies are their order of issue, lane by lane; times of an mbarrier are its phases. An access has the
// time, the agent and the lane of who did it; a thread knows of it once a chain of releases and acquires, barriers
// mostly, has brought it a clock that reaches there. A clock keeps one number for each agent, and 32 where lanes
// differ.
// Included by machine.h.
#pragma once
#include <algorithm>
#include <array>
#include <map>
#include <memory>
#include <mutex>

namespace vm {

struct Cta;
struct Warp;
struct Launch;
struct Region;

using LaneTimes = std::array<u32, kLanes>;
constexpr u32 kInFlight = ~0u;

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
  void clear();
  bool empty() const { return all_.empty(); }

 private:
  LaneTimes& widened(u32 agent);
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
  std::unique_ptr<std::map<u32, Knowledge>> foreign;  // by CTA

  void merge(u32 home, const Knowledge& other, u32 other_home);
  void clear();
  bool knows(u32 home, View view, u32 cta, u32 agent, u32 lane, u32 time) const;
};

// One access: who, when, where in the code.
struct Access {
  u32 cta;
  u16 agent;
  u8 warp, lane;
  u32 time, pc;
  u32 flags;
  u32 store;  // which of the warp's stores it belongs to
};
enum AccessFlag : u32 { kStrong = 1, kCtaScope = 2, kAsyncProxy = 4 };

// Accesses of one instruction by lanes of one warp.
struct Sharers {
  u32 cta;
  u16 agent;
  u16 flags;
  u32 lanes, time, pc;
};

// What is kept of some bytes: the last write, and the reads, or the atomic accesses, since.
struct Unit {
  Access write;
  Sharers sharers;  // lanes 0: none; kMany: `time` is where in the pool
};
constexpr u16 kMany = 0xffff;

// The list of a unit with sharers of several warps: a place for each warp of the CTA that the memory belongs to, if it
// belongs to one, and others.
struct SharerList {
  std::vector<Sharers> by_warp;
  std::vector<Sharers> others;
};

enum class Touch : u32 { kRead, kWrite, kStrong };

// Units for a stretch of memory: one for 16 bytes as long as they are accessed as a whole, else four or sixteen.
class Shadow {
 public:
  Shadow(u32 bytes, u32 warps);  // of one CTA with so many warps, or 0
  ~Shadow();
  Shadow(const Shadow&) = delete;
  void reset();
  // Calls each(unit) for the units of some bytes. `written`, if not null, is then their last write. Words that one warp
  // has written at one time are looked at as one where all are accessed: as long as `sees_all` says that all of that
  // warp's lanes are known, which of them wrote does not matter.
  template <class S, class F>
  void visit(u32 offset, u32 bytes, const Access* written, S sees_all, F each) {
    for (u32 granule = offset / 16; granule <= (offset + bytes - 1) / 16; granule++) {
      const u32 low = std::max(offset, 16 * granule), high = std::min(offset + bytes, 16 * granule + 16);
      const bool whole = high - low == 16;
      const u32 wanted = whole ? kWhole : ((low | high) & 3) == 0 ? kWords : kBytes;
      u32& level = levels_[granule];
      Unit* first = units_ + 4 * granule;
      if (level == kMerged && !(whole && sees_all(first->write))) unmerge(granule);
      if (level < wanted) split(granule, wanted);
      if (level == kWords && whole && written == nullptr && sees_all(first->write)) merge(granule);
      if (level == kWhole || level == kMerged) {
        each(first[0]);
        if (written != nullptr) {
          drop(first->sharers);
          first->write = *written;
          level = kWhole;
        }
        continue;
      }
      const u32 shift = level == kWords ? 2 : 0;
      if (level >= kBytes) first = bytes_units_[level - kBytes].data();
      const u32 begin = (low % 16) >> shift, end = (high - 16 * granule) >> shift;
      for (u32 n = begin; n < end; n++) each(first[n]);
      if (written == nullptr) continue;
      if (whole) {
        collapse(granule, *written);
        continue;
      }
      for (u32 n = begin; n < end; n++) {
        drop(first[n].sharers);
        first[n].write = *written;
      }
    }
  }
  void drop(Sharers& sharers) {
    if (sharers.lanes != 0 && sharers.agent == kMany) free_list(sharers.time);
    sharers.lanes = 0;
  }
  SharerList& list(const Sharers& sharers) { return lists_[sharers.time]; }
  void spread(Unit& unit);  // gives the sharers a list of their own

 private:
  Unit copied(const Unit& unit);
  void split(u32 granule, u32 level);
  void merge(u32 granule);
  void unmerge(u32 granule);
  void collapse(u32 granule, const Access& written);

  void free_list(u32 list);

  u32 warps_;
  // By 16 bytes; kBytes + where the bytes' units are.
  enum Level : u32 { kUntouched, kWhole, kMerged, kWords, kBytes };
  std::vector<u32> levels_;
  Unit* units_;              // by word
  std::vector<std::array<Unit, 16>> bytes_units_;
  std::vector<SharerList> lists_;
  std::vector<u32> free_lists_;
};

// What accesses by relaxed and by acquiring instructions find at an address.
struct SyncPlace {
  u64 version = 0;  // counts strong writes
  std::map<u32, Knowledge> wide;                   // by whose time: for all CTAs
  std::map<u32, std::map<u32, Knowledge>> narrow;  // the same, for one CTA
};

enum class Semantics : u32 { kWeak, kRelaxed, kAcquire, kRelease, kBoth };

// What the CTAs of a launch share.
class GlobalOrder {
 public:
  GlobalOrder(const Launch& launch, const std::vector<Region>& regions);
  bool on = false;
  bool locks = false;  // CTAs run on several OS threads
  u32 views = 1;  // bit per view that the kernel's instructions can tell from kSeen
  const std::vector<Region>& regions;

  static constexpr u32 kPageBytes = 1 << 14;
  struct Page {
    std::mutex lock;
    Shadow shadow{kPageBytes, 0};
  };
  Page& page(u32 region, u64 number);

  std::mutex lock;
  std::map<u64, SyncPlace> places;  // by global address

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
};

// Bytes for a message: of shared memory, or of a region.
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
  void meet(const Warp& w, u32 mask);
  // Fences.
  void fence(const Warp& w, u32 mask, u32 scope);
  void fence_proxy(const Warp& w, u32 mask);
  // Accesses of memory.
  void shared(const Warp& w, u32 lane, u32 offset, u32 bytes, Touch touch, u32 flags = 0);
  void global(const Warp& w, u32 lane, u32 region, u64 offset, u32 bytes, Touch touch, u32 flags = 0);
  // Whether strong accesses can make threads know of each other: the kernel has instructions for it.
  bool synchronises() const { return (views >> kPending & 1) != 0; }
  void find(const Warp& w, u32 lane, bool global, u64 address, Semantics semantics, u32 scope);
  void leave(const Warp& w, u32 lane, bool global, u64 address, Semantics semantics, u32 scope, bool replaces);
  // Asynchronous copies into shared memory.
  u32 issue_copy(const Warp& w, u32 lane, u32 offset, u32 bytes);
  void issue_bulk(const Warp& w, u32 lane, u32 offset, u32 bytes);
  void land_bulk(u32 offset, u32 bytes, u32 agent, u32 time);
  void wait_copies(const Warp& w, u32 lane, u32 count);
  void release_copies(u32 warp, u32 lane, u32 count, Knowledge& into) const;
  u32 copies_issued(u32 warp, u32 lane) const { return clocks_[warp].issued[lane]; }
  // mbarriers are agents.
  u32 new_agent() { return next_agent_++; }
  // Whether the lane knows of the last write of a word, which is `found`.
  bool knows_write(const Warp& w, u32 lane, u32 offset, View view, Access& found);
  Access now(const Warp& w, u32 lane, u32 flags = 0) const;
  bool knows(const Warp& w, u32 lane, View view, const Access& access) const;

 private:
  static Knowledge& own(WarpClocks& clocks, u32 lane);
  void promote(const Warp& w, u32 mask, View view);
  void issue(const Warp& w, u32 lane, u32 offset, u32 bytes, const Access& written);
  void check(const Warp& w, u32 lane, Unit& unit, Shadow& shadow, Touch touch, u32 flags, const Where& where);
  auto sees_all(const Warp& w) const;
  void check_write(const Warp& w, u32 lane, Unit& unit, Touch touch, const Where& where);
  void check_sharers(const Warp& w, u32 lane, Unit& unit, Shadow& shadow, const char* act, const Where& where) const;
  void check_scopes(const Warp& w, u32 lane, Unit& unit, Shadow& shadow, u32 flags, const Where& where) const;
  void share(const Warp& w, u32 lane, Unit& unit, Shadow& shadow, Touch touch, u32 flags, const Where& where);
  void share_beside(std::vector<Sharers>& others, const Warp& w, u32 lane, const Sharers& me) const;
  bool joins(const Warp& w, u32 lane, Sharers& other, u32 flags) const;
  bool ordered(const Warp& w, u32 lane, const Sharers& sharers, Access& culprit) const;
  bool has_looked(const Warp& w, u32 lane, const Where& where) const;
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
  std::vector<WarpClocks> clocks_;
  std::unique_ptr<Shadow> shadow_;
  std::map<u64, SyncPlace> places_;  // by shared address
  // By address, shared or global: the CTA's last strong access, and the version that it has seen.
  std::map<u64, std::pair<Access, u64>> looked_at_;
};

}  // namespace vm
