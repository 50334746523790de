// CTAs that reach each other's shared memory, and what the asynchronous proxy has to do for them.
// Included by machine.h.
#pragma once

namespace vm {

// CTAs that start together and end apart. All of them run on one OS thread.
struct Cluster {
  std::vector<Cta*> members;  // by rank; of those that have ended as well
  u32 id[3] = {};
  Knowledge clock;   // what arrivals of the running phase of its barrier release, by the time of CTA `home`
  Knowledge passed;  // the same of the last phase
  u32 home = 0;
};

// Times of an mbarrier as an agent: that it is initialised, then its phases.
constexpr u32 kInitialised = 1;

// A box of a tensor, as a tensor map describes it (tensor_map.cpp).
struct Box {
  u32 rank, element_bytes, swizzle;  // bytes of a row that is swizzled, 0: none
  u32 type;                          // of an element, its number in kTypes of tensor_map.cpp
  bool fills_with_nan, rounds;       // what lies outside is loaded so; elements are loaded as tf32
  bool in_units;                     // a row of the tensor ends behind its last 16 bytes: of stores
  u64 address, sizes[5], strides[5];
  u32 counts[5], steps[5];
  i32 at[5];
  u32 bytes() const {
    u32 product = element_bytes;
    for (u32 n = 0; n < rank; n++) product *= counts[n];
    return product;
  }
};

// One operation of the asynchronous proxy, or of st.async and red.async, that has not been done.
struct BulkWork {
  // Global memory into shared memory; back; shared memory into that of a CTA of the cluster; words of registers.
  enum Kind : u32 { kLoad, kStore, kExchange, kWords } kind;
  u32 thread, pc;
  Cta* target = nullptr;             // whose shared memory is written, and that completes on its `barrier`
  u32 destination = 0, barrier = 0;  // addresses in that
  u32 source = 0;                    // address in the own shared memory
  u64 memory = 0;                    // global address of what is no box
  u32 bytes = 0;
  u32 group = 0;  // of the thread's bulk groups, for stores
  std::shared_ptr<const Box> box;
  bool reduces = false;
  u32 reduction = 0;      // flags of atomics.cpp
  bool waited = false;    // whether its thread is past griddepcontrol.wait
  bool has_read = false;  // `data` holds what was in the source
  bool done = false;
  std::vector<u8> data;
};

}  // namespace vm
