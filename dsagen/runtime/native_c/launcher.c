// Launches of calls that have been checked before.
//
// Python checks a call's tensors against every guard, once, and gives the launcher what it has found: for each kernel the
// launch and the packed argument block, and which members of the block are the addresses of which tensors. All other
// members follow from what `read_call` reads of the tensors and scalars, its key: types, devices, shapes, strides,
// alignments, values. So a later call with an equal key needs no guard, only its addresses put in place. Whatever the
// launcher does not know, or finds odd, it declines, and Python checks that call and says what is wrong with it.
//
// Locks: Python's lock (GIL) covers the table of calls. It is released around the driver, which may wait for a full queue;
// there the mutex of a `Calls` keeps the kernels of one call together, for they may share a workspace.

#include <dlfcn.h>

#include "launch.h"

// ---- Calls ----

static PyObject* calls_repeat(PyObject* object, PyObject* const* args, Py_ssize_t count) {
  Calls* self = (Calls*)object;
  if (count != self->tensor_count + self->scalar_count) {
    PyErr_Format(PyExc_TypeError, "repeat takes %d tensors and %d scalars, got %zd values", self->tensor_count,
                 self->scalar_count, count);
    return NULL;
  }
  Reading reading;
  if (self->call_count == 0 || self->stream_mode == kNoStream || !read_call(self, args, &reading)) Py_RETURN_FALSE;
  Call* call = find_call(self, &reading);
  if (call == NULL || has_overlap(self, &reading)) Py_RETURN_FALSE;
  void* stream = NULL;
  if (self->launcher->exchange->current_stream(reading.device.type, reading.device.id, &stream) != 0) {
    PyErr_Clear();
    Py_RETURN_FALSE;
  }
  if (self->stream_mode == kOneStream && stream != self->stream) Py_RETURN_FALSE;
  return launch_call(self, call, &reading, stream);
}

static int parse_launch(PyObject* item, int tensor_count, Launch* launch) {
  unsigned long long function;
  const char* block;
  Py_ssize_t block_bytes;
  PyObject* patches;
  if (!PyArg_ParseTuple(item, "KIIIpIy#O!", &function, &launch->grid, &launch->threads, &launch->shared_bytes,
                        &launch->overlaps, &launch->cluster, &block, &block_bytes, &PyTuple_Type, &patches))
    return -1;
  Py_ssize_t patch_count = PyTuple_Size(patches);
  if (block_bytes > kMostBlockBytes || patch_count > kMostTensors) {
    PyErr_Format(PyExc_ValueError, "an argument block of %zd B with %zd addresses: at most %d B and %d", block_bytes,
                 patch_count, (int)kMostBlockBytes, (int)kMostTensors);
    return -1;
  }
  launch->function = (void*)(uintptr_t)function;
  launch->block_bytes = (unsigned)block_bytes;
  launch->patch_count = (unsigned)patch_count;
  memcpy(launch->block, block, (size_t)block_bytes);
  for (Py_ssize_t p = 0; p < patch_count; ++p) {
    int offset, tensor;
    unsigned long long distance;
    if (!PyArg_ParseTuple(PyTuple_GetItem(patches, p), "iiK", &offset, &tensor, &distance)) return -1;
    if (offset < 0 || offset + 8 > block_bytes || tensor < 0 || tensor >= tensor_count) {
      PyErr_Format(PyExc_ValueError, "address of tensor %d at byte %d: out of range", tensor, offset);
      return -1;
    }
    launch->patches[p] = (Patch){(uint16_t)offset, (uint16_t)tensor, distance};
  }
  return 0;
}

// A call of the launches that Python describes, not in the table yet.
static Call* make_call(const Calls* self, unsigned long long context, PyObject* launches, PyObject* steps) {
  Py_ssize_t count = PyTuple_Size(launches);
  if (count < 1 || count > kMostLaunches) {
    PyErr_Format(PyExc_ValueError, "%zd launches, expected 1 to %d", count, (int)kMostLaunches);
    return NULL;
  }
  Call* call = PyMem_Calloc(1, sizeof(Call) + (size_t)count * sizeof(Launch));
  if (call == NULL) return (Call*)PyErr_NoMemory();
  call->references = 1;
  call->launch_count = (int)count;
  call->context = (void*)(uintptr_t)context;
  call->steps = Py_NewRef(steps);
  for (Py_ssize_t i = 0; i < count; ++i) {
    if (parse_launch(PyTuple_GetItem(launches, i), self->tensor_count, &call->launches[i]) != 0) {
      free_call(call);
      return NULL;
    }
  }
  return call;
}

