// CTAs that take turns on one OS thread.
#pragma once
#include <atomic>
#include <memory>

#include "machine.h"

namespace vm {

// What the OS threads of a launch share.
struct Grid {
  explicit Grid(Launch& launch);
  Launch& launch;
  std::vector<Region> regions;
  GlobalOrder order;
  u32 cluster_size;
  u32 count;                     // of clusters
  std::atomic<u32> next{0};      // the cluster that starts next
  std::atomic<u64> activity{0};  // changes while some thread gets on
};

class Machine {
 public:
  explicit Machine(Grid& grid);
  // One turn of each resident CTA; false once all of the grid have finished. Throws a Fault.
  bool turn();
  Cta* find(u32 linear);
  void add_counters(u64* to) const;
  // Starts CTAs that have room, and leaves those that have finished.
  void fill();

 private:
  [[noreturn]] void report_standstill();
  void start(u32 cluster);
  void retire(size_t first);

  Grid& grid_;
  std::vector<std::unique_ptr<Cta>> residents_;  // those of a cluster next to each other
  std::vector<std::unique_ptr<Cluster>> clusters_;  // of the residents, in their order
  std::vector<std::unique_ptr<Cta>> spare_;
  Random random_{};
  u32 idle_ = 0, still_ = 0;  // turns in a row in which nothing was done, or nothing was written
  u64 activity_ = 0;
};

}  // namespace vm
