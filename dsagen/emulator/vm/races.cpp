// Happens-before in shared memory. Each warp has a vector clock, with one more entry for the asynchronous engine, whose
// clock counts landings. A barrier or an mbarrier collects the clocks of those who arrive and gives them to those who
// wait. Two accesses of a word, one of them a write, by warps that no such chain connects are a race.
#include <algorithm>

#include "machine.h"

namespace vm {
namespace {

constexpr u32 kInFlight = ~0u;

[[noreturn]] void report(const Cta& cta, u32 word, const char* what, const char* other, u32 agent, u32 pc) {
  const std::string who = agent == cta.warps.size() ? std::string("an asynchronous copy") : print("warp %u", agent);
  fail("race: %s of shared byte %u, which %s %s with no barrier in between (%s)", what, 4 * word, who.c_str(), other,
       place(cta, pc).c_str());
}

}  // namespace

void RaceDetector::reset(u32 warp_count, u32 shared_bytes) {
  agents = warp_count + 1;
  clocks.assign(static_cast<size_t>(warp_count) * agents, 0);
  for (u32 n = 0; n < warp_count; n++) clocks[n * agents + n] = 1;
  const size_t words = (shared_bytes + 3) / 4;
  writes.assign(words, Write());
  reads.assign(words * agents, 0);
  read_places.assign(words, 0);
  landings = 0;
}

void RaceDetector::release(u32 warp, Clock& into) {
  into.resize(agents);
  u32* own = clock_of(warp);
  for (u32 n = 0; n < agents; n++) into[n] = std::max(into[n], own[n]);
  own[warp]++;
}

void RaceDetector::acquire(u32 warp, const Clock& from) {
  u32* own = clock_of(warp);
  for (size_t n = 0; n < from.size(); n++) own[n] = std::max(own[n], from[n]);
}

void RaceDetector::release_landing(u32 landing, Clock& into) {
  into.resize(agents);
  into[agents - 1] = std::max(into[agents - 1], landing);
}

void RaceDetector::acquire_landing(u32 warp, u32 landing) {
  u32& seen = clock_of(warp)[agents - 1];
  seen = std::max(seen, landing);
}

void RaceDetector::check_write(const Cta& cta, u32 warp, u32 word, bool narrow) {
  const u32* own = clock_of(warp);
  const Write& last = writes[word];
  if (last.clock > own[last.agent] && last.agent != warp && !(narrow && last.narrow))
    report(cta, word, "write", "writes", last.agent, last.pc);
  const u32* seen = &reads[static_cast<size_t>(word) * agents];
  u32 unordered = 0;
  for (u32 n = 0; n < agents; n++) unordered |= static_cast<u32>(seen[n] > own[n] && n != warp);
  if (unordered == 0) return;
  for (u32 n = 0; n < agents; n++)
    if (n != warp && seen[n] > own[n]) report(cta, word, "write", "reads", n, read_places[word]);
}

// Accesses of fewer than 4 bytes share a word with others that are none of their business: two of them never race.
void RaceDetector::access(const Cta& cta, const Warp& w, u32 offset, u32 bytes, bool write) {
  const bool narrow = bytes < 4;
  u32* own = clock_of(w.index);
  for (u32 word = offset / 4; word <= (offset + bytes - 1) / 4; word++) {
    if (write) {
      check_write(cta, w.index, word, narrow);
      writes[word] = {own[w.index], static_cast<u16>(w.index), narrow, w.now};
      continue;
    }
    const Write& last = writes[word];
    if (last.clock > own[last.agent] && last.agent != w.index && !(narrow && last.narrow))
      report(cta, word, "read", "writes", last.agent, last.pc);
    if (narrow) continue;
    reads[static_cast<size_t>(word) * agents + w.index] = own[w.index];
    read_places[word] = w.now;
  }
}

void RaceDetector::issue(const Cta& cta, const Warp& w, u32 offset, u32 bytes) {
  for (u32 word = offset / 4; word < (offset + bytes) / 4; word++) {
    check_write(cta, w.index, word, false);
    writes[word] = {kInFlight, static_cast<u16>(agents - 1), false, w.now};
  }
}

u32 RaceDetector::land(u32 offset, u32 bytes) {
  landings++;
  for (u32 word = offset / 4; word < (offset + bytes) / 4; word++) writes[word].clock = landings;
  return landings;
}

void RaceDetector::check_initialised(const Cta& cta, const Warp& w, u32 offset) {
  const Write& last = writes[offset / 4];
  if (last.agent != w.index && last.clock > clock_of(w.index)[last.agent])
    report(cta, offset / 4, "use of the mbarrier", "initialises", last.agent, last.pc);
}

}  // namespace vm
