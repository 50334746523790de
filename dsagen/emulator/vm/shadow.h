// What is kept of each piece of memory to check accesses by it: the last write, and the reads, or atomic accesses, since.
// Included by order.h.
#pragma once

namespace vm {

// One access: who, when, where in the code.
struct Access {
  u32 cta;
  u16 agent;
  u8 warp, lane;
  u32 time, pc;
  u32 flags;
  u32 store;  // which of the warp's stores it belongs to
};
enum AccessFlag : u32 { kStrong = 1, kCtaScope = 2, kAsyncProxy = 4, kByWarpgroup = 8, kStriped = 16 };
constexpr u32 kWarpShift = 8;  // in the flags of what an asynchronous copy of a warp shares
// Of a write of 16 bytes by several lanes at once (kStriped): which lane wrote a word, kept above the flags.
constexpr u32 kStripesAt = 8, kStripeBits = 5;
inline u32 stripe(u32 word, u32 lane) { return lane << (kStripesAt + kStripeBits * word); }
inline Access word_of(const Access& write, u32 word) {
  Access out = write;
  if ((write.flags & kStriped) == 0) return out;
  out.lane = static_cast<u8>(write.flags >> (kStripesAt + kStripeBits * word) & (kLanes - 1));
  out.flags = write.flags & (kStriped - 1);
  return out;
}

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
  Sharers sharers;  // lanes 0: none; kMany: `time` is the number of their list
};
constexpr u16 kMany = 0xffff;

// A few in place, so that there is one piece of memory to fetch; more elsewhere.
class SharerRow {
 public:
  Sharers* begin() { return more_.empty() ? few_ : more_.data(); }
  const Sharers* begin() const { return more_.empty() ? few_ : more_.data(); }
  Sharers* end() { return begin() + count_; }
  const Sharers* end() const { return begin() + count_; }
  void push_back(const Sharers& one) {
    if (count_ < kFew && more_.empty()) {
      few_[count_++] = one;
      return;
    }
    if (more_.empty()) {
      more_.reserve(4 * kFew);
      more_.assign(few_, few_ + count_);
    }
    more_.push_back(one);
    count_++;
  }
  void clear() {
    count_ = 0;
    more_.clear();
  }

 private:
  static constexpr u32 kFew = 2;
  u32 count_ = 0;
  Sharers few_[kFew];
  std::vector<Sharers> more_;
};

// Sharers of several warps. Units that came of one by a split have one list until theirs changes.
struct SharerList {
  u32 units = 0;
  u32 used = 0;      // of the warps of the CTA that the memory belongs to, those that have an entry; a bit each
  u32 known_by = 0;  // warps that are found to know of all entries
  SharerRow others;
};

enum class Touch : u32 { kRead, kWrite, kStrong };

// Units for a stretch of memory: one for 16 bytes as long as they are accessed as a whole, else four or sixteen.
class Shadow {
 public:
  Shadow(u32 bytes, u32 warps);  // of one CTA with so many warps, or 0
  ~Shadow();
  Shadow(const Shadow&) = delete;
  void reset(u32 owner);
  bool fits(u32 bytes, u32 warps) const { return levels_.size() == (bytes + 15) / 16 && warps_ == warps; }
  size_t held_bytes() const;  // of memory, about
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
      Unit& all = wholes_[granule];
      if ((level & kKind) == kMerged && !(whole && sees_all(all.write))) unmerge(granule);
      if (is_striped(granule) && !(whole && sees_all(all.write))) split(granule, kWords);
      if ((level & kKind) < wanted) split(granule, wanted);
      if ((level & kKind) == kWords && whole && written == nullptr && sees_all(words_[level / kKinds][0].write))
        merge(granule);
      const u32 kind = level & kKind;
      if (kind == kWhole || kind == kMerged) {
        each(all);
        if (written != nullptr) {
          if (kind == kMerged) free_words(granule);
          drop(all.sharers);
          all.write = *written;
          level = kWhole;
        }
        continue;
      }
      const u32 shift = kind == kWords ? 2 : 0;
      Unit* first = kind == kWords ? words_[level / kKinds].data() : byte_units_[level / kKinds].data();
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
  // The `count` units that stand for just these bytes at present; null where visit() has to see to it.
  template <class S>
  Unit* exact(u32 offset, u32 bytes, bool write, S sees_all, u32& count) {
    const u32 granule = offset / 16, level = levels_[granule], kind = level & kKind;
    count = 1;
    if (bytes == 16) {
      if (is_striped(granule) && !sees_all(wholes_[granule].write)) return nullptr;
      if (kind == kWhole || (kind == kMerged && !write)) return wholes_ + granule;
      if (kind != kWords || write || !sees_all(words_[level / kKinds][0].write)) return nullptr;
      merge(granule);
      return (levels_[granule] & kKind) == kMerged ? wholes_ + granule : nullptr;
    }
    count = bytes / 4;
    const bool fits = kind == kWords && (bytes == 4 || bytes == 8);
    return fits ? words_[level / kKinds].data() + offset / 4 % 4 : nullptr;
  }

