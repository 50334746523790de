// Clusters: their barrier, addresses in each other's shared memory, and what must be over when a CTA ends.
#include "counters.h"
#include "machine.h"

namespace vm {
namespace {

constexpr u32 kAddressMask = (1u << kRankShift) - 1;
// flags of barrier.cluster: all lanes of the warp come together, the arrival orders nothing.
enum Flag : u32 { kAligned = 1, kRelaxed = 2 };

bool all_arrived(const Cluster& cluster) {
  u32 missing = 0, arrived = 0;
  for (const Cta* cta : cluster.members)
    for (const Warp& w : cta->warps) missing |= w.live & ~w.cluster_arrived, arrived |= w.cluster_arrived;
  return missing == 0 && arrived != 0;
}

// Lets those go on that stand at the barrier.
void release(Cluster& cluster) {
  cluster.passed = std::move(cluster.clock);
  cluster.clock = Knowledge();
  for (Cta* cta : cluster.members) {
    cta->progress++;
    for (Warp& w : cta->warps) {
      w.cluster_passed |= w.cluster_arrived & w.live;
      w.cluster_arrived = 0;
      size_t kept = 0;
      for (const Stand& stand : w.stands) {
        if (stand.barrier != kClusterBarrier) {
          w.stands[kept++] = stand;
          continue;
        }
        w.runnable |= stand.mask;
        w.cluster_passed &= ~stand.mask;
        if (cta->order.on) cta->order.acquire(w, stand.mask, cluster.passed, cluster.home);
      }
      w.stands.resize(kept);
    }
  }
  cluster.members[0]->counters[kBarriers]++;
}

// mbarriers that these lanes have initialised and fenced are known to the cluster after a relaxed arrival, too.
void publish_mbarriers(const Warp& w, u32 mask, Cluster& cluster) {
  Knowledge known;
  for (const auto& [address, clocks] : w.cta->mbarriers) {
    const u32 lane = clocks.initialiser % kLanes;
    if (clocks.initialiser / kLanes == w.index && (mask >> lane & 1) && clocks.fenced.time != 0)
      known.views[kSeen].raise_all(clocks.agent, kInitialised);
  }
  cluster.clock.merge(cluster.home, known, w.cta->linear);
}

void barrier_arrive(Warp& w, const Ins& i, u32 mask) {
  if ((i.flags & kAligned) != 0 && !gather(w, mask, w.live)) return;
  Cluster& cluster = *w.cta->cluster;
  const u32 twice = mask & (w.cluster_arrived | w.cluster_passed);
  if (twice != 0) fail("barrier.cluster.arrive: lanes %#x have arrived before and not waited since", twice);
  w.cluster_arrived |= mask;
  w.cta->progress++;
  Order& order = w.cta->order;
  if (order.on) {
    publish_mbarriers(w, mask, cluster);
    if ((i.flags & kRelaxed) != 0)
      order.release_published(w, mask, cluster.clock, cluster.home);
    else
      order.release(w, mask, cluster.clock, cluster.home);
  }
  recheck_cluster_barrier(cluster);
}

void barrier_wait(Warp& w, const Ins& i, u32 mask) {
  if ((i.flags & kAligned) != 0 && !gather(w, mask, w.live)) return;
  const u32 absent = mask & ~(w.cluster_arrived | w.cluster_passed);
  if (absent != 0) fail("barrier.cluster.wait: lanes %#x have not arrived", absent);
  const u32 passed = mask & w.cluster_passed, stand = mask & ~passed;
  w.cluster_passed &= ~passed;
  if (passed != 0 && w.cta->order.on) w.cta->order.acquire(w, passed, w.cta->cluster->passed, w.cta->cluster->home);
  if (stand == 0) return;
  w.set_pc(w.group, w.now + 1);
  w.stands.push_back({stand, w.now, kClusterBarrier, 0});
  w.runnable &= ~stand;
  w.stop = true;
}

u32 mapped(const Warp& w, u32 address, u32 rank) {
  const auto count = static_cast<u32>(w.cta->cluster->members.size());
  if (rank >= count) fail("mapa: rank %u, the cluster has %u CTAs", rank, count);
  return (address & kAddressMask) | rank << kRankShift;
}

// d, address, rank; imm 1: addresses are generic.
void mapa(Warp& w, const Ins& i, u32 mask) {
  VM_OPERANDS;
  each_lane(mask, [&](int l) {
    if (i.imm == 0) {
      w.row(x[0])[l] = mapped(w, w.row(x[1])[l], w.row(x[2])[l]);
      return;
    }
    const u64 address = get<u64>(w.row(x[1]), l);
    if ((address & ~(kWindowBytes - 1)) != kSharedWindow)
      fail("mapa: %#llx is no address in shared memory", static_cast<unsigned long long>(address));
    put<u64>(w.row(x[0]), l, kSharedWindow + mapped(w, static_cast<u32>(address), w.row(x[2])[l]));
  });
}

// d, address, whose low half tells.
void rank_of(Warp& w, const Ins& i, u32 mask) {
  VM_OPERANDS;
  each_lane(mask, [&](int l) { w.row(x[0])[l] = w.row(x[1])[l] >> kRankShift; });
}

// Whether the launch says that there are clusters.
void explicit_cluster(Warp& w, const Ins& i, u32 mask) {
  VM_OPERANDS;
  w.set_predicate(x[0], mask, w.cta->cluster->members.size() > 1 ? kFullMask : 0);
}

const Register registers[] = {{"barrier_cluster_arrive", barrier_arrive},
                              {"barrier_cluster_wait", barrier_wait},
                              {"mapa", mapa},
                              {"cta_rank", rank_of},
                              {"explicit_cluster", explicit_cluster}};

}  // namespace

Cta& owner_of(Cta& cta, u32 address, const char* what) {
  const u32 rank = address >> kRankShift;
  if (rank == cta.rank) return cta;
  const std::vector<Cta*>& members = cta.cluster->members;
  if (rank >= members.size())
    fail("%s: shared address %#x is one of rank %u, the cluster has %zu CTAs", what, address, rank, members.size());
  Cta& owner = *members[rank];
  if (owner.finished())
    fail("%s: shared address %#x is one of rank %u, %s, which has ended", what, address, rank,
         cta_name(*cta.launch, owner.linear).c_str());
  return owner;
}

void require_own(const Cta& cta, u32 address, const char* what) {
  const u32 rank = address >> kRankShift;
  if (rank != cta.rank && rank < cta.cluster->members.size())
    fail("%s: shared address %#x is of rank %u, but this instruction reaches the shared memory of its own CTA only, "
         "of rank %u", what, address, rank, cta.rank);
}

u8* remote_access(Warp& w, u32 address, u32 bytes, bool write, int lane, u32 strong) {
  const char* const what = write ? "write" : "read";
  Cta& owner = owner_of(*w.cta, address, what);
  u8* at = shared_bytes(owner, address, bytes, what);
  const u32 offset = address - owner.shared_base;
  u8* valid = owner.shared_valid.data() + offset;
  if (!write && !all_valid(valid, bytes))
    fail("read of %u bytes at shared byte %u of %s, not written before (or an asynchronous copy has not been waited "
         "for)", bytes, offset, cta_name(*w.cta->launch, owner.linear).c_str());
  if (write) std::memset(valid, 1, bytes);
  owner.progress += write;
  if (w.cta->meter != nullptr) w.cta->meter->note(kClusterBytes, bytes);
  const Touch touch = strong != 0 ? Touch::kStrong : write ? Touch::kWrite : Touch::kRead;
  if (w.cta->order.on) w.cta->order.remote(w, static_cast<u32>(lane), owner.order, offset, bytes, touch, strong);
  return at;
}

void recheck_cluster_barrier(Cluster& cluster) {
  if (all_arrived(cluster)) release(cluster);
}

std::string describe_cluster_barrier(const Cluster& cluster) {
  std::string text;
  for (const Cta* cta : cluster.members) {
    u32 missing = 0;
    for (const Warp& w : cta->warps) missing += static_cast<u32>(__builtin_popcount(w.live & ~w.cluster_arrived));
    if (missing != 0)
      text += print("%s%u threads of %s", text.empty() ? "which waits for " : ", ", missing,
                    cta_name(*cta->launch, cta->linear).c_str());
  }
  return text;
}

void leave_cta(Warp& w, u32 mask) {
  Cta& cta = *w.cta;
  Cluster& cluster = *cta.cluster;
  const bool shares = cluster.members.size() > 1;
  w.cluster_passed &= ~mask;
  if (cta.order.on && shares) cta.order.leave_cluster(w, mask);
  if (cta.finished()) {
    end_bulk(cta);
    require_no_bytes_awaited(cta);
    if (cta.order.on && shares) cta.order.require_others_done();
  }
  if (shares) recheck_cluster_barrier(cluster);
}

}  // namespace vm
