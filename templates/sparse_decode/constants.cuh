// Numbers that the kernels of the family share.
#pragma once

namespace sparse_decode {

constexpr float kLog2E = 1.4426950408889634f;
// Softmax reference before any valid token: far below every finite score, and finite, so that differences stay numbers.
constexpr float kNoReference = -1e30f;
constexpr float kInfinity = __builtin_huge_valf();

}  // namespace sparse_decode
