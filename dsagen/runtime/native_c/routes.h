// The type `Routes`: which plan serves a call that names none, found by all that can be read of the call and its stream.
#pragma once

#include "calls.h"

typedef struct {
  Key key;
  Calls* calls;
  // Keeps the memory that the calls use.
  PyObject* owner;
} Route;

// Scalars that say which plan is wanted and are no part of its calls come last.
typedef struct {
  PyObject_HEAD
  Form form;
  int choice_count;
  Table table;
} Routes;

// Read a call with the stream behind it. 0 when Python has to look at it; else the words that the plan's own table knows.
static int read_route(const Routes* self, PyObject* const* args, Reading* reading, void** stream) {
  if (!read_call(&self->form, args, reading) || !read_stream(self->form.launcher, reading, stream)) return 0;
  int own_words = reading->word_count - self->choice_count * kScalarWords;
  reading->words[reading->word_count++] = (uint64_t)(uintptr_t)*stream;
  return own_words;
}

static PyObject* repeat_route(Routes* self, PyObject* const* args) {
  Reading reading;
  void* stream;
  int own_words = self->table.count == 0 ? 0 : read_route(self, args, &reading, &stream);
  Route* route = own_words == 0 ? NULL : find_entry(&self->table, &reading);
  if (route == NULL) Py_RETURN_FALSE;
  Calls* calls = route->calls;
  PyObject* owner = Py_NewRef(route->owner);
  Py_INCREF((PyObject*)calls);
  reading.word_count = own_words;
  Call* call = find_entry(&calls->table, &reading);
  // A captured call changes who may use the plan from then on.
  int is_ours = call != NULL && capture_status(calls->form.launcher, call->context, stream) == 0;
  PyObject* result = is_ours ? repeat_call(calls, call, args, &reading, stream) : Py_NewRef(Py_False);
  Py_DECREF((PyObject*)calls);
  Py_DECREF(owner);
  return result;
}

static PyObject* routes_repeat(PyObject* object, PyObject* const* args, Py_ssize_t count) {
  Routes* self = (Routes*)object;
  return is_count(&self->form, count) ? repeat_route(self, args) : NULL;
}

static void free_route(Route* route) {
  Py_DECREF((PyObject*)route->calls);
  Py_DECREF(route->owner);
  PyMem_Free(route->key.words);
  PyMem_Free(route);
}

static void forget_routes(Routes* self) {
  for (Route* route; (route = pop_entry(&self->table)) != NULL;) free_route(route);
}

static PyObject* routes_add(PyObject* object, PyObject* args) {
  Routes* self = (Routes*)object;
  PyObject *values, *calls, *owner;
  if (!PyArg_ParseTuple(args, "O!O!O", &PyTuple_Type, &values, (PyTypeObject*)calls_type, &calls, &owner)) return NULL;
  const Form* form = &((Calls*)calls)->form;
  if (form->tensor_count != self->form.tensor_count || form->scalar_count + self->choice_count != self->form.scalar_count) {
    PyErr_Format(PyExc_ValueError, "calls of %d tensors and %d scalars: expected %d and %d", form->tensor_count,
                 form->scalar_count, self->form.tensor_count, self->form.scalar_count - self->choice_count);
    return NULL;
  }
  Py_ssize_t count = PyTuple_Size(values);
  if (!is_count(&self->form, count)) return NULL;
  PyObject* items[kMostTensors + kMostScalars];
  for (Py_ssize_t i = 0; i < count; ++i) items[i] = PyTuple_GetItem(values, i);
  Reading reading;
  void* stream;
  if (read_route(self, items, &reading, &stream) == 0) Py_RETURN_FALSE;
  Route* route = find_entry(&self->table, &reading);
  if (route != NULL && route->calls == (Calls*)calls && route->owner == owner) Py_RETURN_TRUE;
  // Whatever has taken a plan's place concerns more calls than this one.
  if (route != NULL || self->table.count >= self->table.most) forget_routes(self);
  route = PyMem_Calloc(1, sizeof *route);
  if (route == NULL) return PyErr_NoMemory();
  route->calls = (Calls*)Py_NewRef(calls);
  route->owner = Py_NewRef(owner);
  if (add_entry(&self->table, &route->key, &reading) != 0) {
    free_route(route);
    return NULL;
  }
  Py_RETURN_TRUE;
}

static PyObject* routes_forget(PyObject* object, PyObject* unused) {
  (void)unused;
  forget_routes((Routes*)object);
  Py_RETURN_NONE;
}

static Py_ssize_t routes_length(PyObject* object) { return ((Routes*)object)->table.count; }

static int routes_traverse(PyObject* object, visitproc visit, void* arg) {
  Routes* self = (Routes*)object;
  Py_VISIT(Py_TYPE(object));
  Py_VISIT(self->form.launcher);
  for (int i = 0; i < kBuckets; ++i) {
    for (Key* key = self->table.buckets[i]; key != NULL; key = key->next) {
      Py_VISIT(((Route*)key)->calls);
      Py_VISIT(((Route*)key)->owner);
    }
  }
  return 0;
}

static int routes_clear(PyObject* object) {
  forget_routes((Routes*)object);
  return 0;
}

static void routes_free(PyObject* object) {
  PyTypeObject* type = Py_TYPE(object);
  PyObject_GC_UnTrack(object);
  routes_clear(object);
  Py_XDECREF((PyObject*)((Routes*)object)->form.launcher);
  ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
  Py_DECREF(type);
}

static PyMethodDef routes_methods[] = {
    {"repeat", (PyCFunction)(void (*)(void))routes_repeat, METH_FASTCALL, "repeat(*tensors, *scalars, *choices), as of Calls"},
    {"add", routes_add, METH_VARARGS, "add(values, calls, owner) -> whether its key can be told"},
    {"forget", routes_forget, METH_NOARGS, "forget every route"},
    {NULL, NULL, 0, NULL},
};
static PyType_Slot routes_slots[] = {
    {Py_tp_dealloc, routes_free},    {Py_tp_traverse, routes_traverse}, {Py_tp_clear, routes_clear},
    {Py_tp_methods, routes_methods}, {Py_sq_length, routes_length},     {0, NULL},
};
static PyType_Spec routes_spec = {"dsagen_launcher.Routes", sizeof(Routes), 0,
                                  Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION, routes_slots};
static PyObject* routes_type;
