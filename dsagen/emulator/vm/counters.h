// What a launch did, measured where that was asked for; counters.cpp says how each figure is reckoned.
#pragma once
#include "machine.h"

namespace vm {

// In the order of METRICS in counters.py.
enum Metric {
  kGlobalReadBytes,
  kGlobalWrittenBytes,
  kGlobalReadSectors,
  kGlobalWrittenSectors,
  kSharedReadWavefronts,
  kSharedWrittenWavefronts,
  kSharedReadConflicts,
  kSharedWrittenConflicts,
  kBulkBytes,
  kBulkBoxes,
  kClusterBytes,
  kMetrics
};

// What Python passes: how often each instruction ran, and the metrics. Sums over CTAs.
struct MeterTotals {
  u64* executions;
  u64* metrics;
};

// Of one CTA after another; what it has counted joins the launch's totals when it ends. start() is called before a warp
// begins, before() ahead of each instruction, after() behind it.
class Meter {
 public:
  explicit Meter(const Launch& launch);
  ~Meter();
  Meter(const Meter&) = delete;
  Meter& operator=(const Meter&) = delete;
  void start(const Warp& w);
  void before(Warp& w, const Ins& i, u32 mask);
  void after(const Warp& w);
  // What an instruction finds out while it runs: of any kind, and bytes of global memory that a bulk copy moves.
  void note(Metric metric, u64 value) { if (measured_) add(metric, value); }
  void bulk(u64 address, u32 bytes, bool write) {
    if (measured_) global(&address, 1, bytes, write);
  }

 private:
  void measure(Warp& w, const Ins& i, u32 mask);
  void global(const u64* addresses, u32 mask, u32 bytes, bool write);
  void shared(const u64* addresses, u32 mask, u32 bytes, bool write, bool serial);
  void add(Metric metric, u64 value) { found_[metric] += value; }

  MeterTotals& totals_;
  std::vector<u64> executions_;
  std::vector<u32> spinning_;  // by warp: lanes between a failed wait and their next one
  u64 metrics_[kMetrics] = {}, found_[kMetrics] = {};
  bool measured_ = false;
  u32 pc_ = 0, mask_ = 0;
  bool waits_ = false;
};

}  // namespace vm
