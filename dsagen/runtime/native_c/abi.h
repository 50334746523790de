// The binary interfaces that the launcher speaks: the CUDA driver's launch, and DLPack's exchange of tensors. Only what is
// used is declared; both are stable, so that neither cuda.h nor dlpack.h is needed to compile.
#pragma once

#include <stdint.h>

// ---- CUDA driver: cuLaunchKernelEx and contexts ----

typedef int CUresult;

enum { kAttributeCluster = 4, kAttributeOverlap = 6, kMostAttributes = 2 };

typedef struct {
  int id;
  char pad[4];
  union {
    char bytes[64];
    struct {
      unsigned x, y, z;
    } cluster;
    int overlaps;
  } value;
} LaunchAttribute;

typedef struct {
  unsigned grid_x, grid_y, grid_z;
  unsigned block_x, block_y, block_z;
  unsigned shared_bytes;
  void* stream;
  LaunchAttribute* attributes;
  unsigned attribute_count;
} LaunchConfig;

typedef CUresult (*LaunchKernelFn)(const LaunchConfig* config, void* function, void** params, void** extra);
typedef CUresult (*CurrentContextFn)(void** context);
typedef CUresult (*PushContextFn)(void* context);
typedef CUresult (*PopContextFn)(void** context);
typedef CUresult (*IsCapturingFn)(void* stream, int* status);

// ---- DLPack 1.x ----

enum { kDlpackMajor = 1 };
enum { kDlFloat = 2, kDlBfloat = 4, kDlComplex = 5, kDlFirstNarrowFloat = 7 };

typedef struct {
  int32_t type, id;
} DlDevice;

typedef struct {
  uint8_t code, bits;
  uint16_t lanes;
} DlType;

typedef struct {
  void* data;
  DlDevice device;
  int32_t ndim;
  DlType dtype;
  int64_t* shape;
  int64_t* strides;
  uint64_t byte_offset;
} DlTensor;

typedef struct {
  uint32_t major, minor;
  void* previous;
  void* allocate;
  void* managed_from_object;
  void* managed_to_object;
  // Both return 0, or -1 with a Python exception set. The tensor is borrowed, its shape and strides too.
  int (*tensor_from_object)(void* object, DlTensor* out);
  int (*current_stream)(int32_t device_type, int32_t device_id, void** out);
} DlExchange;
