// The type `Calls`: the calls of an op, or of a plan, that have been checked and launched before.
#pragma once

#include "launch.h"

static int is_count(const Form* form, Py_ssize_t count) {
  if (count == form->tensor_count + form->scalar_count) return 1;
  PyErr_Format(PyExc_TypeError, "a call has %d tensors and %d scalars, got %zd values", form->tensor_count, form->scalar_count,
               count);
  return 0;
}

static PyObject* repeat_known(Calls* self, PyObject* const* args) {
  Reading reading;
  if (self->table.count == 0 || self->stream_mode == kNoStream || !read_call(&self->form, args, &reading)) Py_RETURN_FALSE;
  Call* call = find_entry(&self->table, &reading);
  void* stream;
  if (call == NULL || !read_stream(self->form.launcher, &reading, &stream)) Py_RETURN_FALSE;
  return repeat_call(self, call, args, &reading, stream);
}

static PyObject* calls_repeat(PyObject* object, PyObject* const* args, Py_ssize_t count) {
  Calls* self = (Calls*)object;
  return is_count(&self->form, count) ? repeat_known(self, args) : NULL;
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
    if (parse_launch(PyTuple_GetItem(launches, i), self->form.tensor_count, &call->launches[i]) != 0) {
      free_call(call);
      return NULL;
    }
  }
  return call;
}

// Of each output that `values` lack, what a new one is to be like. 0 where there is none to tell.
static int parse_news(const Calls* self, PyObject* const* values, PyObject* news, Call* call) {
  if (!PyTuple_Check(news)) return 0;
  Py_ssize_t count = PyTuple_Size(news);
  for (Py_ssize_t i = 0; i < count; ++i) {
    int place;
    PyObject* hollow;
    if (!PyArg_ParseTuple(PyTuple_GetItem(news, i), "iO", &place, &hollow)) return 0;
    if (i == kMostNewOutputs || place < 0 || place >= self->form.tensor_count || !(self->outputs >> place & 1) ||
        values[place] != Py_None) {
      PyErr_Format(PyExc_ValueError, "new tensor %zd at place %d: of at most %d, each an output that the call lacks", i, place,
                   (int)kMostNewOutputs);
      return 0;
    }
    call->news[call->new_count++] = (NewOutput){place, Py_NewRef(hollow)};
  }
  return 1;
}

static void forget_all(Calls* self) {
  for (Call* call; (call = pop_entry(&self->table)) != NULL;) free_call(call);
}

static PyObject* calls_remember(PyObject* object, PyObject* args) {
  Calls* self = (Calls*)object;
  PyObject *values, *launches, *steps, *describe;
  unsigned long long context;
  if (!PyArg_ParseTuple(args, "O!KO!OO", &PyTuple_Type, &values, &context, &PyTuple_Type, &launches, &steps, &describe))
    return NULL;
  Py_ssize_t count = PyTuple_Size(values);
  if (!is_count(&self->form, count)) return NULL;
  PyObject* items[kMostTensors + kMostScalars];
  for (Py_ssize_t i = 0; i < count; ++i) items[i] = PyTuple_GetItem(values, i);
  Reading reading;
  if (!read_call(&self->form, items, &reading)) Py_RETURN_FALSE;
  if (find_entry(&self->table, &reading) != NULL) Py_RETURN_TRUE;
  Call* call = make_call(self, context, launches, steps);
  if (call == NULL) return NULL;
  PyObject* news = PyObject_CallNoArgs(describe);
  int is_told = news != NULL && parse_news(self, items, news, call);
  Py_XDECREF(news);
  // Telling runs Python, so another thread may have been faster.
  int is_new = is_told && find_entry(&self->table, &reading) == NULL;
  if (is_new && self->table.count >= self->table.most) forget_all(self);
  if (!is_new || add_entry(&self->table, &call->key, &reading) != 0) free_call(call);
  return PyErr_Occurred() ? NULL : PyBool_FromLong(is_told);
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

static Py_ssize_t calls_length(PyObject* object) { return ((Calls*)object)->table.count; }

static int calls_traverse(PyObject* object, visitproc visit, void* arg) {
  Calls* self = (Calls*)object;
  Py_VISIT(Py_TYPE(object));
  Py_VISIT(self->form.launcher);
  Py_VISIT(self->fail);
  for (int i = 0; i < kBuckets; ++i) {
    for (Key* key = self->table.buckets[i]; key != NULL; key = key->next) {
      Call* call = (Call*)key;
      Py_VISIT(call->steps);
      for (int n = 0; n < call->new_count; ++n) Py_VISIT(call->news[n].hollow);
    }
  }
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
  Py_XDECREF((PyObject*)self->form.launcher);
  ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
  Py_DECREF(type);
}

static PyMethodDef calls_methods[] = {
    {"repeat", (PyCFunction)(void (*)(void))calls_repeat, METH_FASTCALL, "repeat(*tensors, *scalars) -> whether it was launched, or all outputs where it made some"},
    {"remember", calls_remember, METH_VARARGS, "remember(values, context, launches, steps, new outputs' teller) -> whether its key can be told"},
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
