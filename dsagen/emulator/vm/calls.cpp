// Calls, returns, indexed branches, and the two functions of the run-time library that kernels may call.
#include <cstdio>
#include <mutex>

#include "machine.h"

namespace vm {
namespace {

u32 wide(const u16* x) { return x[0] | static_cast<u32>(x[1]) << 16; }

// Sends each lane of the group to its own place.
template <class F>
void part(Warp& w, u32 mask, F target) {
  const u32 first = target(__builtin_ctz(mask));
  bool together = mask == w.group;
  each_lane(mask, [&](int l) { together &= target(l) == first; });
  if (together) {
    w.next = first;
    return;
  }
  w.set_pc(w.group & ~mask, w.now + 1);
  each_lane(mask, [&](int l) { w.pc[l] = target(l); });
  w.stop = true;
}

void return_lanes(Warp& w, const Ins& i, u32 mask) {
  VM_OPERANDS;
  const u32* back = w.row(x[0]);
  part(w, mask, [=](int l) { return back[l]; });
}

// Operands: index, then as many places as flags says.
void branch_table(Warp& w, const Ins& i, u32 mask) {
  VM_OPERANDS;
  const u32* index = w.row(x[0]);
  for (u32 m = mask; m != 0; m &= m - 1) {
    const int l = __builtin_ctz(m);
    w.cta->fault_lane = static_cast<u32>(l);
    if (index[l] >= i.flags) fail("brx.idx: index %u, there are %u targets", index[l], i.flags);
  }
  part(w, mask, [=](int l) { return wide(x + 1 + 2 * index[l]); });
}

u8* local_bytes(Warp& w, int lane, u32 offset) {
  return w.local.data() + static_cast<size_t>(lane) * w.cta->launch->local_bytes + offset;
}

// Operands: byte of the thread's memory to read, and to write; imm is how many.
void copy_local(Warp& w, const Ins& i, u32 mask) {
  VM_OPERANDS;
  each_lane(mask, [&](int l) {
    std::memmove(local_bytes(w, l, wide(x + 2)), local_bytes(w, l, wide(x)), static_cast<size_t>(i.imm));
  });
}

u64 local_value(Warp& w, int lane, u32 offset, u32 bytes) {
  u64 value = 0;
  std::memcpy(&value, local_bytes(w, lane, offset), bytes);
  return value;
}

// A text of the kernel, up to its end or 1000 bytes.
std::string text_at(Warp& w, int lane, u64 address) {
  std::string out;
  while (out.size() < 1000) {
    const char c = static_cast<char>(*access(w, kGeneric, address + out.size(), 1, false, lane));
    if (c == 0) break;
    out += c;
  }
  return out;
}

// Operands: where message, file, line, function and size of a character lie.
void assert_fail(Warp& w, const u16* x, u32 mask) {
  const int lane = __builtin_ctz(mask);
  const std::string message = text_at(w, lane, local_value(w, lane, wide(x), 8));
  const std::string file = text_at(w, lane, local_value(w, lane, wide(x + 2), 8));
  const std::string function = text_at(w, lane, local_value(w, lane, wide(x + 6), 8));
  const u32 line = static_cast<u32>(local_value(w, lane, wide(x + 4), 4));
  w.cta->fault_lane = static_cast<u32>(lane);
  fail("assertion %.300s failed: %.300s, line %u, %.300s", message.c_str(), file.c_str(), line, function.c_str());
}

// One conversion of a format, with what follows the % up to its letter; `at` moves past the argument.
std::string formatted(Warp& w, int lane, std::string conversion, u64 arguments, u64& at) {
  const char kind = conversion.back();
  if (kind == '%') return "%";
  const bool real = std::strchr("fFeEgGaA", kind) != nullptr;
  const bool is_wide = real || kind == 's' || kind == 'p' || conversion.find('l') != std::string::npos ||
                       conversion.find('z') != std::string::npos || conversion.find('j') != std::string::npos;
  if (std::strchr("diouxXcfFeEgGaAsp", kind) == nullptr) return conversion;
  const u32 bytes = is_wide ? 8 : 4;
  at = (at + bytes - 1) / bytes * bytes;
  u64 value = 0;
  std::memcpy(&value, access(w, kGeneric, arguments + at, bytes, false, lane), bytes);
  at += bytes;
  char out[1100];
  if (kind == 's') {
    snprintf(out, sizeof out, conversion.c_str(), text_at(w, lane, value).c_str());
  } else if (kind == 'p') {
    snprintf(out, sizeof out, "%#llx", static_cast<unsigned long long>(value));
  } else if (real) {
    snprintf(out, sizeof out, conversion.c_str(), bits_as<double>(value));
  } else {
    // The length of the host's types is that of the value.
    std::string flags;
    for (char c : conversion)
      if (std::strchr("hlzjtL", c) == nullptr) flags += c;
    flags.insert(flags.size() - 1, is_wide ? "ll" : "");
    if (is_wide)
      snprintf(out, sizeof out, flags.c_str(), static_cast<unsigned long long>(value));
    else
      snprintf(out, sizeof out, flags.c_str(), static_cast<u32>(value));
  }
  return out;
}

// Operands: where the addresses of format and arguments lie, and the result.
void print_text(Warp& w, const u16* x, u32 mask) {
  static std::mutex lock;
  for (u32 m = mask; m != 0; m &= m - 1) {
    const int lane = __builtin_ctz(m);
    const std::string format = text_at(w, lane, local_value(w, lane, wide(x), 8));
    const u64 arguments = local_value(w, lane, wide(x + 2), 8);
    std::string out;
    u64 at = 0;
    for (size_t n = 0; n < format.size(); n++) {
      if (format[n] != '%') {
        out += format[n];
        continue;
      }
      const size_t end = format.find_first_not_of("-+ #0123456789.hlzjtL", n + 1);
      if (end == std::string::npos || end - n > 30) fail("printf: %.100s is no conversion", format.c_str() + n);
      out += formatted(w, lane, format.substr(n, end - n + 1), arguments, at);
      n = end;
    }
    const std::lock_guard<std::mutex> guard(lock);
    fwrite(out.data(), 1, out.size(), stdout);
    fflush(stdout);
    const u32 result = 0;
    std::memcpy(local_bytes(w, lane, wide(x + 4)), &result, sizeof result);
  }
}

// As calls.py numbers them.
enum LibraryFunction : i32 { kAssertFail = -1, kPrint = -2 };

// Operand: where to come back to; imm is where the function starts, or a number of the run-time library.
void call(Warp& w, const Ins& i, u32 mask) {
  VM_OPERANDS;
  if (i.imm == kAssertFail) return assert_fail(w, x, mask);
  if (i.imm == kPrint) return print_text(w, x, mask);
  u32* back = w.row(x[0]);
  const u32 after = w.now + 1;
  each_lane(mask, [=](int l) { back[l] = after; });
  part(w, mask, [&](int) { return static_cast<u32>(i.imm); });
}

const Register registers[] = {{"call", call},
                              {"ret", return_lanes},
                              {"brx", branch_table},
                              {"mov_local", copy_local}};

}  // namespace
}  // namespace vm
