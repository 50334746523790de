// What the launcher knows of a call, and how it reads one.
#pragma once

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>
#include <pthread.h>
#include <string.h>

#include "abi.h"

enum {
  kMostTensors = 24,
  kMostScalars = 16,
  kMostDims = 8,
  kMostLaunches = 4,
  kMostBlockBytes = 1024,
  kTensorWords = 3 + 2 * kMostDims,
  kScalarWords = 4,
  kMostWords = kMostTensors * kTensorWords + kMostScalars * kScalarWords,
  // Guards ask for no more than multiples of 16 B.
  kAlignmentMask = 15,
};

typedef struct {
  PyObject_HEAD
  void* library;
  LaunchKernelFn launch_kernel;
  CurrentContextFn current_context;
  PushContextFn push_context;
  PopContextFn pop_context;
  IsCapturingFn is_capturing;
  const DlExchange* exchange;
  PyObject *exchange_owner, *tensor_type, *parameter_type, *requires_grad, *is_neg;
} Launcher;

// An address of the block: where it lies there, which tensor it leads into, and how far from its first element.
typedef struct {
  uint16_t offset;
  uint16_t tensor;
  uint64_t distance;
} Patch;

typedef struct {
  void* function;
  unsigned grid, threads, shared_bytes, cluster;
  int overlaps;
  unsigned block_bytes;
  unsigned patch_count;
  Patch patches[kMostTensors];
  unsigned char block[kMostBlockBytes];
} Launch;

typedef struct Call {
  struct Call* next;
  uint64_t hash;
  int references;
  int word_count;
  uint64_t* words;
  void* context;
  PyObject* steps;
  int64_t spans[kMostTensors];
  int launch_count;
  Launch launches[];
} Call;

enum { kAnyStream, kNoStream, kOneStream };
enum { kBuckets = 256 };

typedef struct {
  PyObject_HEAD
  Launcher* launcher;
  PyObject* fail;
  int tensor_count, scalar_count, call_count, most_calls;
  uint32_t outputs;
  int stream_mode;
  void* stream;
  uint64_t reserved_begin, reserved_end;
  pthread_mutex_t mutex;
  // The call found last, which is the next one as a rule: an engine's layers are alike.
  Call* latest;
  Call* buckets[kBuckets];
} Calls;

// One call as it is read: the key's words, and each tensor's address (0 where it is None or empty).
typedef struct {
  uint64_t words[kMostWords];
  int word_count;
  uint64_t addresses[kMostTensors];
  int64_t spans[kMostTensors];
  DlDevice device;
} Reading;

// ---- reading a call ----

// 1 where an attribute or a method's answer is False, 0 otherwise, without an exception.
static int is_false(PyObject* answer) {
  if (answer == NULL) PyErr_Clear();
  int result = answer == Py_False;
  Py_XDECREF(answer);
  return result;
}

static int is_float(DlType dtype) { return dtype.code == kDlFloat || dtype.code == kDlBfloat || dtype.code >= kDlFirstNarrowFloat; }

static int read_tensor(const Launcher* launcher, PyObject* object, int index, Reading* out) {
  out->addresses[index] = 0;
  out->spans[index] = 0;
  uint64_t* words = out->words + out->word_count;
  if (object == Py_None) {
    words[0] = 0;
    out->word_count += 1;
    return 1;
  }
  // A subclass (a FakeTensor is one) may have no memory of its own.
  PyObject* type = (PyObject*)Py_TYPE(object);
  if (type != launcher->tensor_type && type != launcher->parameter_type) return 0;
  DlTensor tensor;
  if (launcher->exchange->tensor_from_object(object, &tensor) != 0) {
    PyErr_Clear();
    return 0;
  }
  if (tensor.ndim < 0 || tensor.ndim > kMostDims || tensor.strides == NULL || tensor.dtype.code == kDlComplex) return 0;
  if (is_float(tensor.dtype) && !is_false(PyObject_GetAttr(object, launcher->requires_grad))) return 0;
  // Only parts of complex tensors are negated lazily.
  if (tensor.dtype.code == kDlFloat && !is_false(PyObject_CallMethodObjArgs(object, launcher->is_neg, NULL))) return 0;

  int64_t elements = 1, reach = 0;
  for (int d = 0; d < tensor.ndim; ++d) {
    if (tensor.strides[d] < 0) return 0;
    elements *= tensor.shape[d];
    reach += tensor.strides[d] * (tensor.shape[d] - 1);
    words[2 + d] = (uint64_t)tensor.shape[d];
    words[2 + tensor.ndim + d] = (uint64_t)tensor.strides[d];
  }
  uint64_t address = elements == 0 ? 0 : (uint64_t)(uintptr_t)tensor.data + tensor.byte_offset;
  if (elements != 0 && tensor.data == NULL) return 0;
  words[0] = 1 | (uint64_t)tensor.ndim << 8 | (uint64_t)tensor.dtype.code << 16 | (uint64_t)tensor.dtype.bits << 24 |
             (uint64_t)tensor.dtype.lanes << 32 | (address & kAlignmentMask) << 48 | (uint64_t)(elements == 0) << 56;
  words[1] = (uint64_t)(uint32_t)tensor.device.type << 32 | (uint32_t)tensor.device.id;
  out->word_count += 2 + 2 * tensor.ndim;
  out->addresses[index] = address;
  out->spans[index] = elements == 0 ? 0 : (reach + 1) * ((tensor.dtype.bits * tensor.dtype.lanes + 7) / 8);
  out->device = tensor.device;
  return 1;
}