static void forget_all(Calls* self) {
  for (int i = 0; i < kBuckets; ++i) {
    while (self->buckets[i] != NULL) {
      Call* call = self->buckets[i];
      self->buckets[i] = call->next;
      free_call(call);
    }
  }
  self->call_count = 0;
  self->latest = NULL;
}

static PyObject* calls_remember(PyObject* object, PyObject* args) {
  Calls* self = (Calls*)object;
  PyObject *values, *launches, *steps;
  unsigned long long context;
  if (!PyArg_ParseTuple(args, "O!KO!O", &PyTuple_Type, &values, &context, &PyTuple_Type, &launches, &steps)) return NULL;
  Py_ssize_t count = PyTuple_Size(values);
  if (count != self->tensor_count + self->scalar_count) {
    PyErr_Format(PyExc_TypeError, "remember takes %d values, got %zd", self->tensor_count + self->scalar_count, count);
    return NULL;
  }
  PyObject* items[kMostTensors + kMostScalars];
  for (Py_ssize_t i = 0; i < count; ++i) items[i] = PyTuple_GetItem(values, i);
  Reading reading;
  if (!read_call(self, items, &reading)) Py_RETURN_FALSE;
  if (find_call(self, &reading) != NULL) Py_RETURN_TRUE;
  Call* call = make_call(self, context, launches, steps);
  if (call == NULL) return NULL;
  size_t bytes = (size_t)reading.word_count * sizeof *reading.words;
  call->words = PyMem_Malloc(bytes);
  if (call->words == NULL) {
    free_call(call);
    return PyErr_NoMemory();
  }
  memcpy(call->words, reading.words, bytes);
  call->word_count = reading.word_count;
  uint64_t hash = call->hash = hash_words(reading.words, reading.word_count);
  if (self->call_count >= self->most_calls) forget_all(self);
  call->next = self->buckets[hash % kBuckets];
  self->buckets[hash % kBuckets] = call;
  self->call_count += 1;
  Py_RETURN_TRUE;
}

static PyObject* calls_launch(PyObject* object, PyObject* args) {
  Calls* self = (Calls*)object;
  unsigned long long stream, context;
  PyObject *launches, *steps;
  if (!PyArg_ParseTuple(args, "KKO!O", &stream, &context, &PyTuple_Type, &launches, &steps)) return NULL;
  Call* call = make_call(self, context, launches, steps);
  if (call == NULL) return NULL;
  PyObject* result = launch_call(self, call, NULL, (void*)(uintptr_t)stream);
  free_call(call);
  return result;
}

static PyObject* calls_forget(PyObject* object, PyObject* unused) {
  (void)unused;
  forget_all((Calls*)object);
  Py_RETURN_NONE;
}

static PyObject* calls_hold_stream(PyObject* object, PyObject* stream) {
  Calls* self = (Calls*)object;
  if (stream == Py_None) {
    self->stream_mode = kNoStream;
    Py_RETURN_NONE;
  }
  unsigned long long handle = PyLong_AsUnsignedLongLong(stream);
  if (PyErr_Occurred()) return NULL;
  self->stream_mode = kOneStream;
  self->stream = (void*)(uintptr_t)handle;
  Py_RETURN_NONE;
}

static PyObject* calls_reserve(PyObject* object, PyObject* args) {
  Calls* self = (Calls*)object;
  unsigned long long begin, end;
  if (!PyArg_ParseTuple(args, "KK", &begin, &end)) return NULL;
  self->reserved_begin = begin;
  self->reserved_end = end;
  Py_RETURN_NONE;
}

static Py_ssize_t calls_length(PyObject* object) { return ((Calls*)object)->call_count; }

static int calls_traverse(PyObject* object, visitproc visit, void* arg) {
  Calls* self = (Calls*)object;
  Py_VISIT(Py_TYPE(object));
  Py_VISIT(self->launcher);
  Py_VISIT(self->fail);
  for (int i = 0; i < kBuckets; ++i)
    for (Call* call = self->buckets[i]; call != NULL; call = call->next) Py_VISIT(call->steps);
  return 0;
}

