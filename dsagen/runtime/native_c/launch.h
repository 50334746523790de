// Launching the kernels of a call. See launcher.c for which lock covers what.
#pragma once

#include "table.h"

static CUresult launch_one(const Launcher* launcher, const Launch* launch, void* block, void* stream) {
  LaunchAttribute attributes[kMostAttributes];
  LaunchConfig config = {launch->grid, 1, 1, launch->threads, 1, 1, launch->shared_bytes, stream, attributes, 0};
  if (launch->overlaps) {
    LaunchAttribute* attribute = &attributes[config.attribute_count++];
    memset(attribute, 0, sizeof *attribute);
    attribute->id = kAttributeOverlap;
    attribute->value.overlaps = 1;
  }
  if (launch->cluster > 1) {
    LaunchAttribute* attribute = &attributes[config.attribute_count++];
    memset(attribute, 0, sizeof *attribute);
    attribute->id = kAttributeCluster;
    attribute->value.cluster.x = launch->cluster;
    attribute->value.cluster.y = attribute->value.cluster.z = 1;
  }
  if (config.attribute_count == 0) config.attributes = NULL;
  void* params[1] = {block};
  return launcher->launch_kernel(&config, launch->function, params, NULL);
}

// The driver's answer whether a stream is being captured: 0 when not; negative: its error.
static long capture_status(const Launcher* launcher, void* context, void* stream) {
  void* current = NULL;
  int status = 0;
  CUresult code = launcher->current_context(&current);
  int pushed = code == 0 && current != context;
  if (pushed) code = launcher->push_context(context);
  if (code == 0) {
    code = launcher->is_capturing(stream, &status);
    if (pushed) launcher->pop_context(&current);
  }
  return code == 0 ? status : -(long)code;
}

typedef struct {
  CUresult code;
  int index;
} Outcome;

// Launch all with the context current; `blocks` are the arguments, one after the other. No Python in here.
static Outcome launch_all(const Launcher* launcher, void* context, void* stream, const Launch* launches, int count,
                          unsigned char blocks[][kMostBlockBytes]) {
  void* current = NULL;
  Outcome outcome = {launcher->current_context(&current), -1};
  if (outcome.code != 0) return outcome;
  int pushed = current != context;
  if (pushed && (outcome.code = launcher->push_context(context)) != 0) return outcome;
  for (int i = 0; i < count && outcome.code == 0; ++i) {
    outcome.index = i;
    outcome.code = launch_one(launcher, &launches[i], blocks[i], stream);
  }
  if (pushed) {
    CUresult popped = launcher->pop_context(&current);
    if (outcome.code == 0 && popped != 0) outcome = (Outcome){popped, -1};
  }
  return outcome;
}

static void free_call(Call* call) {
  if (--call->references > 0) return;
  Py_XDECREF(call->steps);
  for (int i = 0; i < call->new_count; ++i) Py_DECREF(call->news[i].hollow);
  PyMem_Free(call->key.words);
  PyMem_Free(call);
}

// Raise what `fail` makes of a refused launch.
static PyObject* raise_failure(Calls* self, Outcome outcome, const Call* call, void* stream, const unsigned char* block) {
  Py_ssize_t size = outcome.index < 0 ? 0 : (Py_ssize_t)call->launches[outcome.index].block_bytes;
  PyObject* answer = PyObject_CallFunction(self->fail, "iiy#KO", outcome.code, outcome.index, (const char*)block, size,
                                           (unsigned long long)(uintptr_t)stream, call->steps);
  if (answer != NULL) {
    Py_DECREF(answer);
    PyErr_SetString(PyExc_RuntimeError, "a launch failed, and nothing was raised for it");
  }
  return NULL;
}

static PyObject* launch_call(Calls* self, Call* call, const Reading* reading, void* stream) {
  unsigned char blocks[kMostLaunches][kMostBlockBytes] __attribute__((aligned(16)));
  for (int i = 0; i < call->launch_count; ++i) {
    const Launch* launch = &call->launches[i];
    memcpy(blocks[i], launch->block, launch->block_bytes);
    for (unsigned p = 0; reading != NULL && p < launch->patch_count; ++p) {
      uint64_t address = reading->addresses[launch->patches[p].tensor] + launch->patches[p].distance;
      memcpy(blocks[i] + launch->patches[p].offset, &address, sizeof address);
    }
  }
  call->references += 1;
  Py_INCREF((PyObject*)self);
  Outcome outcome;
  Py_BEGIN_ALLOW_THREADS
  pthread_mutex_lock(&self->mutex);
  outcome = launch_all(self->form.launcher, call->context, stream, call->launches, call->launch_count, blocks);
  pthread_mutex_unlock(&self->mutex);
  Py_END_ALLOW_THREADS
  PyObject* result = outcome.code == 0 ? Py_NewRef(Py_True)
                                       : raise_failure(self, outcome, call, stream, blocks[outcome.index < 0 ? 0 : outcome.index]);
  free_call(call);
  Py_DECREF((PyObject*)self);
  return result;
}

// All outputs of a call in the order of their places, with new ones where it is known to bring none; their addresses are
// added to the reading. NULL without an exception where they cannot be had, for Python to say why.
static PyObject* make_outputs(const Calls* self, const Call* call, PyObject* const* args, Reading* reading) {
  const Launcher* launcher = self->form.launcher;
  PyObject* outputs = PyTuple_New(__builtin_popcount(self->outputs));
  Py_ssize_t next = 0;
  for (int place = 0; outputs != NULL && place < self->form.tensor_count; ++place) {
    if (!(self->outputs >> place & 1)) continue;
    PyObject* hollow = NULL;
    for (int i = 0; i < call->new_count; ++i)
      if (call->news[i].place == place) hollow = call->news[i].hollow;
    PyObject* output =
        hollow == NULL ? Py_NewRef(args[place]) : PyObject_CallFunctionObjArgs(launcher->empty_like, hollow, NULL);
    if (output == NULL && PyErr_ExceptionMatches(PyExc_Exception)) PyErr_Clear();
    if (output != NULL) PyTuple_SetItem(outputs, next++, output);
    if (output == NULL || (hollow != NULL && !read_new(launcher, output, place, reading))) Py_CLEAR(outputs);
  }
  return outputs;
}

// Launch a known call again: False where it has to be checked, True, or all of its outputs where some of them are new.
static PyObject* repeat_call(Calls* self, Call* call, PyObject* const* args, Reading* reading, void* stream) {
  int may = self->stream_mode == kAnyStream || (self->stream_mode == kOneStream && stream == self->stream);
  if (!may || has_overlap(self, reading)) Py_RETURN_FALSE;
  if (call->new_count == 0) return launch_call(self, call, reading, stream);
  call->references += 1;
  PyObject* outputs = make_outputs(self, call, args, reading);
  PyObject* result = outputs;
  if (outputs != NULL) {
    PyObject* launched = launch_call(self, call, reading, stream);
    if (launched == NULL) result = NULL;
    Py_DECREF(launched == NULL ? outputs : launched);
  } else if (!PyErr_Occurred()) {
    result = Py_NewRef(Py_False);
  }
  free_call(call);
  return result;
}