enum { kScalarNone = 1, kScalarBool, kScalarInt, kScalarFloat, kScalarText };

static int read_scalar(PyObject* object, Reading* out) {
  uint64_t* words = out->words + out->word_count;
  memset(words, 0, kScalarWords * sizeof *words);
  out->word_count += kScalarWords;
  if (object == Py_None) {
    words[0] = kScalarNone;
  } else if (PyBool_Check(object)) {
    words[0] = kScalarBool;
    words[1] = object == Py_True;
  } else if (PyLong_CheckExact(object)) {
    words[0] = kScalarInt;
    words[1] = (uint64_t)PyLong_AsLongLong(object);
  } else if (PyFloat_CheckExact(object)) {
    double value = PyFloat_AsDouble(object);
    words[0] = kScalarFloat;
    memcpy(words + 1, &value, sizeof value);
  } else if (PyUnicode_CheckExact(object)) {
    Py_ssize_t size;
    const char* text = PyUnicode_AsUTF8AndSize(object, &size);
    if (text == NULL || size > 23) {
      PyErr_Clear();
      return 0;
    }
    words[0] = kScalarText;
    memcpy(words + 1, text, (size_t)size);
  } else {
    return 0;
  }
  if (PyErr_Occurred()) {
    PyErr_Clear();
    return 0;
  }
  return 1;
}

// 1 when the call can be known by a key, 0 when Python has to look at it.
static int read_call(const Calls* self, PyObject* const* args, Reading* out) {
  out->word_count = 0;
  if (self->launcher->exchange == NULL) return 0;
  for (int i = 0; i < self->tensor_count; ++i)
    if (!read_tensor(self->launcher, args[i], i, out)) return 0;
  // The first tensor is never optional, and the others lie where it does: the key says so.
  if (args[0] == Py_None) return 0;
  for (int i = 0; i < self->scalar_count; ++i)
    if (!read_scalar(args[self->tensor_count + i], out)) return 0;
  return 1;
}

static uint64_t hash_words(const uint64_t* words, int count) {
  uint64_t hash = 0x9E3779B97F4A7C15u;
  for (int i = 0; i < count; ++i) {
    hash = (hash ^ words[i]) * 0xD6E8FEB86659FD93u;
    hash ^= hash >> 32;
  }
  return hash;
}

static int is_same(const Call* call, const Reading* reading) {
  return call->word_count == reading->word_count &&
         memcmp(call->words, reading->words, (size_t)reading->word_count * sizeof *reading->words) == 0;
}

static Call* find_call(Calls* self, const Reading* reading) {
  if (self->latest != NULL && is_same(self->latest, reading)) return self->latest;
  uint64_t hash = hash_words(reading->words, reading->word_count);
  for (Call* call = self->buckets[hash % kBuckets]; call != NULL; call = call->next)
    if (call->hash == hash && is_same(call, reading)) return self->latest = call;
  return NULL;
}

// Whether something that the kernels write shares memory with another tensor of the call.
static int has_overlap(const Calls* self, const Reading* reading) {
  for (int i = 0; i < self->tensor_count; ++i) {
    uint64_t begin = reading->addresses[i], end = begin + (uint64_t)reading->spans[i];
    if (begin == 0) continue;
    if (begin < self->reserved_end && self->reserved_begin < end) return 1;
    if (!(self->outputs >> i & 1)) continue;
    for (int j = 0; j < self->tensor_count; ++j) {
      uint64_t other = reading->addresses[j];
      if (j != i && other != 0 && begin < other + (uint64_t)reading->spans[j] && other < end) return 1;
    }
  }
  return 0;
}
