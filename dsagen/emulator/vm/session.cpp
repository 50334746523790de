// The entry points for Python that run a launch: all at once, or step by step.
#include <cstdio>
#include <mutex>
#include <system_error>
#include <thread>

#include "schedule.h"

namespace {

using vm::Grid;
using vm::Launch;
using vm::Machine;

struct Session {
  explicit Session(Launch& launch) : grid(launch), machine(grid) {}
  Grid grid;
  Machine machine;
};

const char kTooMuch[] = "the machine needs more of this host than it has: ";

void run_machine(Grid& grid, std::mutex& lock, std::string& message) {
  const auto stop = [&](const std::string& text) {
    grid.next = grid.count;
    const std::lock_guard<std::mutex> guard(lock);
    if (message.empty()) message = text;
  };
  try {
    Machine machine(grid);
    try {
      while (machine.turn()) {
      }
    } catch (const vm::Fault& fault) {
      stop(fault.text);
    }
    const std::lock_guard<std::mutex> guard(lock);
    machine.add_counters(grid.launch.counters);
  } catch (const std::exception& error) {
    stop(std::string(kTooMuch) + error.what());
  }
}

enum Status : int { kRuns, kFaulted, kFinished };

template <class F>
int guarded(Session& session, F work) {
  try {
    return work() ? kRuns : kFinished;
  } catch (const vm::Fault& fault) {
    snprintf(session.grid.launch.message, sizeof session.grid.launch.message, "%s", fault.text.c_str());
  } catch (const std::exception& error) {
    snprintf(session.grid.launch.message, sizeof session.grid.launch.message, "%s%s", kTooMuch, error.what());
  }
  return kFaulted;
}

}  // namespace

// 0, or 1 with a message.
extern "C" int vm_run(Launch* launch) {
  std::mutex lock;
  std::string message;
  try {
    Grid grid(*launch);
    std::vector<std::thread> others;
    try {
      for (uint32_t n = 1; n < std::min(launch->os_threads, grid.count); n++)
        others.emplace_back([&] { run_machine(grid, lock, message); });
    } catch (const std::system_error&) {
      // Fewer threads do the same work.
    }
    run_machine(grid, lock, message);
    for (std::thread& other : others) other.join();
  } catch (const std::exception& error) {
    message = std::string(kTooMuch) + error.what();
  }
  snprintf(launch->message, sizeof launch->message, "%s", message.c_str());
  return message.empty() ? 0 : 1;
}

// ---- step by step: a Status each ----

extern "C" void* vm_open(Launch* launch) { return new Session(*launch); }

extern "C" void vm_close(void* handle) { delete static_cast<Session*>(handle); }

extern "C" int vm_turn(void* handle) {
  auto& session = *static_cast<Session*>(handle);
  return guarded(session, [&] { return session.machine.turn(); });
}

// One instruction of a warp of a resident CTA, whose lanes at the lowest pc run. False where the warp can do nothing.
extern "C" int vm_step(void* handle, uint32_t cta, uint32_t warp) {
  auto& session = *static_cast<Session*>(handle);
  return guarded(session, [&] {
    vm::Cta& found = *session.machine.find(cta);
    const vm::u64 before = found.executed;
    found.run_slice(found.warps[warp], 1);
    const bool did = found.executed != before;
    session.machine.fill();
    return did;
  });
}

// Lets the asynchronous copies of a CTA land.
extern "C" int vm_land(void* handle, uint32_t cta) {
  auto& session = *static_cast<Session*>(handle);
  return guarded(session, [&] { return vm::complete_some(*session.machine.find(cta), true); });
}

extern "C" int vm_is_resident(void* handle, uint32_t cta) { return static_cast<Session*>(handle)->machine.find(cta) !=
                                                           nullptr; }

// Lanes of a warp: pcs (32 words), then live, runnable and parked ones.
extern "C" void vm_lanes(void* handle, uint32_t cta, uint32_t warp, uint32_t* out) {
  const vm::Warp& w = static_cast<Session*>(handle)->machine.find(cta)->warps[warp];
  for (int l = 0; l < vm::kLanes; l++) out[l] = w.pc[l];
  out[32] = w.live, out[33] = w.runnable, out[34] = w.parked;
}

// 32 words of a slot, or the word of a predicate.
extern "C" void vm_slot(void* handle, uint32_t cta, uint32_t warp, uint32_t slot, uint32_t* out) {
  vm::Warp& w = static_cast<Session*>(handle)->machine.find(cta)->warps[warp];
  std::memcpy(out, w.row(static_cast<vm::u16>(slot)), 4 * vm::kLanes);
}
extern "C" uint32_t vm_predicate(void* handle, uint32_t cta, uint32_t warp, uint32_t predicate) {
  return static_cast<Session*>(handle)->machine.find(cta)->warps[warp].predicates[predicate];
}

extern "C" void vm_shared(void* handle, uint32_t cta, uint8_t* out) {
  const vm::Cta& found = *static_cast<Session*>(handle)->machine.find(cta);
  std::memcpy(out, found.shared.data(), found.shared.size());
}
