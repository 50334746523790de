// Tables of what has been read before.
#pragma once

#include "call.h"

static uint64_t hash_words(const uint64_t* words, int count) {
  uint64_t hash = 0x9E3779B97F4A7C15u;
  for (int i = 0; i < count; ++i) {
    hash = (hash ^ words[i]) * 0xD6E8FEB86659FD93u;
    hash ^= hash >> 32;
  }
  return hash;
}

static int is_same(const Key* key, const Reading* reading) {
  return key->word_count == reading->word_count &&
         memcmp(key->words, reading->words, (size_t)reading->word_count * sizeof *reading->words) == 0;
}

static void* find_entry(Table* table, const Reading* reading) {
  if (table->latest != NULL && is_same(table->latest, reading)) return table->latest;
  uint64_t hash = hash_words(reading->words, reading->word_count);
  for (Key* key = table->buckets[hash % kBuckets]; key != NULL; key = key->next)
    if (key->hash == hash && is_same(key, reading)) return table->latest = key;
  return NULL;
}

// Put an entry, whose first member is its key, where the reading finds it. -1 with an exception without memory.
static int add_entry(Table* table, Key* key, const Reading* reading) {
  size_t bytes = (size_t)reading->word_count * sizeof *reading->words;
  key->words = PyMem_Malloc(bytes);
  if (key->words == NULL) {
    PyErr_NoMemory();
    return -1;
  }
  memcpy(key->words, reading->words, bytes);
  key->word_count = reading->word_count;
  key->hash = hash_words(reading->words, reading->word_count);
  key->next = table->buckets[key->hash % kBuckets];
  table->buckets[key->hash % kBuckets] = key;
  table->count += 1;
  return 0;
}

// Take any entry out; NULL from an empty table. What frees it may run Python, so the table is whole at each step.
static void* pop_entry(Table* table) {
  table->latest = NULL;
  for (int i = 0; i < kBuckets && table->count > 0; ++i) {
    Key* key = table->buckets[i];
    if (key == NULL) continue;
    table->buckets[i] = key->next;
    table->count -= 1;
    return key;
  }
  return NULL;
}
