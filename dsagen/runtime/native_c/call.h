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
  kMostNewOutputs = 4,
  kMostBlockBytes = 1024,
  kTensorWords = 3 + 2 * kMostDims,
  kScalarWords = 4,
  // And one for a stream.
  kMostWords = kMostTensors * kTensorWords + kMostScalars * kScalarWords + 1,
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
  PyObject *exchange_owner, *tensor_type, *parameter_type, *empty_like, *requires_grad, *is_neg;
  // Where torch says whether tensors may have tangents.
  PyObject *forward_ad, *current_level;
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

// An output that a call leaves to us: its place among the tensors, and one like it that has no memory.
typedef struct {
  int place;
  PyObject* hollow;
} NewOutput;

// What an entry of a table is found by: the words of a reading.
typedef struct Key {
  struct Key* next;
  uint64_t hash;
  int word_count;
  uint64_t* words;
} Key;

enum { kBuckets = 256 };

typedef struct {
  int count, most;
  // The one found last, which is the next one as a rule: an engine's layers are alike.
  Key* latest;
  Key* buckets[kBuckets];
} Table;

typedef struct {
  Key key;
  int references;
  void* context;
  PyObject* steps;
  int new_count;
  NewOutput news[kMostNewOutputs];
  int launch_count;
  Launch launches[];
} Call;

// How many values a call has; tensors come first.
typedef struct {
  Launcher* launcher;
  int tensor_count, scalar_count;
} Form;

enum { kAnyStream, kNoStream, kOneStream };

typedef struct {
  PyObject_HEAD
  Form form;
  PyObject* fail;
  uint32_t outputs;
  int stream_mode;
  void* stream;
  uint64_t reserved_begin, reserved_end;
  pthread_mutex_t mutex;
  Table table;
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

// Inside of a level of forward-mode AD a tensor may have a tangent, which the kernels would lose.
static int may_have_tangents(const Launcher* launcher) {
  PyObject* found = PyObject_GetAttr(launcher->forward_ad, launcher->current_level);
  long level = found == NULL ? -1 : PyLong_AsLong(found);
  Py_XDECREF(found);
  if (PyErr_Occurred()) PyErr_Clear();
  return level >= 0;
}

// 1 when the call can be known by a key, 0 when Python has to look at it.
static int read_call(const Form* form, PyObject* const* args, Reading* out) {
  out->word_count = 0;
  if (form->launcher->exchange == NULL || may_have_tangents(form->launcher)) return 0;
  for (int i = 0; i < form->tensor_count; ++i)
    if (!read_tensor(form->launcher, args[i], i, out)) return 0;
  // The first tensor is never optional, and the others lie where it does: the key says so.
  if (args[0] == Py_None) return 0;
  for (int i = 0; i < form->scalar_count; ++i)
    if (!read_scalar(args[form->tensor_count + i], out)) return 0;
  return 1;
}

static int read_stream(const Launcher* launcher, const Reading* reading, void** stream) {
  *stream = NULL;
  if (launcher->exchange->current_stream(reading->device.type, reading->device.id, stream) == 0) return 1;
  PyErr_Clear();
  return 0;
}

// The address of an output that was made for a call; 0 where it is not what was asked for, as under a mode of torch.
static int read_new(const Launcher* launcher, PyObject* object, int index, Reading* out) {
  if ((PyObject*)Py_TYPE(object) != launcher->tensor_type) return 0;
  DlTensor tensor;
  if (launcher->exchange->tensor_from_object(object, &tensor) != 0) {
    PyErr_Clear();
    return 0;
  }
  uint64_t address = (uint64_t)(uintptr_t)tensor.data + tensor.byte_offset;
  if (tensor.data == NULL || (address & kAlignmentMask) != 0) return 0;
  if (tensor.device.type != out->device.type || tensor.device.id != out->device.id) return 0;
  out->addresses[index] = address;
  return 1;
}

// Whether something that the kernels write shares memory with another tensor of the call.
static int has_overlap(const Calls* self, const Reading* reading) {
  for (int i = 0; i < self->form.tensor_count; ++i) {
    uint64_t begin = reading->addresses[i], end = begin + (uint64_t)reading->spans[i];
    if (begin == 0) continue;
    if (begin < self->reserved_end && self->reserved_begin < end) return 1;
    if (!(self->outputs >> i & 1)) continue;
    for (int j = 0; j < self->form.tensor_count; ++j) {
      uint64_t other = reading->addresses[j];
      if (j != i && other != 0 && begin < other + (uint64_t)reading->spans[j] && other < end) return 1;
    }
  }
  return 0;
}
