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

#include "entrance.h"

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
  PyObject *capsule, *tensor_type, *parameter_type, *empty_like, *forward_ad;
  if (keywords != NULL && PyDict_Size(keywords) != 0) {
    PyErr_SetString(PyExc_TypeError, "Launcher takes no keywords");
    return NULL;
  }
  if (!PyArg_ParseTuple(args, "sOOOOO", &path, &capsule, &tensor_type, &parameter_type, &empty_like, &forward_ad)) return NULL;
  Launcher* self = (Launcher*)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
  if (self == NULL) return NULL;
  self->tensor_type = Py_NewRef(tensor_type);
  self->parameter_type = Py_NewRef(parameter_type);
  self->empty_like = Py_NewRef(empty_like);
  self->forward_ad = Py_NewRef(forward_ad);
  self->current_level = PyUnicode_InternFromString("_current_level");
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
  self->form = (Form){(Launcher*)Py_NewRef(object), tensors, scalars};
  self->fail = Py_NewRef(fail);
  self->outputs = outputs;
  self->table.most = most_calls;
  self->stream_mode = kAnyStream;
  pthread_mutex_init(&self->mutex, NULL);
  return (PyObject*)self;
}

static PyObject* launcher_capture_status(PyObject* object, PyObject* args) {
  unsigned long long context, stream;
  if (!PyArg_ParseTuple(args, "KK", &context, &stream)) return NULL;
  return PyLong_FromLong(capture_status((Launcher*)object, (void*)(uintptr_t)context, (void*)(uintptr_t)stream));
}

static void launcher_free(PyObject* object) {
  PyTypeObject* type = Py_TYPE(object);
  Launcher* self = (Launcher*)object;
  Py_XDECREF(self->exchange_owner);
  Py_XDECREF(self->tensor_type);
  Py_XDECREF(self->parameter_type);
  Py_XDECREF(self->empty_like);
  Py_XDECREF(self->forward_ad);
  Py_XDECREF(self->current_level);
  Py_XDECREF(self->requires_grad);
  Py_XDECREF(self->is_neg);
  if (self->library != NULL) dlclose(self->library);
  ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
  Py_DECREF(type);
}

static PyObject* launcher_routes(PyObject* object, PyObject* args) {
  int tensors, scalars, choices, most_routes;
  if (!PyArg_ParseTuple(args, "iiii", &tensors, &scalars, &choices, &most_routes)) return NULL;
  if (tensors < 1 || tensors > kMostTensors || choices < 0 || scalars < 0 || scalars + choices > kMostScalars || most_routes < 1) {
    PyErr_Format(PyExc_ValueError, "%d tensors, %d scalars, %d routes: at most %d and %d, at least 1 route", tensors,
                 scalars + choices, most_routes, (int)kMostTensors, (int)kMostScalars);
    return NULL;
  }
  PyTypeObject* type = (PyTypeObject*)routes_type;
  Routes* self = (Routes*)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
  if (self == NULL) return NULL;
  self->form = (Form){(Launcher*)Py_NewRef(object), tensors, scalars + choices};
  self->choice_count = choices;
  self->table.most = most_routes;
  return (PyObject*)self;
}

static PyMethodDef launcher_methods[] = {
    {"capture_status", launcher_capture_status, METH_VARARGS,
     "capture_status(context, stream) -> 0 when it is not captured; negative: the driver's error"},
    {"calls", launcher_calls, METH_VARARGS, "calls(tensors, scalars, outputs, most_calls, fail) -> Calls"},
    {"routes", launcher_routes, METH_VARARGS, "routes(tensors, scalars, choices, most_routes) -> Routes"},
    {NULL, NULL, 0, NULL},
};
static PyType_Slot launcher_slots[] = {
    {Py_tp_new, launcher_new}, {Py_tp_dealloc, launcher_free}, {Py_tp_methods, launcher_methods}, {0, NULL}};
static PyType_Spec launcher_spec = {"dsagen_launcher.Launcher", sizeof(Launcher), 0, Py_TPFLAGS_DEFAULT, launcher_slots};

static struct PyModuleDef module_definition = {PyModuleDef_HEAD_INIT, "dsagen_launcher", NULL, -1, NULL, NULL, NULL, NULL, NULL};

static int add_type(PyObject* module, const char* name, PyType_Spec* spec, PyObject** type) {
  *type = PyType_FromSpec(spec);
  return *type == NULL ? -1 : PyModule_AddObjectRef(module, name, *type);
}

PyMODINIT_FUNC PyInit_dsagen_launcher(void) {
  static PyObject *launcher_type, *entrance_type;
  PyObject* module = PyModule_Create(&module_definition);
  if (module == NULL) return NULL;
  if (add_type(module, "Calls", &calls_spec, &calls_type) != 0 || add_type(module, "Routes", &routes_spec, &routes_type) != 0 ||
      add_type(module, "Launcher", &launcher_spec, &launcher_type) != 0 ||
      add_type(module, "Entrance", &entrance_spec, &entrance_type) != 0) {
    Py_DECREF(module);
    return NULL;
  }
  return module;
}
