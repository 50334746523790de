// The type `Entrance`: what torch calls for an op. It puts the arguments where a table of calls has them and leaves to Python
// what no table knows.
#pragma once

#include "routes.h"

enum { kMostParameters = 24, kHandle = -1, kAbsent = -2, kMostReturned = 3 };

typedef struct {
  PyObject_HEAD
  // By handle a table (Calls or Routes) or a tuple of them; names of parameters to their number; the function for all
  // other calls.
  PyObject *tables, *numbers, *fallback;
  // The values of a call that gives none.
  PyObject* defaults;
  int parameter_count, item_count, returned;
  // Where a parameter's value goes, or what it is.
  int places[kMostParameters];
  PyObject* items[kMostTensors + kMostScalars];
} Entrance;

// Sort the arguments. The handle, or NULL for a call that no table can know.
static PyObject* sort_arguments(const Entrance* self, PyObject* args, PyObject* keywords, PyObject** items) {
  memcpy(items, self->items, (size_t)self->item_count * sizeof *items);
  PyObject* handle = NULL;
  Py_ssize_t count = PyTuple_Size(args), position = 0;
  if (count > self->parameter_count) return NULL;
  PyObject *name, *value;
  for (Py_ssize_t i = 0; i < count || (keywords != NULL && PyDict_Next(keywords, &position, &name, &value)); ++i) {
    int number = (int)i;
    if (i < count) {
      value = PyTuple_GetItem(args, i);
    } else {
      PyObject* found = PyDict_GetItemWithError(self->numbers, name);
      if (found == NULL) return NULL;
      number = (int)PyLong_AsLong(found);
    }
    int place = self->places[number];
    if (place >= 0) {
      items[place] = value;
    } else if (place == kHandle) {
      handle = value;
    } else if (value != Py_None) {
      return NULL;
    }
  }
  return handle;
}

// What the op returns of a call that was launched: of its outputs the first ones.
static PyObject* returned_of(const Entrance* self, PyObject* found) {
  if (self->returned == 0) return Py_NewRef(Py_None);
  if (!PyTuple_Check(found) || PyTuple_Size(found) < self->returned) {
    PyErr_SetString(PyExc_RuntimeError, "a launched call has made fewer outputs than its op returns");
    return NULL;
  }
  if (self->returned == 1) return Py_NewRef(PyTuple_GetItem(found, 0));
  return PyTuple_GetSlice(found, 0, self->returned);
}

static int takes_items(const Entrance* self, const Form* form) {
  return form->tensor_count + form->scalar_count == self->item_count;
}

// As repeat of the table; NULL without an exception where it is none that takes the items.
static PyObject* repeat_in(const Entrance* self, PyObject* table, PyObject* const* items) {
  PyObject* type = (PyObject*)Py_TYPE(table);
  if (type == calls_type && takes_items(self, &((Calls*)table)->form)) return repeat_known((Calls*)table, items);
  if (type == routes_type && takes_items(self, &((Routes*)table)->form)) return repeat_route((Routes*)table, items);
  return NULL;
}

// As repeat_in, of the first table that knows the call.
static PyObject* repeat_in_any(const Entrance* self, PyObject* tables, PyObject* const* items) {
  if (!PyTuple_Check(tables)) return repeat_in(self, tables, items);
  PyObject* found = NULL;
  for (Py_ssize_t i = 0; i < PyTuple_Size(tables); ++i) {
    Py_XDECREF(found);
    found = repeat_in(self, PyTuple_GetItem(tables, i), items);
    if (found == NULL ? PyErr_Occurred() != NULL : found != Py_False) return found;
  }
  return found;
}

static PyObject* entrance_call(PyObject* object, PyObject* args, PyObject* keywords) {
  Entrance* self = (Entrance*)object;
  PyObject* items[kMostTensors + kMostScalars];
  PyObject* handle = sort_arguments(self, args, keywords, items);
  PyObject* table = handle == NULL ? NULL : PyDict_GetItemWithError(self->tables, handle);
  if (table == NULL && PyErr_Occurred()) return NULL;
  PyObject* found = NULL;
  if (table != NULL) {
    Py_INCREF(table);
    found = repeat_in_any(self, table, items);
    Py_DECREF(table);
    if (found == NULL && PyErr_Occurred()) return NULL;
  }
  if (found == NULL || found == Py_False) {
    Py_XDECREF(found);
    return PyObject_Call(self->fallback, args, keywords);
  }
  PyObject* result = returned_of(self, found);
  Py_DECREF(found);
  return result;
}

static int parse_parameters(Entrance* self, PyObject* parameters) {
  Py_ssize_t count = PyTuple_Size(parameters), items = PyTuple_Size(self->defaults);
  if (count > kMostParameters || items > kMostTensors + kMostScalars || self->returned < 0 || self->returned > kMostReturned) {
    PyErr_Format(PyExc_ValueError, "%zd parameters, %zd values, %d results: at most %d, %d and %d", count, items, self->returned,
                 (int)kMostParameters, (int)(kMostTensors + kMostScalars), (int)kMostReturned);
    return -1;
  }
  self->parameter_count = (int)count;
  self->item_count = (int)items;
  for (Py_ssize_t i = 0; i < items; ++i) self->items[i] = PyTuple_GetItem(self->defaults, i);
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* name;
    if (!PyArg_ParseTuple(PyTuple_GetItem(parameters, i), "Ui", &name, &self->places[i])) return -1;
    if (self->places[i] < kAbsent || self->places[i] >= items) {
      PyErr_Format(PyExc_ValueError, "parameter %zd at place %d of %zd", i, self->places[i], items);
      return -1;
    }
    PyObject* number = PyLong_FromSsize_t(i);
    int failed = number == NULL || PyDict_SetItem(self->numbers, name, number) != 0;
    Py_XDECREF(number);
    if (failed) return -1;
  }
  return 0;
}

static PyObject* entrance_new(PyTypeObject* type, PyObject* args, PyObject* keywords) {
  PyObject *tables, *fallback, *parameters, *defaults;
  int returned;
  if (keywords != NULL && PyDict_Size(keywords) != 0) {
    PyErr_SetString(PyExc_TypeError, "Entrance takes no keywords");
    return NULL;
  }
  if (!PyArg_ParseTuple(args, "O!OO!O!i", &PyDict_Type, &tables, &fallback, &PyTuple_Type, &parameters, &PyTuple_Type,
                        &defaults, &returned))
    return NULL;
  Entrance* self = (Entrance*)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
  if (self == NULL) return NULL;
  self->tables = Py_NewRef(tables);
  self->fallback = Py_NewRef(fallback);
  self->defaults = Py_NewRef(defaults);
  self->numbers = PyDict_New();
  self->returned = returned;
  if (self->numbers == NULL || parse_parameters(self, parameters) != 0) {
    Py_DECREF((PyObject*)self);
    return NULL;
  }
  return (PyObject*)self;
}

static void entrance_free(PyObject* object) {
  PyTypeObject* type = Py_TYPE(object);
  Entrance* self = (Entrance*)object;
  Py_XDECREF(self->tables);
  Py_XDECREF(self->numbers);
  Py_XDECREF(self->fallback);
  Py_XDECREF(self->defaults);
  ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
  Py_DECREF(type);
}

static PyType_Slot entrance_slots[] = {
    {Py_tp_new, entrance_new}, {Py_tp_dealloc, entrance_free}, {Py_tp_call, entrance_call}, {0, NULL}};
static PyType_Spec entrance_spec = {"dsagen_launcher.Entrance", sizeof(Entrance), 0, Py_TPFLAGS_DEFAULT, entrance_slots};
