// Launching the kernels of a call. See launcher.c for which lock covers what.
#pragma once

#include "call.h"

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
  PyMem_Free(call->words);
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
  outcome = launch_all(self->launcher, call->context, stream, call->launches, call->launch_count, blocks);
  pthread_mutex_unlock(&self->mutex);
  Py_END_ALLOW_THREADS
  PyObject* result = outcome.code == 0 ? Py_NewRef(Py_True)
                                       : raise_failure(self, outcome, call, stream, blocks[outcome.index < 0 ? 0 : outcome.index]);
  free_call(call);
  Py_DECREF((PyObject*)self);
  return result;
}