  // The units of 16 bytes, one or four words; none where nobody has accessed them, null where there are bytes.
  Unit* coarse(u32 granule, u32& count) {
    const u32 level = levels_[granule], kind = level & kKind;
    count = kind == kUntouched ? 0 : kind == kWords ? 4 : 1;
    return kind == kBytes ? nullptr : kind == kWords ? words_[level / kKinds].data() : wholes_ + granule;
  }
  // A striped write of 16 bytes that have coarse units. Words that have units of their own keep them.
  void put_striped(u32 granule, const Access& written) {
    u32& level = levels_[granule];
    if ((level & kKind) == kWords) {
      Unit* words = words_[level / kKinds].data();
      for (u32 n = 0; n < 4; n++) {
        drop(words[n].sharers);
        words[n].write = word_of(written, n);
      }
      return;
    }
    Unit& all = wholes_[granule];
    if ((level & kKind) == kMerged) free_words(granule);
    if (level != kUntouched) drop(all.sharers);
    all.sharers.lanes = 0;
    all.write = written;
    level = kWhole;
  }

  void drop(Sharers& sharers) {
    if (sharers.lanes != 0 && sharers.agent == kMany && --lists_[sharers.time].units == 0) free_list(sharers.time);
    sharers.lanes = 0;
  }
  void spread(Unit& unit);  // gives the sharers a list of their own
  SharerList& list(const Sharers& sharers) { return lists_[sharers.time]; }
  // The list of these sharers alone, which may be changed.
  SharerList& list_to_change(Sharers& sharers) {
    if (lists_[sharers.time].units > 1) take_list(sharers);
    SharerList& mine = lists_[sharers.time];
    mine.known_by = 0;
    return mine;
  }
  // Whether lists have a place for each warp of a CTA.
  bool by_warp(u32 cta) const { return warps_ != 0 && cta == owner_; }
  // What a list has of a warp among its `used` ones.
  Sharers entry(const Sharers& sharers, u32 warp) const {
    const Entry& e = entries_[sharers.time * warps_ + warp];
    return {owner_, static_cast<u16>(warp), static_cast<u16>(e.flags), e.lanes, e.time, e.pc};
  }
  void set_entry(const Sharers& sharers, const Sharers& one) {
    lists_[sharers.time].used |= 1u << one.agent;
    entries_[sharers.time * warps_ + one.agent] = {one.lanes, one.time, one.pc, one.flags};
  }
  template <class F>
  void each(const Sharers& sharers, F f) const {
    const SharerList& list = lists_[sharers.time];
    for (u32 m = list.used; m != 0; m &= m - 1) f(entry(sharers, static_cast<u32>(__builtin_ctz(m))));
    for (const Sharers& other : list.others) f(other);
  }

 private:
  struct Entry {
    u32 lanes, time, pc : 29, flags : 3;
  };
  // Of 16 bytes: what there is of them, and below, by kKinds, where the units of its words or bytes are. Merged are words that
  // have a unit of their own each, and one for all that counts meanwhile.
  enum Kind : u32 { kUntouched, kWhole, kMerged, kWords, kBytes, kKinds = 8, kKind = kKinds - 1 };

  bool is_striped(u32 granule) const {
    return (levels_[granule] & kKind) == kWhole && (wholes_[granule].write.flags & kStriped) != 0;
  }
  void take_list(Sharers& sharers);
  Unit copied(const Unit& unit);
  void split(u32 granule, u32 level);
  void merge(u32 granule);
  void unmerge(u32 granule);
  void collapse(u32 granule, const Access& written);
  u32 new_words();
  void free_words(u32 granule);
  u32 new_list();
  void free_list(u32 list);

  u32 warps_;
  u32 owner_ = 0;  // the CTA whose memory it is
  std::vector<u32> levels_;
  Unit* wholes_;
  std::vector<std::array<Unit, 4>> words_;
  std::vector<std::array<Unit, 16>> byte_units_;
  std::vector<u32> free_words_, free_bytes_;
  std::vector<SharerList> lists_;
  std::vector<Entry> entries_;  // of each list, a warp each
  std::vector<u32> free_lists_;
};

// A shadow goes back to those that later launches of the process take: the system would clear other memory page by page.
struct GiveBack {
  void operator()(Shadow* shadow) const;
};
using KeptShadow = std::unique_ptr<Shadow, GiveBack>;
KeptShadow take_shadow(u32 bytes, u32 warps);  // as a new one, after a reset

}  // namespace vm