static int calls_clear(PyObject* object) {
  Calls* self = (Calls*)object;
  forget_all(self);
  Py_CLEAR(self->fail);
  return 0;
}

static void calls_free(PyObject* object) {
  PyTypeObject* type = Py_TYPE(object);
  Calls* self = (Calls*)object;
  PyObject_GC_UnTrack(object);
  calls_clear(object);
  pthread_mutex_destroy(&self->mutex);
  Py_XDECREF((PyObject*)self->launcher);
  ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
  Py_DECREF(type);
}

static PyMethodDef calls_methods[] = {
    {"repeat", (PyCFunction)(void (*)(void))calls_repeat, METH_FASTCALL, "repeat(*tensors, *scalars) -> whether it was launched"},
    {"remember", calls_remember, METH_VARARGS, "remember(values, context, launches, steps) -> whether its key can be told"},
    {"launch", calls_launch, METH_VARARGS, "launch(stream, context, launches, steps)"},
    {"forget", calls_forget, METH_NOARGS, "forget every call"},
    {"hold_stream", calls_hold_stream, METH_O, "repeat on this stream only, or nowhere for None"},
    {"reserve", calls_reserve, METH_VARARGS, "reserve(begin, end): memory that no tensor may reach into"},
    {NULL, NULL, 0, NULL},
};
static PyType_Slot calls_slots[] = {
    {Py_tp_dealloc, calls_free},   {Py_tp_traverse, calls_traverse}, {Py_tp_clear, calls_clear},
    {Py_tp_methods, calls_methods}, {Py_sq_length, calls_length},     {0, NULL},
};
static PyType_Spec calls_spec = {"dsagen_launcher.Calls", sizeof(Calls), 0,
                                 Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION, calls_slots};
static PyObject* calls_type;

// ---- Launcher ----

static int find_symbol(Launcher* self, const char* name, void* function) {
  void* found = dlsym(self->library, name);
  if (found == NULL) PyErr_Format(PyExc_OSError, "the CUDA driver has no %s", name);
  memcpy(function, &found, sizeof found);
  return found != NULL;
}

static int open_driver(Launcher* self, const char* path) {
  self->library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (self->library == NULL) {
    PyErr_SetString(PyExc_OSError, dlerror());
    return -1;
  }
  int found = find_symbol(self, "cuLaunchKernelEx", &self->launch_kernel) &&
              find_symbol(self, "cuCtxGetCurrent", &self->current_context) &&
              find_symbol(self, "cuCtxPushCurrent_v2", &self->push_context) &&
              find_symbol(self, "cuCtxPopCurrent_v2", &self->pop_context) &&
              find_symbol(self, "cuStreamIsCapturing", &self->is_capturing);
  return found ? 0 : -1;
}

static int open_exchange(Launcher* self, PyObject* capsule) {
  self->exchange_owner = Py_NewRef(capsule);
  self->exchange = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
  if (self->exchange == NULL) return -1;
  if (self->exchange->major != kDlpackMajor || self->exchange->tensor_from_object == NULL) {
    PyErr_Format(PyExc_OSError, "torch's exchange of tensors is DLPack %u, expected %d with borrowed tensors",
                 self->exchange->major, (int)kDlpackMajor);
    return -1;
  }
  return 0;
}

static PyObject* launcher_new(PyTypeObject* type, PyObject* args, PyObject* keywords) {
  const char* path;
  PyObject *capsule, *tensor_type, *parameter_type;
  if (keywords != NULL && PyDict_Size(keywords) != 0) {
    PyErr_SetString(PyExc_TypeError, "Launcher takes no keywords");
    return NULL;
  }
  if (!PyArg_ParseTuple(args, "sOOO", &path, &capsule, &tensor_type, &parameter_type)) return NULL;
  Launcher* self = (Launcher*)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
  if (self == NULL) return NULL;
  self->tensor_type = Py_NewRef(tensor_type);
  self->parameter_type = Py_NewRef(parameter_type);
  self->requires_grad = PyUnicode_InternFromString("requires_grad");
  self->is_neg = PyUnicode_InternFromString("is_neg");
  // Without an exchange every `remember` declines, and launches come with addresses that Python has read.
  if (open_driver(self, path) != 0 || (capsule != Py_None && open_exchange(self, capsule) != 0)) {
    Py_DECREF((PyObject*)self);
    return NULL;
  }
  return (PyObject*)self;
}

