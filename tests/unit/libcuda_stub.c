// A stand-in for libcuda.so.1: answers what the runtime's driver class asks and prints each call as one line, so that the
// arguments that really reach the driver can be compared. Contexts are 0x1000 + device.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
  unsigned grid[3], block[3], smem_bytes;
  void* stream;
  struct {
    int id;
    char pad[4];
    union { char bytes[64]; int words[16]; } value;
  }* attributes;
  unsigned attribute_count;
} LaunchConfig;

static void* current;

// STUB_FAIL="name=code" makes one call fail.
static int result(const char* name) {
  const char* plan = getenv("STUB_FAIL");
  size_t length = strlen(name);
  return plan && !strncmp(plan, name, length) && plan[length] == '=' ? atoi(plan + length + 1) : 0;
}

#define SAY(...) (printf(__VA_ARGS__), printf("\n"), fflush(stdout))

int cuInit(unsigned flags) { (void)flags; return result("cuInit"); }
int cuDriverGetVersion(int* version) { *version = getenv("STUB_VERSION") ? atoi(getenv("STUB_VERSION")) : 13000; return 0; }
int cuDeviceGetCount(int* count) { *count = getenv("STUB_COUNT") ? atoi(getenv("STUB_COUNT")) : 2; return 0; }
int cuDeviceGet(int* device, int ordinal) { *device = ordinal; return 0; }
int cuDeviceGetName(char* name, int length, int device) { snprintf(name, length, "stub %d", device); return 0; }
int cuDeviceGetAttribute(int* value, int attribute, int device) {
  (void)device;
  *value = attribute == 75 ? 9 : attribute == 76 ? 0 : attribute == 16 ? 132 : attribute == 97 ? 232448 : -1;
  return 0;
}
int cuDevicePrimaryCtxRetain(void** context, int device) { *context = (void*)(0x1000L + device); SAY("retain %d", device); return 0; }
int cuCtxGetCurrent(void** context) { *context = current; return 0; }
int cuCtxPushCurrent(void* context) { SAY("push %p", context); current = context; return 0; }
int cuCtxPopCurrent(void** context) { SAY("pop %p", current); *context = current; current = NULL; return 0; }
int cuCtxPushCurrent_v2(void* context) { return cuCtxPushCurrent(context); }
int cuCtxPopCurrent_v2(void** context) { return cuCtxPopCurrent(context); }
int cuLibraryLoadData(void** library, const void* code, void* a, void* b, unsigned c, void* d, void* e, unsigned f) {
  (void)a, (void)b, (void)d, (void)e;
  SAY("load %.8s options %u %u current %p", (const char*)code, c, f, current);
  *library = (void*)0x2000;
  return result("cuLibraryLoadData");
}
int cuLibraryGetKernel(void** kernel, void* library, const char* name) {
  SAY("kernel %p %s", library, name);
  *kernel = (void*)0x3000;
  return result("cuLibraryGetKernel");
}
int cuKernelGetFunction(void** function, void* kernel) {
  SAY("function %p current %p", kernel, current);
  *function = (void*)((char*)current + 0x4000);
  return 0;
}
int cuKernelGetAttribute(int* value, int attribute, void* kernel, int device) {
  (void)kernel, (void)device;
  *value = 100 + attribute;
  return 0;
}
int cuKernelSetAttribute(int attribute, int value, void* kernel, int device) {
  SAY("set %d = %d of %p on %d", attribute, value, kernel, device);
  return 0;
}
int cuStreamIsCapturing(void* stream, int* status) {
  *status = stream == (void*)0x77;
  return stream ? 0 : result("cuStreamIsCapturing");
}
// As CUDA 12.3 and newer have it; before, there were no edges.
int cuStreamGetCaptureInfo(void* stream, int* status, uint64_t* id, void** graph, void** nodes, void** edges, size_t* count) {
  *status = stream == (void*)0x77;
  if (id) *id = 41;
  if (graph) *graph = NULL;
  if (nodes) *nodes = NULL;
  if (edges) *edges = NULL;
  if (count) *count = 0;
  return stream ? 0 : result("cuStreamIsCapturing");
}
int cuStreamGetCaptureInfo_v2(void* stream, int* status, uint64_t* id, void** graph, void** nodes, size_t* count) {
  return cuStreamGetCaptureInfo(stream, status, id, graph, nodes, NULL, count);
}
int cuStreamSynchronize(void* stream) { SAY("sync %p current %p", stream, current); return result("cuStreamSynchronize"); }
int cuLaunchKernelEx(const LaunchConfig* c, void* function, void** params, void** extra) {
  SAY("launch %p grid %u %u %u block %u %u %u smem %u stream %p attributes %u extra %p current %p", function, c->grid[0],
      c->grid[1], c->grid[2], c->block[0], c->block[1], c->block[2], c->smem_bytes, c->stream, c->attribute_count,
      (void*)extra, current);
  for (unsigned i = 0; i < c->attribute_count; ++i) {
    const int* words = c->attributes[i].value.words;
    SAY("attribute %d = %d %d %d", c->attributes[i].id, words[0], words[1], words[2]);
  }
  SAY("params %.11s", (const char*)params[0]);
  return result("cuLaunchKernelEx");
}
int cuOccupancyMaxActiveClusters(int* count, void* function, const LaunchConfig* c) {
  const int* words = c->attributes[0].value.words;
  SAY("clusters of %p grid %u block %u smem %u attributes %u: %d = %d %d %d current %p", function, c->grid[0], c->block[0],
      c->smem_bytes, c->attribute_count, c->attributes[0].id, words[0], words[1], words[2], current);
  *count = 16;
  return result("cuOccupancyMaxActiveClusters");
}
int cuGetErrorName(int error, const char** text) { (void)error; *text = "NAME"; return 0; }
int cuGetErrorString(int error, const char** text) { (void)error; *text = "stub text"; return 0; }

int cuGetProcAddress_v2(const char* symbol, void** function, int version, uint64_t flags, int* status) {
  (void)flags;
  if (!strcmp(symbol, "cuStreamGetCaptureInfo") && version < 12030) symbol = "cuStreamGetCaptureInfo_v2";
  static void* self;
  Dl_info info;
  if (!self && dladdr((void*)cuInit, &info)) self = dlopen(info.dli_fname, RTLD_NOW | RTLD_NOLOAD);
  *function = self ? dlsym(self, symbol) : NULL;
  if (status) *status = *function ? 0 : 1;
  return *function ? 0 : 500;
}
int cuGetProcAddress(const char* symbol, void** function, int version, uint64_t flags) {
  return cuGetProcAddress_v2(symbol, function, version, flags, NULL);
}
