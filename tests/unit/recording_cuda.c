// A stand-in for the CUDA driver that records launches, with what the launcher in C asks of torch's exchange of tensors
// besides tensors. A function's handle points to the size of its argument block, so that the block can be copied.
#include <dlfcn.h>
#include <stdint.h>
#include <string.h>
#include <unistd.h>

#include "abi.h"

enum { kMostRecords = 4096, kMostBytes = 1024 };

typedef struct {
  void *function, *stream, *context;
  unsigned grid[3], block[3], shared_bytes;
  unsigned attribute_count, attributes[kMostAttributes][4];
  unsigned block_bytes;
  unsigned char bytes[kMostBytes];
} Record;

Record stub_records[kMostRecords];
int stub_count, stub_fail, stub_pushes, stub_delay_us, stub_stream_fails, stub_capturing, stream_error;
// Where all tensors lie, and the current streams of device 0 and of device 1.
int stub_device;
void *stub_stream, *stub_other_stream;
// Of each thread, as the driver has it; one context may be pushed on another.
__thread void *stub_context, *stub_context_below;

static int next_of(int* counter) { return __atomic_fetch_add(counter, 1, __ATOMIC_SEQ_CST); }

CUresult cuCtxGetCurrent(void** context) { *context = stub_context; return 0; }
CUresult cuCtxPushCurrent_v2(void* context) {
  stub_context_below = stub_context;
  stub_context = context;
  next_of(&stub_pushes);
  return 0;
}
CUresult cuCtxPopCurrent_v2(void** context) {
  *context = stub_context;
  stub_context = stub_context_below;
  stub_context_below = NULL;
  return 0;
}

CUresult cuStreamIsCapturing(void* stream, int* status) { *status = stub_capturing || stream == (void*)0x77; return stream_error; }

CUresult cuLaunchKernelEx(const LaunchConfig* config, void* function, void** params, void** extra) {
  if (stub_fail != 0) return stub_fail;
  if (extra != NULL) return 1;
  // Launches of different plans come from several threads at once.
  int place = next_of(&stub_count);
  if (place >= kMostRecords) return 1;
  Record* record = &stub_records[place];
  record->function = function;
  record->stream = config->stream;
  record->context = stub_context;
  memcpy(record->grid, &config->grid_x, sizeof record->grid);
  memcpy(record->block, &config->block_x, sizeof record->block);
  record->shared_bytes = config->shared_bytes;
  record->attribute_count = config->attribute_count;
  for (unsigned i = 0; i < config->attribute_count; ++i) {
    record->attributes[i][0] = (unsigned)config->attributes[i].id;
    memcpy(&record->attributes[i][1], config->attributes[i].value.bytes, 3 * sizeof(unsigned));
  }
  record->block_bytes = *(const unsigned*)function;
  memcpy(record->bytes, params[0], record->block_bytes);
  if (stub_delay_us != 0) usleep((useconds_t)stub_delay_us);
  return 0;
}

static int current_stream(int32_t device_type, int32_t device_id, void** out) {
  (void)device_type;
  *out = device_id == 0 ? stub_stream : stub_other_stream;
  return stub_stream_fails ? -1 : 0;
}

static const DlExchange* real;
static int tensor_from_object(void* object, DlTensor* out) {
  int failed = real->tensor_from_object(object, out);
  if (!failed) out->device.id = stub_device;
  return failed;
}

// Torch's exchange, but for streams and devices: the CPU has none and one.
static DlExchange exchange;
const DlExchange* stub_exchange(const DlExchange* torchs) {
  real = torchs;
  exchange = *torchs;
  exchange.tensor_from_object = tensor_from_object;
  exchange.current_stream = current_stream;
  return &exchange;
}
