// Groups of a thread's 16-byte asynchronous copies.
#pragma once
#include "prims/types.cuh"

namespace ptx {

DSA_DEVICE void copy_async_commit() { host::copy_async_commit(); }

template <int kPending>
DSA_DEVICE void copy_async_wait(int line = __builtin_LINE()) {
  static_assert(kPending >= 0);
  host::copy_async_wait(kPending, line);
}

}  // namespace ptx