static PyObject* launcher_calls(PyObject* object, PyObject* args) {
  int tensors, scalars, most_calls;
  unsigned outputs;
  PyObject* fail;
  if (!PyArg_ParseTuple(args, "iiIiO", &tensors, &scalars, &outputs, &most_calls, &fail)) return NULL;
  if (tensors < 1 || tensors > kMostTensors || scalars < 0 || scalars > kMostScalars || most_calls < 1) {
    PyErr_Format(PyExc_ValueError, "%d tensors, %d scalars, %d calls: at most %d and %d, at least 1 call", tensors, scalars,
                 most_calls, (int)kMostTensors, (int)kMostScalars);
    return NULL;
  }
  PyTypeObject* type = (PyTypeObject*)calls_type;
  Calls* self = (Calls*)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
  if (self == NULL) return NULL;
  self->launcher = (Launcher*)Py_NewRef(object);
  self->fail = Py_NewRef(fail);
  self->tensor_count = tensors;
  self->scalar_count = scalars;
  self->outputs = outputs;
  self->most_calls = most_calls;
  self->stream_mode = kAnyStream;
  pthread_mutex_init(&self->mutex, NULL);
  return (PyObject*)self;
}

static PyObject* launcher_capture_status(PyObject* object, PyObject* args) {
  Launcher* self = (Launcher*)object;
  unsigned long long context, stream;
  if (!PyArg_ParseTuple(args, "KK", &context, &stream)) return NULL;
  void* current = NULL;
  int status = 0;
  CUresult code = self->current_context(&current);
  int pushed = code == 0 && current != (void*)(uintptr_t)context;
  if (pushed) code = self->push_context((void*)(uintptr_t)context);
  if (code == 0) {
    code = self->is_capturing((void*)(uintptr_t)stream, &status);
    if (pushed) self->pop_context(&current);
  }
  return PyLong_FromLong(code == 0 ? status : -(long)code);
}

static void launcher_free(PyObject* object) {
  PyTypeObject* type = Py_TYPE(object);
  Launcher* self = (Launcher*)object;
  Py_XDECREF(self->exchange_owner);
  Py_XDECREF(self->tensor_type);
  Py_XDECREF(self->parameter_type);
  Py_XDECREF(self->requires_grad);
  Py_XDECREF(self->is_neg);
  if (self->library != NULL) dlclose(self->library);
  ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
  Py_DECREF(type);
}

static PyMethodDef launcher_methods[] = {
    {"capture_status", launcher_capture_status, METH_VARARGS,
     "capture_status(context, stream) -> 0 when it is not captured; negative: the driver's error"},
    {"calls", launcher_calls, METH_VARARGS, "calls(tensors, scalars, outputs, most_calls, fail) -> Calls"},
    {NULL, NULL, 0, NULL},
};
static PyType_Slot launcher_slots[] = {
    {Py_tp_new, launcher_new}, {Py_tp_dealloc, launcher_free}, {Py_tp_methods, launcher_methods}, {0, NULL}};
static PyType_Spec launcher_spec = {"dsagen_launcher.Launcher", sizeof(Launcher), 0, Py_TPFLAGS_DEFAULT, launcher_slots};

static struct PyModuleDef module_definition = {PyModuleDef_HEAD_INIT, "dsagen_launcher", NULL, -1, NULL, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit_dsagen_launcher(void) {
  PyObject* module = PyModule_Create(&module_definition);
  if (module == NULL) return NULL;
  calls_type = PyType_FromSpec(&calls_spec);
  PyObject* launcher_type = PyType_FromSpec(&launcher_spec);
  if (calls_type == NULL || launcher_type == NULL || PyModule_AddObjectRef(module, "Launcher", launcher_type) != 0 ||
      PyModule_AddObjectRef(module, "Calls", calls_type) != 0) {
    Py_XDECREF(launcher_type);
    Py_DECREF(module);
    return NULL;
  }
  Py_DECREF(launcher_type);
  return module;
}
